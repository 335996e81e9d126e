"""The site of the documentation: it builds without a warning, and its pages need nothing from elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]* src=\"?(?:https?:)?//|<link[^>]* href=\"?(?:https?:)?//|@import"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # about a version of mkdocs that the theme does not use
    built = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / "scripts" / "site_hook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_built_and_fetches_nothing(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert {"index.html", "quickstart.html", "changelog.html", "contributing.html", "peers.html"} <= pages.keys()
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= pages.keys()
    assert [name for name, text in pages.items() if FETCHED.search(text)] == []


def test_no_block_is_left_as_text(site: Path) -> None:
    assert [path.name for path in site.rglob("*.html") if re.search(r"<p>[^<]*```", path.read_text())] == []


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "[a](docs/cpu.md#memory)", "[a](cpu.md#memory)"),
        ("index.md", "[a](CHANGELOG.md)", "[a](changelog.md)"),
        ("index.md", "![a](docs/soak.png)", "![a](soak.png)"),
        ("cpu.md", "[`a` b](../CONTRIBUTING.md)", "[`a` b](contributing.md)"),
        ("cpu.md", "[a](../benchmarks/peers.md#x)", "[a](peers.md#x)"),
        ("cpu.md", "[a](adr)", "[a](adr/README.md)"),
        ("cpu.md", "[a](../llm)", "a"),
        ("cpu.md", "[a](#memory)", "[a](#memory)"),
        ("cpu.md", "[a](https://x.y/z)", "[a](https://x.y/z)"),
        ("cpu.md", "[a](../nothing)", "[a](../nothing)"),
        ("cpu.md", "[a\nb](../llm)", "a\nb"),
        ("cpu.md", "```text\n[a](../llm)\n```", "```text\n[a](../llm)\n```"),
        ("adr/0001.md", "[a](../cpu.md)", "[a](../cpu.md)"),
        ("adr/0001.md", "[a](../../README.md)", "[a](../index.md)"),
    ],
)
def test_a_link_leads_to_the_same_page_on_the_site(hook: ModuleType, page: str, link: str, expected: str) -> None:
    class File:
        src_uri = page

    class Page:
        file = File

    assert hook.on_page_markdown(link, Page, None, None) == expected
