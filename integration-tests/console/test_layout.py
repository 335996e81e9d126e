"""Every page at three widths, light and dark: nothing overflows, nothing is inaccessible, and little is sent.

FUNITEL_SCREENSHOTS names a folder to which pictures for the documentation are written.
"""

import os
import time
from importlib.resources import files
from pathlib import Path

import pytest
from playwright.sync_api import Page

from funitel_testing.browsing import MODEL, OpenPage
from funitel_testing.fleet import Fleet

PAGES = ("chat", "models", "live", "requests", "docs")
MAX_BYTES = 200_000
SECONDS = 1.0
# Pages in the documentation, by the window they are shown in.
PICTURES = {
    ("chat", 1440, "light"),
    ("models", 1440, "light"),
    ("live", 768, "dark"),
    ("requests", 1440, "light"),
    ("docs", 360, "dark"),
}


def fill(page: Page, name: str) -> None:
    """Give a page something to show."""
    if name == "chat":
        page.get_by_text("Settings", exact=True).click()
        page.get_by_label("Max tokens").fill("24")
        page.get_by_label("Probabilities of tokens").check()
        page.get_by_label("Message", exact=True).fill("What is the capital of France?")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("button", name="Probabilities").click()
    elif name == "models":
        page.get_by_text("Launch a model", exact=True).click()
        page.locator(".card").first.wait_for()
    elif name == "live":
        page.locator(".plot canvas").nth(5).wait_for()
    elif name == "requests":
        page.locator("tbody tr").first.wait_for()
    else:
        page.locator("summary", has_text="/v1/chat/completions").first.click()
        page.get_by_role("button", name="Send").wait_for()


@pytest.mark.sampled(5)  # still every page, and every width in both schemes
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1440])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_window_and_is_accessible(
    open_page: OpenPage, fleet: Fleet, name: str, width: int, scheme: str
) -> None:
    fleet.post(
        "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    )
    page = open_page(name, width=width, color_scheme=scheme, bypass_csp=True)  # axe is a script of the test's
    fill(page, name)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    folder = os.environ.get("FUNITEL_SCREENSHOTS")
    if folder and (name, width, scheme) in PICTURES:
        page.screenshot(path=Path(folder) / f"console-{name}.png", clip={"x": 0, "y": 0, "width": width, "height": 600})
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())
    found = page.evaluate("axe.run()")["violations"]
    assert [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found] == []


def test_a_dialog_is_accessible(open_page: OpenPage) -> None:
    page = open_page(bypass_csp=True)
    page.get_by_role("button", name="API key").click()
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())
    assert [each["id"] for each in page.evaluate("axe.run()")["violations"]] == []
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0


def test_the_first_page_is_light_and_soon_there(open_page: OpenPage) -> None:
    open_page()  # the browser and the server have warmed up
    page = open_page("none")
    began = time.monotonic()
    page.reload()
    page.get_by_label("Message", exact=True).fill("x")
    page.locator("select option").first.wait_for(state="attached")
    seconds = time.monotonic() - began
    sizes = page.evaluate("performance.getEntriesByType('resource').map(each => [each.name, each.encodedBodySize])")
    assert sum(size for _, size in sizes) <= MAX_BYTES, sizes
    assert seconds <= SECONDS
