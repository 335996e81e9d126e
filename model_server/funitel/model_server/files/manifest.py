"""The manifest of a folder that this program wrote: checksums of its files, by which damage is found before it is read.

Beside the manifest lies what was verified when, by the size, the times and the inode of each file: a file that has not
been touched since is not read whole at every start. Of those, and of files too large for one start, some chunks are
verified at each start, in turns.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funitel.model_server.files.integrity import read_json
from funitel.proto.errors import WeightsError

logger = logging.getLogger(__name__)

MANIFEST = "funitel-manifest.json"
VERIFIED = "funitel-verified.json"
CHUNK_BYTES = 1 << 26  # that one checksum is of
SMALL_BYTES = 1 << 24  # files up to this size are read whole at every start
REREAD_BYTES = 1 << 26  # of untouched files that are read again at a start
MOST_BYTES = 1 << 31  # of touched files, such as those of a copy, that are read at a start
_PART_BYTES = 1 << 20


class Damaged(Exception):
    """What of a folder is not as its manifest says; one line that names the file."""


@dataclass(frozen=True, slots=True)
class Checksums:
    """The size of a file in bytes, and the SHA-256 of each of its chunks."""

    num_bytes: int
    chunks: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> "Checksums":
        """Those of a file as it is."""
        num_bytes = path.stat().st_size
        return cls(num_bytes, tuple(_chunk_digest(path, number) for number in range(_num_chunks(num_bytes))))


def write_manifest(folder: Path, pattern: str = "*") -> None:
    """Write the checksums of all files of a folder with names of the pattern, which are right now."""
    names = [path.relative_to(folder).as_posix() for path in _files(folder) if path.match(pattern)]
    checksums = {name: Checksums.of(folder / name) for name in names}
    entries = {name: {"bytes": each.num_bytes, "sha256": each.chunks} for name, each in checksums.items()}
    (folder / MANIFEST).write_text(json.dumps({"chunk_bytes": CHUNK_BYTES, "files": entries}, indent=1) + "\n")
    _write_state(folder, {name: _State(_stamp(folder / name), 0, len(checksums[name].chunks)) for name in names})


def has_manifest(folder: Path) -> bool:
    """Whether there is one, whatever it says."""
    return (folder / MANIFEST).exists()


def verify(folder: Path, *, rereads: bool = True) -> None:
    """Compare a folder with its manifest; of large files as much as a start affords, which is logged.

    Args:
        folder: has a manifest.
        rereads: whether chunks of untouched files are read again.

    Raises:
        Damaged: the first difference that was found; or the manifest cannot be read.
    """
    begin = time.monotonic()
    expected, states = _read_manifest(folder), _read_state(folder)
    budget = _Budget(MOST_BYTES, REREAD_BYTES if rereads else 0)
    after: dict[str, _State] = {}
    # Small files first, then the large ones that were verified least.
    order = sorted(expected, key=lambda name: _share_verified(expected[name], states.get(name)))
    for name in order:
        after[name] = _verify_file(folder, name, expected[name], states.get(name), budget)
    if after != states:
        _write_state(folder, after)
    left = sum(_left_bytes(expected[name], state) for name, state in after.items())
    if budget.read_bytes > SMALL_BYTES or left:
        logger.info(
            "verified checksums folder=%s read_bytes=%d of_bytes=%d seconds=%.2f%s",
            folder,
            budget.read_bytes,
            sum(each.num_bytes for each in expected.values()),
            time.monotonic() - begin,
            f"; {left} bytes were never verified here, and are at the next starts" if left else "",
        )


@dataclass(frozen=True, slots=True)
class _State:
    """What was verified of a file that was so then: `num_verified` chunks up to now, some again, up to `next_chunk`."""

    stamp: tuple[int, ...]
    next_chunk: int
    num_verified: int


@dataclass(slots=True)
class _Budget:
    """Bytes that may still be read at this start of files that were touched, and of others; and those that were."""

    touched: int
    untouched: int
    read_bytes: int = 0

    def grants(self, num_bytes: int, *, is_touched: bool) -> bool:
        """Take bytes off the budget of a file; False where less is left."""
        if is_touched:
            self.touched -= num_bytes
            return self.touched >= 0
        self.untouched -= num_bytes
        return self.untouched >= 0


def _verify_file(folder: Path, name: str, checksums: Checksums, known: _State | None, budget: _Budget) -> _State:
    path = folder / name
    try:
        stamp = _stamp(path)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    if stamp[0] != checksums.num_bytes:
        raise Damaged(f"{path} has {stamp[0]} bytes, {checksums.num_bytes} were written")
    count = len(checksums.chunks)
    state = known if known is not None and known.stamp == stamp else _State(stamp, 0, 0)
    number, verified = state.next_chunk, state.num_verified
    for _ in range(count):
        num_bytes = min(CHUNK_BYTES, checksums.num_bytes)
        if checksums.num_bytes > SMALL_BYTES and not budget.grants(num_bytes, is_touched=verified < count):
            break
        number %= count
        _verify_chunk(path, number, checksums.chunks[number])
        budget.read_bytes += num_bytes
        number, verified = number + 1, verified + 1
    if checksums.num_bytes <= SMALL_BYTES:
        return _State(stamp, 0, count)
    return _State(stamp, number % count, verified)


def _share_verified(checksums: Checksums, state: _State | None) -> float:
    if checksums.num_bytes <= SMALL_BYTES or state is None:
        return -1.0 if checksums.num_bytes <= SMALL_BYTES else 0.0
    return state.num_verified / len(checksums.chunks)


def _verify_chunk(path: Path, number: int, expected: str) -> None:
    try:
        found = _chunk_digest(path, number)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    if found != expected:
        first = number * CHUNK_BYTES
        raise Damaged(f"{path} is damaged: of its bytes from {first} on, the checksum differs from that of {MANIFEST}")


def _chunk_digest(path: Path, number: int) -> str:
    digest, left = hashlib.sha256(), CHUNK_BYTES
    with path.open("rb") as file:
        file.seek(number * CHUNK_BYTES)
        while left and (part := file.read(min(left, _PART_BYTES))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()


def _num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)


def _left_bytes(checksums: Checksums, state: _State) -> int:
    return max(0, len(checksums.chunks) - state.num_verified) * min(CHUNK_BYTES, checksums.num_bytes)


def _stamp(path: Path) -> tuple[int, ...]:
    """Size, times of the last change of content and of attributes, inode: a write changes some of them."""
    state = path.stat()
    return (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)


def _files(folder: Path) -> Iterator[Path]:
    own = {folder / MANIFEST, folder / VERIFIED}
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path not in own)


def _read_manifest(folder: Path) -> dict[str, Checksums]:
    try:
        content: dict[str, Any] = read_json(folder / MANIFEST)
        expected = {}
        for name, entry in content["files"].items():
            num_bytes, chunks = int(entry["bytes"]), tuple(map(str, entry["sha256"]))
            if len(chunks) != _num_chunks(num_bytes) or content["chunk_bytes"] != CHUNK_BYTES:
                raise ValueError(name)
            expected[str(name)] = Checksums(num_bytes, chunks)
    except (WeightsError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise Damaged(f"{folder / MANIFEST} is no manifest: {error}") from error
    if not expected:
        raise Damaged(f"{folder / MANIFEST} is no manifest: it names no file")
    return expected


def _read_state(folder: Path) -> dict[str, _State]:
    """What was verified before; nothing where that cannot be read."""
    try:
        content = read_json(folder / VERIFIED)
        return {
            name: _State(tuple(map(int, entry["stamp"])), abs(int(entry["next"])), abs(int(entry["verified"])))
            for name, entry in content.items()
        }
    except (WeightsError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return {}


def _write_state(folder: Path, states: dict[str, _State]) -> None:
    """Note what was verified, in one step; a folder that cannot be written is verified anew at the next start."""
    entries = {
        name: {"stamp": state.stamp, "next": state.next_chunk, "verified": state.num_verified}
        for name, state in states.items()
    }
    scratch = folder / f".{VERIFIED}.{os.getpid()}"
    with suppress(OSError):
        scratch.write_text(json.dumps(entries, indent=1) + "\n")
        scratch.rename(folder / VERIFIED)
