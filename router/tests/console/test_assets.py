"""The console's files: complete, unchanged copies of libraries, and nothing of other hosts."""

import gzip
import hashlib
import re
import tomllib
from importlib.resources import files

import pytest

from funitel.router.console.assets import INDEX, assets

VENDOR = files("funitel.router.console") / "assets" / "vendor"
LIBRARIES = tomllib.loads((VENDOR / "vendor.toml").read_text())
IMPORT = re.compile(r'(?:from|import)\s*\(?\s*"(\./[^"]+)"')
REFERENCE = re.compile(r'(?:src|href)[=:]\s*"([^"#$]+)"')
NAMES = sorted(name for name in assets() if not name.startswith("vendor/"))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_is_the_published_one(library: str) -> None:
    row = LIBRARIES[library]
    assert hashlib.sha256((VENDOR / row["name"]).read_bytes()).hexdigest() == row["sha256"]


def test_every_library_has_its_row_and_licence() -> None:
    shipped = {name.removeprefix("vendor/") for name in assets() if name.startswith("vendor/")}
    assert shipped == {row["name"] for row in LIBRARIES.values()}
    text = (VENDOR / "LICENSES.txt").read_text().lower()
    assert all(f"== {row['package']}" in text for row in LIBRARIES.values())


@pytest.mark.parametrize("name", NAMES)
def test_every_file_that_a_file_names_is_there(name: str) -> None:
    text = assets()[name].content.decode()
    named = [path.removeprefix("./") for path in IMPORT.findall(text)]
    named += [path for path in REFERENCE.findall(text) if not path.startswith("..")]
    assert [path for path in named if path not in assets()] == []


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".html")])
def test_no_page_has_inline_script_or_style(name: str) -> None:
    text = assets()[name].content.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)", text)
    assert not re.search(r"<style|\bstyle=|\bon\w+=", text)


def test_a_file_is_compressed_without_loss() -> None:
    assert INDEX in assets()
    for asset in assets().values():
        assert gzip.decompress(asset.compressed) == asset.content
