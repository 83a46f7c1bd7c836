"""Every page for everybody: axe finds nothing serious, nothing needs a mouse, a phone shows all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import CHAT, EMBED, RERANK

AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text()
PAGES = [
    "overview",
    f"playground?model={CHAT}",
    f"playground?model={EMBED}",
    f"playground?model={RERANK}",
    "playground?model=@cf/pico/pico-detector",
    "playground?model=@cf/pico/pico-sentiment",
    f"playground?model={CHAT}&run=decisions",
    "playground?model=documents",
    "models",
    f"models/{CHAT}",
    f"models/{CHAT}?tab=code",
    f"models/{CHAT}?tab=schema",
    "models/@cf/pico/pico-detector?tab=code",
    "usage",
    "requests",
    "batches",
    "queues",
    "adapters",
    "keys",
    "keys?tab=budgets",
    "keys?tab=members",
    "keys?tab=audit",
    "webhooks",
    "cluster",
    "settings",
]
# Pages, and the button that opens the dialog.
DIALOGS = [("keys", "New key"), ("models", "Add a model")]
LOADED = "main h1"
SKELETON = ".skeleton"


TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
# What a theme can change.
OF_THEMES = ["color-contrast", "link-in-text-block"]


def findings(page, within: str = "document") -> list[str]:
    """What axe finds in the light theme, and what else in the dark one."""
    found = []
    page.evaluate("window.axe || undefined") or page.evaluate(AXE)
    for theme, only in (("light", ""), ("dark", f", runOnly: {OF_THEMES}")):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        page.evaluate(TWO_FRAMES)
        told = page.evaluate(f"axe.run({within}, {{resultTypes: ['violations']{only}}})")["violations"]
        found += [
            f"{page.url} ({theme}): {one['id']}: {one['nodes'][0]['html'][:200]}"
            for one in told
            if one["impact"] in ("serious", "critical")
        ]
    return found


@pytest.mark.parametrize(
    ("pages", "dialogs"),
    [(PAGES[:1], DIALOGS[:1]), pytest.param(PAGES[1:], DIALOGS[1:], marks=pytest.mark.slow)], ids=["first", "rest"],
)  # fmt: skip
def test_axe_finds_nothing_serious(new_tab, signed_in, pages, dialogs):
    tab = new_tab(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    tab.open()
    tab.page.get_by_label("API key", exact=True).wait_for()
    found = findings(tab.page)
    tab = new_tab(viewport={"width": 1280, "height": 800}, reduced_motion="reduce", storage_state=signed_in)
    for place in pages:
        show(tab, place)
        # What stands beside them is the same on all pages.
        found += findings(tab.page, "document" if place == pages[0] else "'main'")
    for place, button in dialogs:
        show(tab, place)
        tab.page.get_by_role("button", name=button, exact=True).click()
        tab.page.get_by_role("dialog").wait_for()
        found += findings(tab.page, "'dialog'")
        tab.page.keyboard.press("Escape")
    assert found == []


def show(tab, place: str) -> None:
    """Opens a page within the one that is there, and waits for what it loads."""
    if "/dashboard#" in tab.page.url:
        tab.page.evaluate("place => { location.hash = '#/' + place; }", place)
    else:
        tab.open(f"#/{place}")
    tab.page.locator(LOADED).wait_for()
    tab.page.locator(SKELETON).first.wait_for(state="detached")


@pytest.mark.slow
def test_a_phone_shows_every_page(new_tab, signed_in):
    tab = new_tab(viewport={"width": 390, "height": 844}, has_touch=True, storage_state=signed_in)
    wide = []
    for place in PAGES:
        show(tab, place)
        if tab.page.evaluate("document.documentElement.scrollWidth") > 390:
            wide.append(place)
    assert wide == []
    tab.page.get_by_role("button", name="Menu", exact=True).click()
    tab.page.get_by_role("link", name="Usage", exact=True).click()
    tab.page.get_by_role("heading", name="Usage", exact=True).wait_for()


def test_a_first_chat_needs_no_mouse(new_tab, stack):
    tab = new_tab()
    tab.open("#/playground")
    keys = tab.page.keyboard
    tab.page.get_by_label("API key", exact=True).wait_for()
    keys.insert_text(stack.key)  # the field has the focus
    keys.press("Enter")
    tab.page.get_by_label("Message", exact=True).wait_for()
    for _ in range(60):
        keys.press("Tab")
        if tab.page.evaluate("document.activeElement.tagName") == "TEXTAREA":
            break
    keys.insert_text("What does math.sqrt do?")
    keys.press("Enter")
    tab.page.get_by_role("button", name="Copy answer", exact=True).wait_for()
