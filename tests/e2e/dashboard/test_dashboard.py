"""The dashboard in a real Chromium: what a person does, and that every figure is the API's."""

from __future__ import annotations

import json
import re
from uuid import uuid4

import httpx
import pytest

from serve_app.catalog.load import PROJECT_ROOT
from tests.e2e.conftest import CHAT
from tests.e2e.dashboard.conftest import Tab
from tests.variants import some

HOSTILE = '"><img src=x onerror="window.ran=1"><script>window.ran=1</script>'


def text(tab: Tab, label: str) -> str:
    """The value of the figure with this label."""
    return tab.page.get_by_role("group", name=label, exact=True).first.locator(".figure-value").inner_text()


def test_signing_in_and_out(new_tab, stack):
    tab = new_tab()
    tab.open("#/models")
    page = tab.page
    page.get_by_label("API key", exact=True).fill("no key")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    page.get_by_label("API key", exact=True).fill(stack.key)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Models", exact=True).wait_for()  # the place that was asked for
    cookies = page.context.cookies()
    assert [(one["httpOnly"], one["sameSite"]) for one in cookies] == [(True, "Strict")]
    kept = page.evaluate(
        "JSON.stringify([Object.values(localStorage), Object.values(sessionStorage), document.cookie])"
    )
    assert stack.key not in kept and all(one["value"] not in kept for one in cookies)
    page.reload()
    page.get_by_role("heading", name="Models", exact=True).wait_for()
    page.get_by_role("button", name="Sign out", exact=True).click()
    page.get_by_label("API key", exact=True).wait_for()
    page.reload()
    page.get_by_label("API key", exact=True).wait_for()


def test_a_chat_streams_and_tells_what_the_api_tells(tab, http):
    page = tab.page
    tab.open(f"#/playground?model={CHAT}")
    page.get_by_label("Message", exact=True).fill("What does math.sqrt do?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Trace", exact=True).click()
    bars = page.get_by_role("list", name="Where the time went", exact=True)
    bars.wait_for()
    assert {"Gateway", "Prefill", "Decode"} <= set(bars.inner_text().split("\n"))

    request = page.locator(".trace a").inner_text().split()[-1]
    told = http.get(f"/usage/{request}").json()["result"]
    stats = dict(
        zip(page.locator(".stats dt").all_inner_texts(), page.locator(".stats dd").all_inner_texts(), strict=True)
    )
    units = told["units"]
    prompt = units["input_tokens"]
    assert stats["Prompt"] == f"{prompt} tokens"
    assert stats["Answer"] == f"{units['output_tokens']} tokens"
    assert stats["Cached"] == f"{round(100 * units.get('cached_tokens', 0) / prompt)} %"
    assert float(stats["Neurons"]) == float(told["neurons"])
    assert float(stats["Cost"].lstrip("$")) == float(told["cost"]["amount"])

    asked = {"model": CHAT, "messages": [{"role": "user", "content": "What does math.sqrt do?"}]}
    answer = http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    said = page.locator(".prose").inner_text()
    assert said == re.sub("`", "", answer)


@pytest.mark.slow
def test_usage_equals_the_api(tab, http):
    http.post(f"/run/{CHAT}", json={"prompt": "What does math.cos do?"})
    tab.open("#/usage?range=7d&by=model")

    def shown() -> tuple[str, str]:
        return text(tab, "Requests").replace(",", ""), text(tab, "Neurons").replace(",", "")

    def told() -> tuple[str, str]:
        rows = http.get("/usage", params={"since": "7d", "account": "all", "interval": "none"}).json()["result"]
        return str(sum(row["requests"] for row in rows)), f"{sum(row['neurons'] for row in rows):.6f}".rstrip(
            "0"
        ).rstrip(".")

    tab.page.get_by_role("group", name="Requests", exact=True).wait_for()
    for _ in range(
        60
    ):  # other requests of the suite may come between the two looks, and the page looks every few seconds
        if shown() == told():
            break
        tab.page.wait_for_timeout(500)
    assert shown() == told()
    with tab.page.expect_download() as saved:
        tab.page.get_by_role("button", name="CSV", exact=True).click()
    lines = saved.value.path().read_text().splitlines()
    assert lines[0].startswith("time,model,requests") and any(CHAT in line for line in lines[1:])


@pytest.mark.slow
def test_an_adapter_is_uploaded_tried_and_deleted(tab, http):
    page = tab.page
    name = f"browser-{uuid4().hex[:8]}"
    folder = PROJECT_ROOT / "checkpoints" / "pico-pirate"
    tab.open("#/adapters")
    page.get_by_role("button", name="Upload an adapter", exact=True).click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Description", exact=True).fill(HOSTILE)
    files = [folder / "adapter_config.json", folder / "adapter_model.safetensors"]
    page.get_by_label("The adapter's two files", exact=True).set_input_files(files)
    page.get_by_role("button", name="Upload", exact=True).click()
    page.get_by_role("cell", name=f"{name} {HOSTILE}").wait_for()
    page.get_by_role("link", name=f"Try {name}").click()
    page.get_by_label("Message", exact=True).fill("What does math.sqrt do?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Copy answer", exact=True).wait_for()
    asked = {"prompt": "What does math.sqrt do?", "lora": name, "max_tokens": 300}
    with_it = http.post(f"/run/{CHAT}", json=asked).json()["result"]["response"]
    assert page.locator(".prose").inner_text() == with_it.replace("`", "")
    tab.open("#/adapters")
    page.get_by_role("button", name=f"Delete {name}").click()
    page.get_by_role("button", name="Delete adapter", exact=True).click()
    page.get_by_text("The adapter is deleted").wait_for()
    assert http.get(f"/finetunes/{name}").status_code == 404
    assert page.evaluate("window.ran") is None


@pytest.mark.slow
def test_a_batch_is_sent_and_its_results_are_shown(tab, http):
    page = tab.page
    tab.open("#/batches")
    page.get_by_role("button", name="New batch", exact=True).click()
    page.get_by_label("Model", exact=True).select_option(CHAT)
    lines = [json.dumps({"prompt": f"What does math.{name} do?", "max_tokens": 4}) for name in ("sqrt", "cos")]
    page.get_by_label("A file of requests", exact=True).set_input_files(
        {"name": f"{HOSTILE}.jsonl", "mimeType": "application/jsonl", "buffer": "\n".join(lines).encode()}
    )
    page.get_by_role("button", name="Send the batch", exact=True).click()
    # The newest stands first, once the page has it.
    row = page.get_by_role("row").nth(1)
    row.get_by_text("2 of 2").wait_for()
    row.get_by_text("completed", exact=True).wait_for()
    row.get_by_role("button", name="Show results", exact=True).click()
    results = page.get_by_role("region", name="Results", exact=True)
    results.wait_for()
    assert results.inner_text().count('"response"') >= 2
    assert page.evaluate("window.ran") is None


def test_a_key_is_made_and_its_revocation_ends_its_session(tab, new_tab, stack):
    page = tab.page
    name = f"{HOSTILE}{uuid4().hex[:8]}"
    tab.open("#/keys")
    page.get_by_role("button", name="New key", exact=True).click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Requests a minute", exact=True).fill("1000")
    page.get_by_role("button", name="Make the key", exact=True).click()
    value = page.get_by_role("region", name="Key", exact=True).inner_text().strip()
    page.get_by_role("button", name="Done", exact=True).click()

    other = new_tab()
    other.sign_in(value, "#/usage")
    other.page.get_by_role("heading", name="Usage", exact=True).wait_for()
    assert other.page.get_by_role("link", name="Keys and budgets", exact=True).count() == 0  # not with its scopes
    other.open("#/keys")
    other.page.get_by_text("Not for this key").wait_for()

    page.get_by_role("row", name=re.compile(re.escape(name[-8:]))).get_by_role("button", name="Revoke").click()
    page.get_by_role("button", name="Revoke key", exact=True).click()
    other.page.get_by_label("API key", exact=True).wait_for()
    other.page.get_by_text("Your session has ended").wait_for()
    answer = httpx.get(f"{stack.url}/v1/models", headers={"Authorization": f"Bearer {value}"})
    assert answer.status_code == 401
    assert page.evaluate("window.ran") is None


def test_what_a_model_writes_is_shown_without_what_runs(tab):
    """Markdown of an answer goes through the page's own cleaning, with its vendored library."""
    tab.open("#/playground")
    hostile = [
        HOSTILE,
        "[link](javascript:window.ran=1) <a href='javascript:window.ran=1'>x</a>",
        "<svg onload=window.ran=1><style>body{display:none}</style></svg>",
        "![call home](https://example.com/x.png) <iframe srcdoc='<script>parent.ran=1</script>'></iframe>",
        "<form action=/x><input name=csrf></form> <p id=app class=frame style='position:fixed'>over the page</p>",
        "<math><mtext><table><mglyph><style><img src=x onerror=window.ran=1>",
    ]
    shown = tab.page.evaluate(
        """async (texts) => {
            const module = document.querySelector("script[type=module]").src.replace(/main\\.js$/, "ui/markdown.js");
            const { clean, ready } = await import(module);
            await ready();
            return texts.map((text) => {
                const place = document.createElement("div");
                place.innerHTML = clean(text);
                document.body.append(place);
                const found = [...place.querySelectorAll("*")].map((one) => [one.tagName, ...one.getAttributeNames()]);
                place.remove();
                return found;
            });
        }""",
        hostile,
    )
    allowed = {"P", "BR", "A", "TABLE", "TBODY", "TR", "TD", "STRONG", "EM", "CODE", "PRE"}
    for elements in shown:
        for tag, *attributes in elements:
            assert tag in allowed and set(attributes) <= {"href", "target", "rel", "tabindex"}, (tag, attributes)
    tab.page.wait_for_timeout(200)
    assert tab.page.evaluate("window.ran") is None
    # The parser that the cleaning uses reports what the policy blocks before it is thrown away.
    tab.problems[:] = [one for one in tab.problems if "Content Security Policy" not in one]


@pytest.mark.parametrize(
    "asked",
    some([f"#/{page}{HOSTILE}" for page in ("models/", "requests/", "", "usage?by=")], f"#/models/{HOSTILE}"),
)
def test_hostile_addresses_are_text(tab, asked):
    tab.open(asked)
    tab.page.locator("main h1, main h3, main [role=alert]").first.wait_for()
    assert tab.page.evaluate("window.ran") is None
