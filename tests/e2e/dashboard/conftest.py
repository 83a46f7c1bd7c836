"""A real Chromium, signed in to the dashboard of the running stack."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# What a window of Chromium has around a page costs several times as much as the page: its address bar alone is two
# pages in a process of their own, and a process waits for the next page. Of such options Chromium reads the last one,
# so Playwright's are named here again.
WITHOUT = [
    "WebUIOmniboxPopup",
    "WebUIOmniboxAimPopup",
    "WebUIOmniboxFullPopup",
    "SpareRendererForSitePerProcess",
    "AimEnabled",
    "AvoidCorsURLLoaderRestartOnRedirect",
    "AvoidUnnecessaryBeforeUnloadCheckSync",
    "DestroyProfileOnBrowserClose",
    "HttpsFirstBalancedModeAutoEnable",
    "HttpsUpgrades",
    "LensOverlay",
    "MediaRouter",
    "NetworkTimeServiceQuerying",
    "OptimizationHints",
    "PaintHolding",
    "PreconnectToSearch",
    "ThirdPartyStoragePartitioning",
]
ARGUMENTS = [
    f"--disable-features={','.join(WITHOUT)}",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 60_000
# A request that is refused is written to the console by the browser itself; the page tells of it in its own words.
REFUSED = "Failed to load resource"


@pytest.fixture(scope="package")  # not for longer: Playwright keeps an event loop running in this thread
def chromium():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium here (Debian's package is chromium)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page of its own session. ``problems``: errors of scripts, violations of the policy, dialogs that opened."""

    page: object
    url: str
    problems: list[str] = field(default_factory=list)

    def watch(self) -> None:
        page = self.page
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "console",
            lambda said: said.type == "error" and REFUSED not in said.text and self.problems.append(said.text),
        )
        page.on("request", self._at_home)

    def _at_home(self, request) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.problems.append(f"asked another host: {request.url}")

    def open(self, place: str = "") -> None:
        self.page.goto(f"{self.url}/dashboard{place}")

    def sign_in(self, key: str, place: str = "") -> None:
        self.open(place)
        pages, refused = self.page.get_by_role("navigation", name="Pages"), self.page.get_by_role("alert")
        for _ in range(5):  # a gateway takes a moment to know a new key
            self.page.get_by_label("API key", exact=True).fill(key)
            self.page.get_by_role("button", name="Sign in", exact=True).click()
            pages.or_(refused).first.wait_for(state="attached")
            if pages.count():
                return
            self.page.wait_for_timeout(1000)
        raise AssertionError(refused.inner_text())


@pytest.fixture
def new_tab(chromium, stack) -> Iterator:
    """``new_tab(**options)`` -> a :class:`Tab` with cookies of its own; nothing may go wrong in it."""
    tabs = []

    @contextmanager
    def closing():
        try:
            yield
        finally:
            for tab in tabs:
                tab.page.context.close()

    def make(**options) -> Tab:
        tab = Tab(chromium.new_context(**options).new_page(), stack.url)
        tab.watch()
        tabs.append(tab)
        return tab

    with closing():
        yield make
    assert [problem for tab in tabs for problem in tab.problems] == []


@pytest.fixture(scope="package")
def signed_in(chromium, stack) -> dict:
    """The two halves of a session with the key of the settings, as a browser keeps them."""
    context = chromium.new_context()
    Tab(context.new_page(), stack.url).sign_in(stack.key)
    kept = context.storage_state()
    context.close()
    return kept


@pytest.fixture
def tab(new_tab, signed_in) -> Tab:
    """Signed in with the key of the settings."""
    return new_tab(viewport={"width": 1280, "height": 800}, storage_state=signed_in)
