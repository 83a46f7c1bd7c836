"""Sessions of the page: what opens one, what it opens, what ends it, and what other pages and thieves get."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from serve_app.dashboard.code import VALID_S, make_code
from serve_app.gateway.http.session import COOKIE, FRESH_S, TOKEN, new_cookie, token_of
from serve_app.state.callers.accounts import hash_key
from serve_app.state.callers.attempts import MOST, WINDOW_S
from serve_app.state.callers.sessions import IDLE_S, LONGEST_S
from tests.gateway.http.test_accounts import KEY, READS, Served
from tests.waiting import until

WHERE = "/dashboard/session"
TOKENS = "/client/v4/user/tokens"
ONE_DATABASE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


class Browser:
    """Keeps the cookie, as browsers do, and the token, as the page does."""

    def __init__(self, served: Served, at: int = 0, cookie: str = "") -> None:
        self.http = httpx.AsyncClient(transport=served.clients[at]._transport, base_url="http://here")
        self.headers = {"Sec-Fetch-Site": "same-origin"}
        self.cookie = cookie

    async def sign_in(self, key: str = KEY) -> httpx.Response:
        answer = await self.ask("POST", WHERE, json={"key": key})
        if answer.status_code == 200:
            self.headers[TOKEN] = answer.json()["csrf"]
        return answer

    async def get(self, path: str = WHERE, **headers: str) -> httpx.Response:
        return await self.ask("GET", path, headers)

    async def ask(self, method: str, path: str, headers: dict[str, Any] | None = None, **more: Any) -> httpx.Response:
        headers = {**self.headers, **(headers or {})}
        if self.cookie:
            headers["Cookie"] = f"{COOKIE}={self.cookie}"
        answer = await self.http.request(method, path, headers=headers, **more)
        if COOKIE in answer.cookies:
            self.cookie = answer.cookies[COOKIE]
        self.http.cookies.clear()
        return answer

    def at(self, served: Served, at: int) -> Browser:
        """The same browser, sent to another gateway."""
        other = Browser(served, at, self.cookie)
        other.headers = dict(self.headers)
        return other


async def a_key(served: Served, scopes: list[str], account: str = "local") -> tuple[str, str]:
    """Its id and its value."""
    if account != "local":
        await served.call("POST", "/client/v4/accounts", json={"name": account})
    body = {"name": "x", "scopes": scopes}
    made = (await served.call("POST", f"/client/v4/accounts/{account}/tokens", json=body)).json()["result"]
    return made["id"], made["value"]


async def test_signing_in_opens_what_the_key_opens_until_one_signs_out(served):
    browser = Browser(served)
    assert (await browser.get()).status_code == 401
    answer = await browser.sign_in()
    told = answer.json()
    assert (told["account"], told["operator"]) == ("local", True)
    assert told["scopes"] == ["inference", "read", "admin"] and told["key"] == {"id": hash_key(KEY)[:12], "name": ""}
    assert 0 < told["expires"] - time.time() <= IDLE_S and answer.headers["cache-control"] == "no-store"
    [kept] = answer.headers.get_list("set-cookie")
    assert all(word in kept for word in ("HttpOnly", "SameSite=strict", "Path=/")) and "Secure" not in kept
    assert KEY not in answer.text + kept
    # Asking is use, and moves the end.
    again = (await browser.get()).json()
    assert again.pop("expires") >= told.pop("expires") and again == told
    for path in ("/v1/models", "/v1/status", TOKENS, "/client/v4/accounts/local/tokens"):
        assert (await browser.get(path)).status_code == 200, path
    # At another gateway as well, at once.
    await served.start()
    other = browser.at(served, 1)
    assert (await other.get("/v1/status")).status_code == 200
    out = await browser.ask("DELETE", WHERE)
    assert out.json() == {"signed_out": True} and 'serve_app_session=""' in out.headers["set-cookie"]
    browser.cookie = other.cookie
    assert (await browser.get()).status_code == 401

    async def refused() -> bool:
        return (await other.get()).status_code == 401

    # By the gateway's own look at the store, four times a second.
    await until(refused)


@ONE_DATABASE
async def test_neither_half_opens_anything_alone(served):
    browser = Browser(served)
    await browser.sign_in()
    thief = Browser(served, cookie=browser.cookie)
    for path in (WHERE, "/v1/status", "/v1/models"):
        # A stolen cookie, with no token, a guessed one, one computed from the cookie, and one of another session.
        another = Browser(served)
        await another.sign_in()
        for token in ("", "x" * 32, hash_key(thief.cookie)[:32], another.headers[TOKEN], "\u00e9"):
            answer = await thief.ask("GET", path, {TOKEN: token.encode()} if token else {})
            assert answer.status_code == 403 and answer.json()["errors"][0]["code"] == 10000
            assert "account" not in answer.text
    # A token without the cookie is nothing.
    assert (await Browser(served).ask("GET", "/v1/status", {TOKEN: browser.headers[TOKEN]})).status_code == 401
    assert (await browser.get("/v1/status")).status_code == 200


@ONE_DATABASE
async def test_a_forged_cookie_is_refused_and_the_store_is_not_asked(served):
    asked: list[float] = []
    sessions = served.gateways[0].state.sessions
    learn = sessions.learn

    def learns(now: float):
        """For a request; the state's own thread looks whenever something has changed."""
        asked.append(now)
        return learn(now)

    sessions.learn = learns
    good = Browser(served)
    await good.sign_in()
    stem, _, mac = good.cookie.rpartition(".")
    name, _, issued = stem.partition(".")
    before = len(asked)
    old = new_cookie("s", time.time() - FRESH_S - 1)
    for forged in ("", "x", "..", "a.b.c", f"{stem}.{mac[:-1]}0x", f"{name}x.{issued}.{mac}", "x" * 9000,
                   new_cookie("another secret", time.time()), old):  # fmt: skip
        browser = Browser(served, cookie=forged or '""')
        browser.headers[TOKEN] = token_of("s", forged)
        assert (await browser.get("/v1/status")).status_code == 401, forged
    assert len(asked) == before
    # One that says it has just begun, elsewhere, is looked for once, and is nobody's.
    browser.cookie = new_cookie("s", time.time())
    assert (await browser.get("/v1/status")).status_code == 401 and len(asked) == before + 1


@ONE_DATABASE
async def test_a_session_is_never_one_that_was_there_before(served):
    """Fixation: whoever plants a cookie, their own session's too, has nothing of the one that begins with it."""
    villain = Browser(served)
    _, key = await a_key(served, ["read"])
    await villain.sign_in(key)
    victim = Browser(served, cookie=villain.cookie)
    answer = await victim.sign_in()
    fresh = answer.cookies[COOKIE]
    assert fresh != villain.cookie and answer.json()["csrf"] != villain.headers[TOKEN]
    # And the planted session is over.
    assert (await villain.get()).status_code == 401


ELSEWHERE = (
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "http://here"},
    {"Origin": "http://evil.example"},
    {"Origin": "http://here.evil.example"},
    {"Origin": "http://here:9999"},
    {"Origin": "null"},
)


@ONE_DATABASE
async def test_other_pages_can_neither_read_nor_write_nor_sign_in(served):
    browser = Browser(served)
    await browser.sign_in()
    cookie, token = browser.cookie, browser.headers[TOKEN]

    async def ask(method: str, path: str, headers: dict[str, str], **what: Any) -> httpx.Response:
        sent = {**headers, "Cookie": f"{COOKIE}={cookie}"}
        return await browser.http.request(method, path, headers=sent, **what)

    # With the token, which other pages do not have, and without.
    for sent in [{**headers, **more} for headers in ELSEWHERE for more in ({TOKEN: token}, {})]:
        for method, path, body in (
            ("GET", "/v1/status", None),
            ("GET", TOKENS, None),
            ("POST", TOKENS, {"name": "x", "policies": READS}),
            ("DELETE", WHERE, None),
        ):
            answer = await ask(method, path, sent, json=body)
            assert answer.status_code == 403 and answer.json()["errors"][0]["code"] == 10000, (sent, method, path)
        answer = await ask("POST", WHERE, sent, json={"key": KEY})
        assert answer.status_code == 403 and "set-cookie" not in answer.headers
    assert (await browser.get()).status_code == 200


@ONE_DATABASE
async def test_a_form_cannot_sign_in(served):
    browser = Browser(served)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        content = b'{"key": "%s"}' % KEY.encode()
        answer = await browser.http.post(WHERE, content=content, headers={"Content-Type": kind} if kind else {})
        assert answer.status_code == 400 and COOKIE not in answer.cookies


async def test_it_ends_with_its_key_everywhere(served):
    await served.start()
    for change in (
        lambda key: served.call("DELETE", f"{TOKENS}/{key}"),
        lambda key: served.call("PUT", f"{TOKENS}/{key}/value"),
        lambda key: served.call("PUT", f"{TOKENS}/{key}", json={"status": "disabled"}),
    ):
        key, value = await a_key(served, ["read"])
        browser = Browser(served)
        await browser.sign_in(value)
        other = browser.at(served, 1)
        await until(lambda other=other: _status(other, 200))
        assert (await change(key)).status_code == 200
        assert (await browser.get("/v1/status")).status_code == 401
        await until(lambda other=other: _status(other, 401))


async def _status(browser: Browser, status: int) -> bool:
    return (await browser.get("/v1/status")).status_code == status


@ONE_DATABASE
async def test_it_has_the_keys_scopes_as_they_are_now_and_its_account(served):
    key, value = await a_key(served, ["read"], "team")
    browser = Browser(served)
    told = (await browser.sign_in(value)).json()
    assert (told["account"], told["scopes"], told["operator"]) == ("team", ["read"], False)
    assert (await browser.get("/v1/status")).status_code == 200
    for method, path in (("GET", TOKENS), ("POST", TOKENS), ("POST", "/v1/chat/completions")):
        answer = await browser.ask(method, path, json={})
        assert answer.status_code == 403 and "lacks the scope" in answer.text, path
    refused = await browser.get("/client/v4/accounts/local/ai/usage")
    assert refused.status_code == 403
    # Widened and narrowed while the session goes on.
    body = {"scopes": ["inference"]}
    assert (await served.call("PUT", f"/client/v4/accounts/team/tokens/{key}", json=body)).status_code == 200
    assert (await browser.get("/v1/status")).status_code == 403
    assert (await browser.get()).json()["scopes"] == ["inference"]


@ONE_DATABASE
async def test_two_accounts_see_their_own(served):
    browsers = {}
    for account in ("team-a", "team-b"):
        _, value = await a_key(served, ["read", "admin"], account)
        browsers[account] = Browser(served)
        await browsers[account].sign_in(value)
    for account, browser in browsers.items():
        listed = (await browser.get("/client/v4/accounts")).json()["result"]
        assert [each["id"] for each in listed] == [account]
        other = next(name for name in browsers if name != account)
        assert (await browser.get(f"/client/v4/accounts/{other}/tokens")).status_code == 403
    # One's cookie with the other's token.
    mixed = browsers["team-a"].at(served, 0)
    mixed.headers[TOKEN] = browsers["team-b"].headers[TOKEN]
    assert (await mixed.get("/v1/status")).status_code == 403


@ONE_DATABASE
async def test_a_key_beside_the_cookie_decides(served):
    browser = Browser(served)
    await browser.sign_in()
    assert (await browser.get("/v1/status", Authorization="Bearer wrong wrong wrong")).status_code == 401
    answer = await browser.http.get("/v1/status", headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200


@ONE_DATABASE
async def test_it_is_renewed_by_use_and_ends_in_any_case(served, monkeypatch):
    from serve_app.gateway.http import session as sessions

    at = time.time()
    monkeypatch.setattr(sessions.time, "time", lambda: at)
    browser, idle = Browser(served), Browser(served)
    await browser.sign_in()
    await idle.sign_in()
    start = at
    while at < start + LONGEST_S - IDLE_S:
        at += IDLE_S - 1
        assert (await browser.get("/v1/models")).status_code == 200
    assert (await idle.get("/v1/models")).status_code == 401
    at = start + LONGEST_S - 1
    assert (await browser.get("/v1/models")).status_code == 200
    at += 2
    assert (await browser.get("/v1/models")).status_code == 401


async def test_wrong_keys_are_bounded_by_address_at_all_gateways_together(served):
    from serve_app.gateway.http.routes.operating import dashboard as signing

    await served.start()
    browsers = [Browser(served), Browser(served, 1)]
    browser = browsers[0]

    async def wrong(address: str, at: int = 0) -> httpx.Response:
        body = {"key": "wrong wrong wrong"}
        return await browsers[at].http.post(WHERE, json=body, headers={"x-serve-app-client": address})

    for n in range(MOST):
        # Good ones in between are not counted.
        good = await browser.http.post(WHERE, json={"key": KEY}, headers={"x-serve-app-client": "2001:db8::1"})
        assert good.status_code == 200
        answer = await wrong(f"2001:db8::{n}", n % 2)
        assert answer.status_code == 401
    assert (await wrong("2001:db8::ffff", 1)).status_code == 429
    bounded = await wrong("2001:db8::ffff")
    assert bounded.status_code == 429 and 1 <= int(bounded.headers["retry-after"]) <= WINDOW_S
    right = await browser.http.post(WHERE, json={"key": KEY}, headers={"x-serve-app-client": "2001:db8::1"})
    assert right.status_code == 429
    assert (await wrong("2001:db9::1")).status_code == 401
    assert (await browser.http.post(WHERE, json={"key": KEY})).status_code == 200
    later = time.time() + WINDOW_S + 1
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(signing.time, "time", lambda: later)
        assert (await wrong("2001:db8::1")).status_code == 401


async def test_a_code_signs_in_once(served):
    await served.start()
    hashed = hash_key(KEY)

    async def use(code: str, at: int = 0) -> int:
        return (await Browser(served, at).http.post(WHERE, json={"code": code})).status_code

    code = make_code("s", hashed, time.time())
    browser = Browser(served)
    answer = await browser.ask("POST", WHERE, json={"code": code})
    assert answer.status_code == 200 and answer.json()["operator"]
    browser.headers[TOKEN] = answer.json()["csrf"]
    await browser.ask("DELETE", WHERE)
    # At no gateway again, signed out or not.
    assert [await use(code), await use(code, 1)] == [401, 401]
    old = make_code("s", hashed, time.time() - VALID_S - 1)
    others = make_code("another secret", hashed, time.time())
    stem, _, mac = make_code("s", hashed, time.time()).rpartition(".")
    longer = f"{stem}0.{mac}"
    for bad in (old, others, longer, "x", "...", "\u00e9.0.x", make_code("s", hash_key("another key"), time.time())):
        assert await use(bad) == 401, bad


@ONE_DATABASE
async def test_bad_bodies(served):
    for body in ({}, {"key": "a", "code": "b"}, {"key": 1}, {"key": "x" * 600}, []):
        answer = await Browser(served).http.post(WHERE, json=body)
        assert answer.status_code == 400 and len(answer.json()["errors"][0]["message"]) > 20, body


@ONE_DATABASE
async def test_over_tls_the_cookie_is_this_hosts_alone(served):
    browser = Browser(served)
    tls = {"X-Forwarded-Proto": "https"}
    answer = await browser.http.post(WHERE, json={"key": KEY}, headers=tls)
    [kept] = answer.headers.get_list("set-cookie")
    assert kept.startswith(f"__Host-{COOKIE}=") and "Secure" in kept and "Domain" not in kept
    name, _, value = kept.partition(";")[0].partition("=")
    sent = {**tls, TOKEN: answer.json()["csrf"]}
    assert (await browser.http.get(WHERE, headers={**sent, "Cookie": f"{name}={value}"})).status_code == 200
    # Under the plain name, which a page of another host of the domain could have set.
    assert (await browser.http.get(WHERE, headers={**sent, "Cookie": f"{COOKIE}={value}"})).status_code == 401
