"""Archives as pieces of a limited size, a manifest of their sums, and a script that puts them together again."""

import hashlib
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

MIB = 1 << 20
READ_BYTES = 1 << 22
PRESET: Final = 9  # of xz: a dictionary of 64 MiB
MANIFEST, SCRIPT = "MANIFEST.json", "unpack.sh"


@dataclass(frozen=True)
class Piece:
    """A part of an archive; `call` is the number of the transfer that carries it, from 1."""

    file: str
    size: int
    sha256: str
    call: int


@dataclass(frozen=True)
class Archive:
    """A tar of a folder, or a file as it is (`is_tar` is False); pieces are in their order."""

    name: str
    is_tar: bool
    size: int
    sha256: str
    pieces: tuple[Piece, ...]


def write_tar(folder: Path, path: Path) -> None:
    """Pack the files of a folder as tar.xz; the same files give the same bytes."""
    with tarfile.open(path, "w:xz", preset=PRESET) as archive:
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            archive.add(file, str(file.relative_to(folder)), recursive=False, filter=_without_origin)


def _without_origin(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def split(paths: Sequence[Path], folder: Path, limit: int) -> list[Archive]:
    """Write the pieces of files into a folder, and say which transfers of at most `limit` bytes carry them."""
    calls: list[int] = []  # bytes of each transfer
    archives = []
    for path in paths:
        pieces: list[Piece] = []
        whole = hashlib.sha256()
        with path.open("rb") as file:
            while size := min(limit, path.stat().st_size - file.tell()):
                piece = folder / f"{path.name}.{len(pieces)}"
                digest = hashlib.sha256()
                with piece.open("wb") as target:
                    left = size
                    while left:
                        chunk = file.read(min(READ_BYTES, left))
                        left -= len(chunk)
                        target.write(chunk)
                        digest.update(chunk)
                        whole.update(chunk)
                pieces.append(Piece(piece.name, size, digest.hexdigest(), _call_for(size, calls, limit)))
        is_tar = path.name.endswith(".tar.xz")
        archives.append(Archive(path.name, is_tar, path.stat().st_size, whole.hexdigest(), tuple(pieces)))
    return archives


def _call_for(size: int, calls: list[int], limit: int) -> int:
    """The first transfer with room for a piece, from 1; it has less room then."""
    index = next((i for i, used in enumerate(calls) if used + size <= limit), len(calls))
    if index == len(calls):
        calls.append(0)
    calls[index] += size
    return index + 1


def write_manifest(folder: Path, archives: Sequence[Archive], packages: Mapping[str, Mapping[str, str]]) -> None:
    """Write what the pieces are, the versions of the packages in them, and the script that unpacks them."""
    manifest = {"archives": [asdict(archive) for archive in archives], "packages": packages}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    (folder / SCRIPT).write_text(UNPACK)
    (folder / SCRIPT).chmod(0o755)


def describe(archives: Sequence[Archive]) -> list[str]:
    """A line for each piece, in the order of the transfers."""
    pieces = sorted((piece for archive in archives for piece in archive.pieces), key=lambda piece: piece.call)
    width = max((len(piece.file) for piece in pieces), default=0)
    lines = [f"{piece.file:{width}} {piece.size / MIB:7.1f} MiB  call {piece.call}" for piece in pieces]
    return [*lines, f"{SCRIPT} and {MANIFEST} go with every call"]


UNPACK = r"""#!/bin/bash
# bash unpack.sh TARGET: unpack every archive of MANIFEST.json with all of its pieces beside this script into a folder.
# After each transfer it unpacks what has become complete. Needs bash and python3, no network.
set -euo pipefail
target=${1:?usage: bash unpack.sh TARGET}
"${PYTHON:-python3}" - "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" "$target" <<'END'
import hashlib, json, shutil, sys, tarfile
from pathlib import Path

source, target = map(Path, sys.argv[1:])


class Joined:
    def __init__(self, paths):
        self.files = [path.open("rb") for path in paths]

    def read(self, size=-1):
        while self.files:
            if chunk := self.files[0].read(size):
                return chunk
            self.files.pop(0).close()
        return b""


def digest_of(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


target.mkdir(parents=True, exist_ok=True)
for archive in json.loads((source / "MANIFEST.json").read_text())["archives"]:
    name, pieces = archive["name"], archive["pieces"]
    done = target / f"{name}.sha256"
    place = target / (name.removesuffix(".tar.xz") if archive["is_tar"] else name)
    if done.is_file() and done.read_text() == archive["sha256"]:
        print(f"{place}: is there")
        continue
    missing = [piece for piece in pieces if not (source / piece["file"]).is_file()]
    if missing:
        print(f"{name}: waits for " + ", ".join(f"{piece['file']} (call {piece['call']})" for piece in missing))
        continue
    for piece in pieces:
        if digest_of(source / piece["file"]) != piece["sha256"]:
            sys.exit(f"error: {piece['file']} is damaged: its sha256 is not that of MANIFEST.json")
    joined = Joined([source / piece["file"] for piece in pieces])
    if archive["is_tar"]:
        shutil.rmtree(place, ignore_errors=True)
        with tarfile.open(fileobj=joined, mode="r|xz") as tar:
            tar.extractall(place, filter="data")
    else:
        with place.open("wb") as file:
            shutil.copyfileobj(joined, file, 1 << 22)
    done.write_text(archive["sha256"])
    print(f"{place}: unpacked")
END
for folder in "$target"/*/; do
  [ -d "$folder" ] && { "${PYTHON:-python3}" -m compileall -q -j 0 "$folder" >/dev/null 2>&1 || true; }
done
exit 0
"""
