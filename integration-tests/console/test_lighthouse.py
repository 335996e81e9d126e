"""Lighthouse, a package of npm: its scores of every page for accessibility and best practices."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from funitel_testing import npm
from funitel_testing.fleet import Fleet

CATEGORIES = ("accessibility", "best-practices")
LEAST = 0.95
SECONDS = 120.0
FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-background-networking --disable-component-update"
PAGES = ("ui/#chat", "docs")
OTHER_PAGES = ("ui/#models", "ui/#live", "ui/#requests", "ui/#access", "ui/#docs")  # with --full: 12 s each


@pytest.fixture(scope="module")
def lighthouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of its program."""
    folder = npm.install(Path(__file__).parent / "lighthouse", tmp_path_factory.mktemp("npm") / "lighthouse")
    return folder / "node_modules" / ".bin" / "lighthouse"


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES])
def test_a_page_has_no_faults(
    lighthouse: Path, chromium: str, fleet: Fleet, tmp_path: Path, page: str, *, is_full: bool
) -> None:
    if page in OTHER_PAGES and not is_full:
        pytest.skip("with --full")
    report = tmp_path / "report.json"
    command = [str(lighthouse), f"{fleet.url}/{page}", "--quiet", f"--chrome-flags={FLAGS}", "--output=json"]
    command += [f"--output-path={report}", f"--only-categories={','.join(CATEGORIES)}"]
    environ = {**os.environ, "CHROME_PATH": chromium}
    ended = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert report.exists(), ended.stderr
    found = json.loads(report.read_text())
    assert "runtimeError" not in found, found.get("runtimeError")
    scores = {name: found["categories"][name]["score"] for name in CATEGORIES}
    faults = {
        audit["id"]: audit.get("details", {}).get("items", [])[:3]
        for audit in found["audits"].values()
        if audit["score"] is not None and audit["score"] < 1
    }
    print(f"{page}: {scores}")
    assert all(score >= LEAST for score in scores.values()), faults
