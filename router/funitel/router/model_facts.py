"""What a model folder says about where its model comes from and what it is for. Nothing is fetched."""

import re
from dataclasses import dataclass
from pathlib import Path

_SHA = re.compile(r"[0-9a-f]{40}")
_PIPELINE_TAG = re.compile(r"^pipeline_tag:[ \t]*[\"']?([\w-]+)", re.MULTILINE)
MAX_CARD_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The hub's commit, where the folder is a snapshot of one; the purpose, where a model card names it."""

    sha: str | None = None
    pipeline_tag: str | None = None

    @classmethod
    def of(cls, folder: Path) -> "ModelFacts":
        """Read a model folder."""
        is_snapshot = folder.parent.name == "snapshots" and _SHA.fullmatch(folder.name) is not None
        return cls(folder.name if is_snapshot else None, _pipeline_tag(folder / "README.md"))


def _pipeline_tag(card: Path) -> str | None:
    """The tag in the YAML that begins a model card."""
    try:
        with card.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_CARD_BYTES)
    except OSError:
        return None
    _, opening, rest = text.partition("---\n")
    header, closing, _ = rest.partition("\n---")
    found = _PIPELINE_TAG.search(header) if opening and closing else None
    return found[1] if found else None
