"""What an operator does by hand in a real Chromium: models, queues, webhooks, and prompts that are kept."""

from __future__ import annotations

import re
from uuid import uuid4

import pytest

from tests.e2e.conftest import CHAT
from tests.e2e.dashboard.test_dashboard import HOSTILE
from tests.gateway.test_operate import MINE, RECORD


@pytest.mark.slow
def test_a_record_is_checked_added_and_removed(tab, http):
    page = tab.page
    tab.open("#/models")
    page.get_by_role("button", name="Add a model", exact=True).click()
    form = page.get_by_role("dialog")
    told = form.get_by_role("alert")
    form.get_by_role("button", name="Check", exact=True).click()
    told.get_by_text("Repository is empty").wait_for()
    form.get_by_label("Id", exact=True).fill("no id")
    form.get_by_label("Task", exact=True).select_option("reranking")
    form.get_by_label("Description", exact=True).fill(f'Added: "by hand"\nserving: {HOSTILE}')
    form.get_by_label("Weights from", exact=True).select_option("path")
    form.get_by_label("Folder", exact=True).fill("checkpoints/pico-reranker")
    form.get_by_label("Price of a million input tokens", exact=True).fill("1")
    form.get_by_role("button", name="Check", exact=True).click()
    told.get_by_text("is not a model id").wait_for()
    form.get_by_label("Id", exact=True).fill(MINE)
    form.get_by_role("button", name="Check", exact=True).click()
    told.get_by_text("is a good record").wait_for()
    # The same as text, for all that has no field.
    form.get_by_role("button", name="YAML", exact=True).click()
    assert f'id: "{MINE}"' in form.get_by_label("Record", exact=True).input_value()
    form.get_by_role("button", name="Check", exact=True).click()
    told.get_by_text("is a good record").wait_for()
    form.get_by_label("Record", exact=True).fill(RECORD + "colour: red\n")
    form.get_by_role("button", name="Check", exact=True).click()
    told.get_by_text("colour: unknown key").wait_for()
    form.get_by_label("Record", exact=True).fill(RECORD.replace("Added by hand.", f"'{HOSTILE}'"))
    form.get_by_role("button", name="Check", exact=True).click()
    told.get_by_text("is a good record").wait_for()
    assert MINE not in {one["model"] for one in http.get("/models/records").json()["result"]}
    form.get_by_role("button", name="Add", exact=True).click()
    row = page.get_by_role("row", name=re.compile("me.mine"))
    row.get_by_role("button", name="Start", exact=True).wait_for()
    row.get_by_text(HOSTILE).wait_for()
    row.get_by_role("button", name="Remove me/mine", exact=True).click()
    page.get_by_role("button", name="Remove record", exact=True).click()
    row.wait_for(state="detached")
    assert MINE not in {one["model"] for one in http.get("/models/records").json()["result"]}
    # The bounds that a running model has are the API's; a wrong one is refused with its reason.
    tab.open(f"#/models/{CHAT}")
    page.get_by_role("button", name="Scale", exact=True).click()
    [record] = [one for one in http.get("/models/records").json()["result"] if one["model"] == CHAT]
    assert page.get_by_label("At most", exact=True).input_value() == str(record["stages"]["decode"]["max_replicas"])
    page.get_by_label("At least", exact=True).fill("99")
    page.get_by_role("button", name="Scale", exact=True).last.click()
    page.get_by_role("dialog").get_by_text("is above max_replicas").wait_for()
    assert page.evaluate("window.ran") is None


@pytest.mark.slow  # a model is loaded
def test_a_model_is_started_scaled_and_stopped(tab, http, run):
    page = tab.page

    def record() -> dict:
        return next(one for one in http.get("/models/records").json()["result"] if one["model"] == MINE)

    def button(name: str):
        return page.get_by_role("button", name=name, exact=True)

    assert http.post("/models/records", json={"record": RECORD}).status_code == 200
    try:
        tab.open("#/models")
        page.get_by_role("row", name=re.compile("me.mine")).get_by_role("button", name="Start").click()
        page.get_by_role("link", name=re.compile("me.mine")).click()
        page.get_by_role("heading", name="me/mine", exact=True).wait_for()
        page.locator("header").get_by_text("ready", exact=True).wait_for(timeout=240_000)
        assert len(run(MINE, {"query": "a?", "contexts": [{"text": "a"}, {"text": "b"}]})["response"]) == 2
        button("Scale").click()
        page.get_by_label("At most", exact=True).fill("2")
        button("Scale").last.click()
        page.get_by_role("dialog").wait_for(state="detached")
        assert record()["stages"]["reranker"] == {"min_replicas": 1, "max_replicas": 2}
        button("Stop").click()
        button("Stop model").click()
        tab.open("#/models")
        row = page.get_by_role("row", name=re.compile("me.mine"))
        row.get_by_role("button", name="Remove me/mine", exact=True).click()
        button("Remove record").click()
        row.wait_for(state="detached")
        assert MINE not in http.get("/models/records").text
    finally:
        if MINE in http.get("/models/records").text:
            http.post("/models/actions", json={"model": MINE, "action": "stop"})
            http.delete(f"/models/records/{MINE}")


@pytest.mark.slow
def test_a_queue_is_made_filled_bound_and_ended(tab, stack, http):
    page = tab.page
    name, answers = f"browser-{uuid4().hex[:8]}", f"answers-{uuid4().hex[:8]}"
    tab.open("#/queues")
    for each in (answers, name):
        page.get_by_role("button", name="New queue", exact=True).click()
        page.get_by_label("Name", exact=True).fill(each)
        page.get_by_role("button", name="Make the queue", exact=True).click()
        page.get_by_role("link", name=each, exact=True).wait_for()
    page.get_by_role("link", name=name, exact=True).click()
    page.get_by_role("button", name="Push", exact=True).click()
    page.get_by_role("textbox", name="Message", exact=True).fill(HOSTILE)
    page.get_by_role("dialog").get_by_role("button", name="Push", exact=True).click()
    messages = page.get_by_role("region", name="Messages", exact=True)
    messages.get_by_text(HOSTILE).wait_for()
    page.get_by_role("button", name="Pull", exact=True).click()
    pulled = page.get_by_role("region", name="Pulled messages", exact=True)
    pulled.get_by_text(HOSTILE).wait_for()
    pulled.get_by_role("button", name="Acknowledge", exact=True).click()
    pulled.wait_for(state="detached")
    page.get_by_role("button", name="Bind", exact=True).click()
    page.get_by_label("Messages are taken by", exact=True).select_option("workers_ai")
    page.get_by_label("Model", exact=True).select_option(CHAT)
    page.get_by_label("Answers go to", exact=True).select_option(answers)
    page.get_by_role("dialog").get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("pico/pico-instruct").first.wait_for()
    for each in (name, answers):
        page.get_by_role("link", name="Queues", exact=True).first.click()
        page.get_by_role("link", name=each, exact=True).click()
        page.get_by_role("button", name="Delete queue", exact=True).first.click()
        page.get_by_role("dialog").get_by_role("button", name="Delete queue", exact=True).click()
        page.get_by_role("heading", name="Queues", exact=True).wait_for()
    queues = http.get(stack.api.replace("/ai", "/queues")).json()["result"]
    assert not {name, answers} & {one["queue_name"] for one in queues}
    assert page.evaluate("window.ran") is None


@pytest.mark.slow
def test_a_webhook_is_made_switched_and_ended(tab, http):
    page = tab.page
    name = f"{HOSTILE}{uuid4().hex[:8]}"
    tab.open("#/webhooks")
    page.get_by_role("button", name="New webhook", exact=True).click()
    form = page.get_by_role("dialog")
    form.get_by_label("URL", exact=True).fill("http://127.0.0.1:9/hook")
    form.get_by_role("button", name="Make it", exact=True).click()
    form.get_by_role("alert").get_by_text("cannot be called").wait_for()
    form.get_by_label("URL", exact=True).fill("http://8.8.8.8/hook")
    form.get_by_label("Name", exact=True).fill(name)
    form.get_by_role("button", name="Make it", exact=True).click()
    secret = form.locator("code").inner_text()
    assert secret.startswith("whsec_")
    form.get_by_role("button", name="I have kept it", exact=True).click()
    row = page.get_by_role("row", name=re.compile(re.escape(name[-8:])))
    row.get_by_role("button", name="Switch off", exact=True).click()
    row.get_by_role("button", name="Switch on", exact=True).wait_for()
    [made] = [one for one in http.get("/webhooks").json()["result"] if one["name"] == name]
    assert made["enabled"] is False and secret not in page.content()
    row.get_by_role("link").click()
    page.get_by_text("Nothing was sent yet").wait_for()
    page.get_by_role("link", name="Webhooks", exact=True).first.click()
    row.get_by_role("button", name=re.compile("^End")).click()
    page.get_by_role("dialog").get_by_role("button", name="End it", exact=True).click()
    row.wait_for(state="detached")
    assert page.evaluate("window.ran") is None


@pytest.mark.slow
def test_a_prompt_is_shown_only_where_it_is_kept_and_figures_are_the_apis(tab, http):
    page = tab.page
    ask = {"messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 5}
    before = http.post(f"/run/{CHAT}", json=ask)
    tab.open("#/requests")
    page.get_by_text("Prompts and answers are not kept.").wait_for()
    page.get_by_role("button", name="Keep them", exact=True).click()
    page.get_by_label("Days", exact=True).fill("2")
    page.get_by_role("dialog").get_by_role("button", name="Keep them", exact=True).click()
    page.get_by_text("kept for 2 days").wait_for()
    try:
        after = http.post(f"/run/{CHAT}", json=ask)
        tab.open(f"#/requests/{after.headers['cf-ray']}")
        card = page.get_by_text("Prompt and answer", exact=True).locator("xpath=ancestor::section")
        card.get_by_text(HOSTILE).wait_for()
        assert after.json()["result"]["response"].strip() in card.inner_text()

        # The figures of the page and of its receipt are those of the API.
        told = http.get(f"/usage/{after.headers['cf-ray']}").json()["result"]
        page.locator(".figure[aria-label=Neurons]").wait_for()
        figures = {
            one.get_attribute("aria-label"): one.locator(".figure-value").inner_text()
            for one in page.locator(".figure").all()
        }
        assert figures["Prompt"] == f"{told['units']['input_tokens']}tokens"
        assert figures["Answer"] == f"{told['units']['output_tokens']}tokens"
        assert float(figures["Neurons"]) == told["neurons"]
        tab.open("#/requests")
        row = page.get_by_role("row", name=re.compile(after.headers["cf-ray"][:12]))
        row.wait_for()
        cells = row.get_by_role("cell").all_inner_texts()
        [listed] = [r for r in http.get("/requests").json()["result"] if r["id"] == after.headers["cf-ray"]]
        assert cells[-1] == f"{listed['neurons']:.6f}".rstrip("0").rstrip(".")
        assert cells[-4:-1] == [str(listed[f"{name}_tokens"]) for name in ("prompt", "cached", "completion")]

        tab.open(f"#/requests/{before.headers['cf-ray']}")
        page.get_by_text("Where the time went").wait_for()
        assert page.get_by_text("Prompt and answer", exact=True).count() == 0
    finally:
        assert http.delete("/prompt-log").status_code == 200
    assert http.get(f"/prompt-log/{after.headers['cf-ray']}").status_code == 404
    assert page.evaluate("window.ran") is None
