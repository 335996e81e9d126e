"""The messages between router and keeper: one packet each, with the descriptors that travel beside it.

A packet is a kind, the number of a connection, the number of a request on it, and bytes. The keeper reads neither the
bytes of requests nor facts: it keeps them, and gives them to the next router.

The head of a packet, HELLO, REFUSED and LISTENERS are the same in all versions.
"""

import json
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

VERSION = 2  # of these messages, and of what routers write into the journal
FINISHED_CODE = 75  # exit code of a router that the next keeper has refused for its version, after its last connection
MAX_RAW_BYTES = 1 << 15  # in a packet; more travels as a file in memory


class Kind(IntEnum):
    """What a packet says."""

    # From a router
    HELLO = 1  # `RouterHello`
    READY = 2  # pass connections on to me from now on
    REQUEST = 3  # a `JournalledRequest` that is whole; from a keeper too
    FACTS = 4  # further facts of a request, a JSON object; from a keeper too
    DONE = 5  # the answer was given to the kernel: forget the request
    RELEASE = 6  # the connection has ended
    ADOPT = 7  # a connection that an earlier keeper had; has a descriptor
    PARTIAL = 8  # the bytes of a request that is not whole yet; from a keeper too
    FED = 9  # the last of the connections of a router that feeds
    # From a keeper
    CONNECTION = 32  # a connection; `number` is that of its listening socket; has a descriptor
    END = 33  # this was the state: everything later is new
    YIELD = 34  # another router takes over: hand over what is not in the journal, and end
    REFUSED = 35  # the bytes say why; `number` is the version of the keeper where it is for that of the router
    # From a launcher, and the answer
    LISTENERS = 36  # the listening sockets; the answer has their descriptors


@dataclass(frozen=True, slots=True)
class Packet:
    """One message; `fds` are descriptors of the sender, or of the receiver once it is received."""

    kind: Kind
    connection: int = 0
    number: int = 0
    raw: bytes = b""
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RouterHello:
    """The first message of a router. `feeds`: it serves already, and brings its connections to this keeper.

    It does so once the keeper has answered by END.
    """

    generation: int
    feeds: bool = False
    version: int = VERSION

    def encode(self) -> bytes:
        """Make the bytes of the packet."""
        return json.dumps([self.version, self.generation, self.feeds]).encode()

    @classmethod
    def decode(cls, raw: bytes) -> "RouterHello":
        """Read the bytes of a packet; raises ValueError."""
        try:
            version, generation, feeds = json.loads(raw)
            return cls(int(generation), bool(feeds), int(version))
        except TypeError as error:
            raise ValueError("this is no greeting") from error


@dataclass(slots=True)
class JournalledRequest:
    """A request in the journal: its number on its connection, its bytes, and its facts."""

    number: int
    raw: bytes = b""
    facts: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Make the bytes of the packet."""
        facts = json.dumps(self.facts).encode()
        return b"%b%b%b" % (_LENGTH.pack(len(facts)), facts, self.raw)

    @classmethod
    def decode(cls, number: int, content: bytes) -> "JournalledRequest":
        """Read the bytes of a packet; a request with facts that cannot be read has none."""
        try:
            (length,) = _LENGTH.unpack_from(content)
        except struct.error:
            return cls(number)
        start = _LENGTH.size + length
        found = cls(number, content[start:])
        found.add(content[_LENGTH.size : start])
        return found

    def add(self, raw: bytes) -> bool:
        """Add facts, the bytes of a packet; False, and no facts at all, where these cannot be read."""
        try:
            facts = json.loads(raw)
        except ValueError:
            facts = None
        if isinstance(facts, dict):
            self.facts |= facts
            return True
        self.facts.clear()
        return False


_LENGTH = struct.Struct("<I")  # of the facts in front of a request
_HEAD = struct.Struct("<BQI?")  # kind, connection, number, whether the bytes are in a file


def encode(packet: Packet, *, is_in_file: bool = False) -> bytes:
    """Make the bytes of a packet."""
    raw = b"" if is_in_file else packet.raw
    return _HEAD.pack(packet.kind, packet.connection, packet.number, is_in_file) + raw


def decode(data: bytes) -> tuple[Packet, bool]:
    """Read the bytes of a packet; and whether its own bytes are in a file. Raises ValueError."""
    try:
        kind, connection, number, is_in_file = _HEAD.unpack_from(data)
    except struct.error as error:
        raise ValueError("a packet is too short") from error
    return Packet(Kind(kind), connection, number, data[_HEAD.size :]), is_in_file
