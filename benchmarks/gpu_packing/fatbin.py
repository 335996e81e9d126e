"""Thin the CUDA code of a shared library to one architecture, as NVIDIA's nvprune does for object files.

The section `.nv_fatbin` holds containers, one for each compiled source file, each on a multiple of 8 bytes. Integers
are little-endian. A container begins with the header of CUDA's `fatbinary.h` (`struct computeFatBinaryHeader`):

    u32 magic        0xBA55ED50
    u16 version
    u16 header size
    u64 size         of the entries behind the header

Entries follow without gaps. NVIDIA does not document their header; these fields are what `cuobjdump` shows, and
https://github.com/n-eiling/cuda-fatbin-decompression describes the same:

    u16 kind         1: PTX, 2: machine code (an ELF)
    u16 version
    u32 header size
    u64 size         of the content behind the header, padded
    ...
    u32 at byte 28   architecture: 90 of sm_90 and of sm_90a

The library finds a container by its address (`.nvFatBinSegment`). So a container stays where it is and keeps its
header; it gets fewer entries, a smaller size, and zeros behind them, which take no room when compressed. A container
without machine code for the architecture gets a copy of the smallest machine code for another architecture: it stays
well-formed, and its kernels cannot be launched. Where it held PTX that the driver could compile, they could be before.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from gpu_packing.errors import PackError

SECTION = ".nv_fatbin"
MAGIC = 0xBA55ED50
CONTAINER = struct.Struct("<IHHQ")  # magic, version, header size, size
ENTRY = struct.Struct("<HHIQ")  # kind, version, header size, size
ARCHITECTURE_AT = 28  # in an entry
PTX, MACHINE_CODE = 1, 2
ALIGNMENT = 8

ELF_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
SECTIONS_AT, SECTION_COUNT_AT = 0x28, 0x3C
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, ...


@dataclass(frozen=True)
class Entry:
    """Code for one architecture, with its header."""

    kind: int
    architecture: int
    content: bytes


@dataclass(frozen=True)
class Container:
    """The entries of one source file, and where they lie in the file."""

    begin: int
    entries_begin: int
    end: int
    entries: tuple[Entry, ...]

    def code_for(self, architecture: int) -> tuple[Entry, ...]:
        """Its machine code for an architecture."""
        return tuple(e for e in self.entries if e.kind == MACHINE_CODE and e.architecture == architecture)


@dataclass(frozen=True)
class Thinned:
    """A library with fewer entries, and how many bytes of entries remain of how many."""

    content: bytes
    kept_bytes: int
    all_bytes: int
    num_containers: int
    num_without_code: int  # containers that held no machine code for the architecture


def thin(library: bytes, architecture: int) -> Thinned:
    """Keep the machine code for one architecture; a library without CUDA code is returned as it is.

    Raises:
        PackError: the containers are not as described above, or none holds code for the architecture.
    """
    found = list(containers(library))
    all_bytes = sum(container.end - container.entries_begin for container in found)
    if not found:
        return Thinned(library, 0, 0, 0, 0)
    if not any(container.code_for(architecture) for container in found):
        raise PackError(f"the library has no machine code for sm_{architecture}")
    thinned, kept, without = bytearray(library), 0, 0
    entries = chain.from_iterable(container.entries for container in found)
    others = [e.content for e in entries if e.kind == MACHINE_CODE and e.architecture != architecture]
    smallest = min(others, key=len, default=None)
    for container in found:
        code = b"".join(entry.content for entry in container.code_for(architecture))
        size = container.end - container.entries_begin
        if not code:
            without += 1
            # It holds only PTX where nothing else has machine code for another architecture: it stays whole then.
            code = smallest or library[container.entries_begin : container.end]
        thinned[container.entries_begin : container.end] = code.ljust(size, b"\0")
        magic, version, header_size, _ = CONTAINER.unpack_from(library, container.begin)
        CONTAINER.pack_into(thinned, container.begin, magic, version, header_size, len(code))
        kept += len(code)
    return Thinned(bytes(thinned), kept, all_bytes, len(found), without)


def containers(library: bytes) -> Iterator[Container]:
    """The containers of a library, in their order.

    Raises:
        PackError: something else lies between them, or an entry is of a kind that is not known.
    """
    begin, size = _section(library)
    at, end = begin, begin + size
    while at + CONTAINER.size <= end:
        magic, _, header_size, entries_size = CONTAINER.unpack_from(library, at)
        if magic == MAGIC:
            container_end = at + header_size + entries_size
            if container_end > end:
                raise PackError(f"a container of {SECTION} at byte {at} is cut off")
            entries = tuple(_entries(library, at + header_size, container_end))
            yield Container(at, at + header_size, container_end, entries)
            at = container_end
        elif any(library[at : at + ALIGNMENT]):
            raise PackError(f"{SECTION} holds something that is no container at byte {at}")
        else:
            at += ALIGNMENT


def _entries(library: bytes, begin: int, end: int) -> Iterator[Entry]:
    at = begin
    while at < end:
        kind, _, header_size, size = ENTRY.unpack_from(library, at)
        entry_end = at + header_size + size
        if kind not in (PTX, MACHINE_CODE) or header_size <= ARCHITECTURE_AT or entry_end > end:
            raise PackError(f"an entry of {SECTION} at byte {at} is not of a known form")
        (architecture,) = struct.unpack_from("<I", library, at + ARCHITECTURE_AT)
        yield Entry(kind, architecture, library[at:entry_end])
        at = entry_end


def _section(library: bytes) -> tuple[int, int]:
    """Offset and size of the section in the file; 0 and 0 where there is none."""
    if not library.startswith(ELF_MAGIC):
        raise PackError("the library is no ELF of 64 bits")
    (at,) = struct.unpack_from("<Q", library, SECTIONS_AT)
    count, names_index = struct.unpack_from("<HH", library, SECTION_COUNT_AT)
    headers = [SECTION_HEADER.unpack_from(library, at + SECTION_HEADER.size * i) for i in range(count)]
    names = headers[names_index][4] if headers else 0
    wanted = SECTION.encode() + b"\0"
    for name, _, _, _, offset, size, *_ in headers:
        if library.startswith(wanted, names + name):
            return offset, size
    return 0, 0
