"""Other pages, thieves, other accounts and hostile names against a session in a real Chromium."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from uuid import uuid4

import httpx
import pytest

from tests.e2e.conftest import CHAT
from tests.e2e.dashboard.conftest import Tab
from tests.e2e.dashboard.test_dashboard import HOSTILE
from tests.variants import some

# What another page tries, each with the cookies of this server: forms that it sends, what it fetches, and frames.
EVIL = """<!doctype html><title>evil</title><body><script>
const there = "THERE", account = there + "/client/v4/accounts/local", name = "NAME", told = [];
const note = (what) => (result) => told.push([what, String(result)]);
function form(path, enctype, fields) {
  const sent = document.createElement("form");
  Object.assign(sent, {method: "POST", action: path, enctype, target: "sink"});
  for (const [key, value] of fields) {
    const input = document.createElement("input");
    Object.assign(input, {type: "hidden", name: key, value});
    sent.append(input);
  }
  document.body.append(sent);
  sent.submit();
}
async function attack() {
  const sink = document.createElement("iframe");
  sink.name = "sink";
  document.body.append(sink);
  const made = JSON.stringify({name, scopes: ["admin", "read", "inference"]});
  const forms = [
    [account + "/tokens", "text/plain", [[made.slice(0, -1) + ', "x": "', '"}']]],
    [there + "/client/v4/accounts", "text/plain", [[JSON.stringify({name}).slice(0, -1) + ', "x": "', '"}']]],
    [there + "/dashboard/session", "text/plain", [['{"key": "THEIRS", "x": "', '"}']]],
    [account + "/ai/run/CHAT", "text/plain", [['{"prompt": "' + name + '", "x": "', '"}']]],
    [account + "/ai/finetunes", "multipart/form-data", [["model", "CHAT"], ["name", name]]],
    [account + "/ai/batches?model=CHAT", "text/plain", [['{"prompt": "' + name + '", "x": "', '"}']]],
  ];
  for (const one of forms) {
    const loaded = new Promise((done) => { sink.onload = done; });
    form(...one);
    await Promise.race([loaded, new Promise((done) => setTimeout(done, 20000))]);
  }
  const asked = [["GET", "/v1/status"], ["GET", "/client/v4/accounts/local/tokens"], ["GET", "/dashboard/session"],
    ["POST", "/client/v4/accounts/local/tokens", made],
    ["POST", "/client/v4/accounts/local/ai/run/CHAT", '{"prompt": "' + name + '"}'],
    ["DELETE", "/dashboard/session"], ["PUT", "/client/v4/accounts/local", '{"name": "' + name + '"}']];
  for (const mode of ["cors", "no-cors"]) {
    for (const [method, path, body] of asked) {
      if (mode === "no-cors" && !["GET", "POST"].includes(method)) continue;
      await fetch(there + path, {method, body, mode, credentials: "include"})
        .then((answer) => answer.text()).then(note(mode + " " + path), () => {});
    }
    const headers = {"content-type": "application/json", "x-csrf-token": "x"};
    await fetch(account + "/tokens", {method: "POST", body: made, mode, credentials: "include", headers})
      .then((one) => one.text()).then(note("header"), () => {});
  }
  const frame = document.createElement("iframe");
  frame.src = there + "/dashboard";
  const framed = new Promise((done) => { frame.onload = done; });
  document.body.append(frame);
  await Promise.race([framed, new Promise((done) => setTimeout(done, 20000))]);
  try { note("frame")(frame.contentWindow.document.body.innerText); } catch {}
  for (const path of ["/v1/status", "/dashboard/session"]) {
    await new Promise((done) => {
      const tag = document.createElement("script");
      Object.assign(tag, {src: there + path, onload: done, onerror: done});
      document.body.append(tag);
    });
  }
  return told;
}
</script>"""


@pytest.fixture
def elsewhere(stack) -> Iterator[tuple[int, dict[str, str]]]:
    """The port of another server of this machine, whose page is filled with these words."""
    words = {"THERE": stack.url, "CHAT": CHAT}

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = EVIL
            for word, value in words.items():
                page = page.replace(word, value)
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port, words
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def team(http, stack) -> Iterator[tuple[str, str]]:
    """Another account, with a hostile name, and a key of it with all scopes."""
    accounts = stack.url + "/client/v4/accounts"
    made = http.post(accounts, json={"name": f"{HOSTILE}{uuid4().hex[:6]}"}).json()
    if not made["success"]:
        made = http.post(accounts, json={"name": f"team-{uuid4().hex[:6]}"}).json()
    account = made["result"]["id"]
    scopes = {"name": HOSTILE, "scopes": ["inference", "read", "admin"]}
    key = http.post(f"{accounts}/{account}/tokens", json=scopes).json()["result"]["value"]
    yield account, key
    http.delete(f"{accounts}/{account}")


def seen(answer) -> tuple[str, int, bool]:
    """Where a request went, how it was answered, and whether a cookie came along."""
    return answer.url, answer.status, "cookie" in answer.request.all_headers()


# The same site, and another one.
@pytest.mark.parametrize("host", some(["127.0.0.1", "localhost"], "localhost"))
def test_other_pages_learn_nothing_and_change_nothing(tab, http, stack, elsewhere, team, host):
    port, words = elsewhere
    words |= {"NAME": f"evil-{uuid4().hex[:8]}", "THEIRS": team[1]}
    tab.open("#/settings")
    tab.page.get_by_role("heading", name="Settings", exact=True).wait_for()
    before = http.get(stack.url + "/client/v4/accounts/local").json()["result"]
    evil = tab.page.context.new_page()
    sent: list[tuple[str, int, bool]] = []
    evil.on("response", lambda one: one.url.startswith(stack.url) and sent.append(seen(one)))
    evil.goto(f"http://{host}:{port}/")
    told = evil.evaluate("attack()")
    assert [one for one in told if one[1].strip()] == []
    # It did knock, from the same site with the cookie, and nothing but the page's own frame was answered.
    asked: list[tuple[str, int, bool]] = []
    for _ in range(200):  # the browser tells of answers when it comes to it
        asked = [one for one in sent if "/dashboard/static/" not in one[0] and one[0] != f"{stack.url}/dashboard"]
        if len(asked) >= 10:
            break
        evil.wait_for_timeout(50)
    assert len(asked) >= 10 and [one for one in asked if one[1] < 400] == []
    assert any(cookie for _, _, cookie in asked) == (host == "127.0.0.1")
    tokens = http.get(stack.url + "/client/v4/accounts/local/tokens").text
    accounts = http.get(stack.url + "/client/v4/accounts").text
    kept = http.get("/finetunes").text + http.get("/batches").text
    assert words["NAME"] not in tokens + accounts + kept
    assert http.get(stack.url + "/client/v4/accounts/local").json()["result"] == before
    # The session is whose it was, and goes on.
    tab.page.reload()
    tab.page.get_by_role("heading", name="Settings", exact=True).wait_for()
    assert "operator" in tab.page.locator(".who").inner_text()
    evil.close()


def test_halves_of_a_session_open_nothing_and_its_end_ends_it(new_tab, stack):
    tab = new_tab()
    tab.sign_in(stack.key, "#/settings")
    [cookie] = tab.page.context.cookies()
    token = tab.page.evaluate("localStorage.getItem('serve-app.csrf')")
    whole = {"Cookie": f"{cookie['name']}={cookie['value']}", "X-Csrf-Token": token}
    with httpx.Client(base_url=stack.url) as thief:
        assert thief.get("/v1/status", headers=whole).status_code == 200
        for name in whole:
            half = {key: value for key, value in whole.items() if key != name}
            assert thief.get("/v1/status", headers=half).status_code in (401, 403)
        tab.page.get_by_role("button", name="Sign out", exact=True).first.click()
        tab.page.get_by_label("API key", exact=True).wait_for()
        # An old cookie is worth nothing, nor is it in a browser.
        assert thief.get("/v1/status", headers=whole).status_code == 401
    tab.page.context.add_cookies([cookie])
    tab.page.evaluate("token => localStorage.setItem('serve-app.csrf', token)", token)
    tab.page.reload()
    tab.page.get_by_label("API key", exact=True).wait_for()


def test_an_account_sees_its_own_and_hostile_names_are_text(new_tab, tab, http, stack, team):
    account, key = team
    lines = [{"prompt": "What does math.sqrt do?", "max_tokens": 2, "external_reference": HOSTILE}]
    mine = http.post("/batches", params={"model": CHAT}, content="\n".join(map(json.dumps, lines))).json()["result"]
    asked = http.post(f"/run/{CHAT}", json={"prompt": HOSTILE, "max_tokens": 2})
    request = asked.headers["cf-ray"]

    other: Tab = new_tab()
    other.sign_in(key, "#/requests")
    page = other.page
    page.get_by_role("heading", name="Requests", exact=True).wait_for()
    for place, words in (
        (f"requests/{request}", "No request of this account has this id"),
        ("batches", "No batches yet"),
        ("requests", "No requests here"),
        ("usage", "Nothing was used in this time"),
        ("cluster", "shown to the operator"),
    ):
        other.open(f"#/{place}")
        page.get_by_text(words).first.wait_for()
        assert request[:12] not in page.locator("main").inner_text() or place.startswith("requests/")
    # What the page's own session gets of the other account's routes, by hand.
    refused = page.evaluate(
        """async (paths) => {
            const headers = { "x-csrf-token": localStorage.getItem("serve-app.csrf") };
            return Promise.all(paths.map(async (path) => (await fetch(path, { headers })).status));
        }""",
        [
            f"/client/v4/accounts/local/ai/batches/{mine['id']}/results",
            f"/client/v4/accounts/{account}/ai/batches/{mine['id']}/results",
            f"/client/v4/accounts/local/ai/usage/{request}",
            f"/v1/requests/{request}",
            "/client/v4/accounts/local/tokens",
            "/v1/cluster",
            "/metrics",
        ],
    )
    assert set(refused) <= {403, 404}, refused

    # The operator sees the account's name, its key's and a batch's reference as text.
    for place in ("keys", f"keys?account={account}", "usage?by=account", "overview", "requests", "batches"):
        tab.open(f"#/{place}")
        tab.page.locator("main h1").wait_for()
    row = tab.page.get_by_role("row", name=mine["id"][:12])
    row.get_by_text("completed", exact=True).wait_for()
    row.get_by_role("button", name="Show results", exact=True).click()
    results = tab.page.get_by_role("region", name="Results", exact=True)
    results.wait_for()
    assert tab.page.evaluate("window.ran") is None and page.evaluate("window.ran") is None
