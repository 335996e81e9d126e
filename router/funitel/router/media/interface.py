"""A media item of a request, before and after it is processed."""

from dataclasses import dataclass, field

from funitel.proto.step import MediaInput, MediaKind


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Where a media item comes from: its bytes, or the URL of them (http, https or data).

    `place` is its field in the request, for errors, such as `messages[0].content[1].image_url`.
    """

    kind: MediaKind
    place: str
    url: str = ""
    data: bytes | None = field(default=None, repr=False)
    detail: str = ""  # OpenAI's: low, high or auto
    format: str = ""  # that the client says, such as png or wav; the bytes decide


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMedia:
    """A processed media item, and the text that stands for it in a prompt.

    `text` has every run of the model's placeholder token as one placeholder; `runs` are the lengths of these, in order.
    Their sum is the number of features.
    """

    input: MediaInput
    text: str
    runs: tuple[int, ...]
