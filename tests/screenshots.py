"""Takes the pictures of docs/dashboard.md from a running server: ``python -m tests.screenshots --key KEY``.

Asks one question in the playground first, so that the pages have something to show.
Needs a Chromium, as the tests of the dashboard do.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.e2e.dashboard.conftest import ARGUMENTS, CHROMIUM, Tab

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "dashboard"
CHAT = "@cf/pico/pico-instruct"
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
# Name, place, theme, size.
PICTURES = [
    ("overview", "overview", "light", WIDE),
    ("models", "models", "light", WIDE),
    ("code", f"models/{CHAT}?tab=code", "light", WIDE),
    ("usage", "usage?range=24h", "light", WIDE),
    ("cluster", "cluster", "dark", WIDE),
    ("phone", "usage?range=24h", "dark", PHONE),
]
SETTLE_MS = 1500


def ask(page: Page) -> None:
    page.get_by_label("Message", exact=True).fill("What does math.sqrt do?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Trace", exact=True).click()
    page.get_by_role("list", name="Where the time went", exact=True).wait_for()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", required=True, help="an API key with all scopes")
    asked = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        first = Tab(browser.new_context(viewport=WIDE).new_page(), asked.url)
        first.sign_in(asked.key, f"#/playground?model={CHAT}")
        ask(first.page)
        first.page.mouse.move(0, 0)
        first.page.screenshot(path=FOLDER / "playground.png")
        session = first.page.context.storage_state()
        for name, place, theme, size in PICTURES:
            context = browser.new_context(viewport=size, color_scheme=theme, storage_state=session)
            tab = Tab(context.new_page(), asked.url)
            tab.open(f"#/{place}")
            tab.page.locator("main h1").wait_for()
            tab.page.wait_for_timeout(SETTLE_MS)
            tab.page.screenshot(path=FOLDER / f"{name}.png")
            context.close()
        browser.close()
    for path in sorted(FOLDER.glob("*.png")):
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
