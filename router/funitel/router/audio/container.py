"""The kind of an audio file, by its first bytes; a name or a content type decides nothing."""

from funitel.proto.errors import InvalidRequest

WORDS = "WAV, FLAC, OGG (Vorbis or Opus) and MP3"
_REFUSED = ((b"ftyp", 4, "MP4 (m4a)"), (b"\x1a\x45\xdf\xa3", 0, "Matroska (webm)"), (b"FORM", 0, "AIFF"))


def container_of(content: bytes, field: str) -> str:
    """What libsndfile calls the format of a file.

    Raises:
        InvalidRequest: it is none of those that are read; names `field`.
    """
    if content[:4] in (b"RIFF", b"RIFX") and content[8:12] == b"WAVE":
        return "WAV"
    if content[:4] == b"RF64" and content[8:12] == b"WAVE":
        return "RF64"
    if content[:4] == b"fLaC":
        return "FLAC"
    if content[:4] == b"OggS":
        return "OGG"
    if content[:3] == b"ID3" or _is_mpeg_frame(content[:2]):
        return "MP3"
    name = next((name for magic, at, name in _REFUSED if content[at : at + len(magic)] == magic), "none of these")
    raise InvalidRequest(f"`{field}` must be a file in one of the formats {WORDS}. Given: {name}", field)


def _is_mpeg_frame(head: bytes) -> bool:
    """Whether a frame of MPEG audio, layer 1 to 3, begins here: eleven bits set, then no reserved version or layer."""
    if len(head) < 2 or head[0] != 0xFF:
        return False
    return head[1] & 0xE0 == 0xE0 and head[1] & 0x18 != 0x08 and head[1] & 0x06 != 0
