"""Where peers, models and results lie: a folder outside the repository, of bounded size."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
FREE_MARGIN = 2 * GIB


@dataclass(frozen=True, slots=True)
class Folders:
    """The cache of the program; `most_model_bytes` bounds the models that are kept."""

    root: Path
    most_model_bytes: int = 16 * GIB

    @property
    def models(self) -> Path:
        """Models, one file or folder each."""
        return self.root / "models"

    @property
    def logs(self) -> Path:
        """What the servers print."""
        return self.root / "logs"

    @property
    def ours(self) -> Path:
        """What this server converts."""
        return self.root / "ours"

    def peer(self, name: str) -> Path:
        """The folder of a peer: its programs or environment."""
        return self.root / name

    def make_room(self, num_bytes: int, keep: Path) -> None:
        """Delete the models that were not used for longest, until `num_bytes` more fit.

        Raises:
            OSError: the disk has no room for them.
        """
        self.models.mkdir(parents=True, exist_ok=True)
        kept = sorted((path for path in self.models.iterdir() if path != keep), key=lambda path: path.stat().st_atime)
        while kept and sum(map(size_of, kept)) + num_bytes > self.most_model_bytes:
            _remove(kept.pop(0))
        free = shutil.disk_usage(self.models).free
        if free < num_bytes + FREE_MARGIN:
            raise OSError(f"{self.models}: {keep.name} needs {num_bytes / GIB:.1f} GiB, {free / GIB:.1f} are free")

    def forget_converted(self) -> None:
        """Delete what this server made of models, but not its compiled code."""
        for path in self.ours.iterdir() if self.ours.exists() else ():
            if path.name != "cpu":
                _remove(path)

    @contextmanager
    def writing(self, path: Path) -> Iterator[Path]:
        """A place beside `path` that becomes `path` when all is written."""
        partial = path.with_name(f"{path.name}.partial")
        _remove(partial)
        try:
            yield partial
            partial.rename(path)
        finally:
            _remove(partial)


def default_root() -> Path:
    """`$XDG_CACHE_HOME/funitel-peers`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "funitel-peers"


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
