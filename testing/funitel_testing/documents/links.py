"""Find links that lead to no file, or to no heading of a page, of the repository as a checkout shows it."""

import re
from pathlib import Path
from urllib.parse import urlsplit

from funitel_testing.documents.prose import prose

_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_REFERENCE = re.compile(r"^\[[^\]]+\]: (\S+)$", re.MULTILINE)
_BARE = re.compile(r"<(https?:[^>]*)>")
_CODE = re.compile(r"(?<!\[)`[^`\n]+`")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_SCHEME = re.compile(r"[a-z]+:", re.IGNORECASE)


def targets_of(page: Path) -> list[str]:
    """The targets of a page's links, outside of its blocks and code."""
    text = _CODE.sub("code", prose(page.read_text("utf-8")))
    return [*_LINK.findall(text), *_REFERENCE.findall(text), *_BARE.findall(text)]


def dead_links(page: Path) -> list[str]:
    """The targets of a page's links that are not there; of other sites, those that are no address of one."""
    return [
        target for target in targets_of(page) if not (_is_address if _SCHEME.match(target) else _is_there)(page, target)
    ]


def _is_address(page: Path, target: str) -> bool:
    try:
        parts = urlsplit(target)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        return False


def _is_there(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    if path.startswith("/") or not file.exists():
        return False
    return not anchor or (file.suffix == ".md" and anchor in _anchors(file))


def _anchors(page: Path) -> set[str]:
    """The anchors that the site gives the headings of a page; GitHub gives the same to all but repeated ones."""
    found: set[str] = set()
    for heading in _HEADING.findall(prose(page.read_text("utf-8"))):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        base = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        number = 0
        anchor = base
        while anchor in found:
            number += 1
            anchor = f"{base}_{number}"
        found.add(anchor)
    return found
