"""A browser, and a fleet with a model that it looks at."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, sync_playwright

from funitel_testing import debian
from funitel_testing.browsing import MODEL, OpenPage
from funitel_testing.fleet import Fleet
from funitel_testing.tiny import VOCAB_SIZE, save_tiny

CHROMIUM = "chromium"
DEMO = "smollm2-135m-instruct"
# The browser looks for updates and more at hosts of its maker otherwise.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of Debian's Chromium, installed where that is possible."""
    try:
        debian.install({CHROMIUM: CHROMIUM})
    except debian.CannotInstall as error:
        if "FUNITEL_NEEDS_BROWSER" in os.environ:
            pytest.fail(f"there is no {CHROMIUM}: {error}")
        pytest.skip(f"there is no {CHROMIUM}: {error}")
    found = shutil.which(CHROMIUM)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Browser]:
    """A browser without a window."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that never ends an answer by itself."""
    folder = tmp_path_factory.mktemp("console-models") / "tiny"
    return save_tiny("llama", folder, max_position_embeddings=8192, eos_token_id=VOCAB_SIZE)


@pytest.fixture(scope="session")
def fleet(endless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server with one model, to which more can be launched."""
    with Fleet(tmp_path_factory.mktemp("console-fleet"), "--hostname", "127.0.0.1") as running:
        # Pictures for the documentation show a model that answers.
        model = DEMO if "FUNITEL_SCREENSHOTS" in os.environ else str(endless_model)
        running.launch(model, name=MODEL, settings={"max_batch_total_tokens": 16384})
        yield running


@pytest.fixture
def open_page(browser: Browser, fleet: Fleet) -> Iterator[OpenPage]:
    """`open_page(name)` opens a page of the console in a new context.

    A message of the browser about an error, an exception of a script, and a request to another host fail the test. With
    `is_hostile` messages do not: the browser says which parts of an answer its policy has blocked.
    """
    contexts, complaints = [], []

    def heard(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "status of" not in message.text:  # answers such as 404 are no fault
            complaints.append(message.text)

    def failed(error: Error) -> None:
        complaints.append(str(error))

    def asked(request: Request) -> None:
        if not request.url.startswith((fleet.url, "data:", "blob:")):
            complaints.append(f"asked {request.url}")

    def open_one(
        name: str = "chat", *, width: int = 1440, height: int = 900, is_hostile: bool = False, **options: Any
    ) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=fleet.url)
        page = context.new_page()
        if not is_hostile:
            page.on("console", heard)
        page.on("pageerror", failed)
        page.on("request", asked)
        page.goto(f"{fleet.url}/ui/#{name}")
        page.wait_for_selector("h1", state="attached")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == []
