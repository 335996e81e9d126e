"""The kind of an audio file, by its first bytes; a name or a content type decides nothing."""

from importlib.util import find_spec

from funitel.proto.errors import InvalidRequest

HAS_AV = find_spec("av") is not None  # of the extra `av`
AV_CONTAINERS = {"MP4": "mp4", "Matroska": "matroska"}  # what FFmpeg calls them
_AV_WORDS = ", MP4 (m4a) and Matroska (webm)"
WORDS = "WAV, FLAC, OGG (Vorbis or Opus)" + (f", MP3{_AV_WORDS}" if HAS_AV else " and MP3")


def container_of(content: bytes, field: str) -> str:
    """The format of a file: one of AV_CONTAINERS, or what libsndfile calls it.

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
    given = "none of these"
    if container := _av_container(content):
        if HAS_AV:
            return container
        given = f"{container}, which needs the package `av`"
    elif content[:4] == b"FORM":
        given = "AIFF"
    raise InvalidRequest(f"`{field}` must be a file in one of the formats {WORDS}. Given: {given}", field)


def _av_container(content: bytes) -> str:
    if content[4:8] == b"ftyp":
        return "MP4"
    return "Matroska" if content[:4] == b"\x1a\x45\xdf\xa3" else ""


def _is_mpeg_frame(head: bytes) -> bool:
    """Whether a frame of MPEG audio, layer 1 to 3, begins here: eleven bits set, then no reserved version or layer."""
    if len(head) < 2 or head[0] != 0xFF:
        return False
    return head[1] & 0xE0 == 0xE0 and head[1] & 0x18 != 0x08 and head[1] & 0x06 != 0
