"""TGI's notation of images in prompts, `![](URL)`, on the routes that have one prompt as text."""

from collections.abc import Iterator

from funitel.proto.step import MediaKind
from funitel.router.media.interface import MediaSource
from funitel.router.serving.media import prepare_media
from funitel.router.serving.prepare import Prompt
from funitel.router.serving.service import Service

_BEFORE_URL, _AFTER_URL = "![](", ")"


async def inline_prompt(service: Service, inputs: str, field: str = "inputs") -> Prompt:
    """The prompt of TGI's notation: `![](URL)` is an image, where the model takes images; else it is text.

    Raises: as `prepare_media`.
    """
    media = service.media
    if media is None or MediaKind.IMAGE not in service.media_kinds or _BEFORE_URL not in inputs:
        return Prompt(inputs)
    pieces = list(_pieces(inputs))
    sources = [MediaSource(MediaKind.IMAGE, field, url=url) for url in pieces[1::2]]
    prepared = await prepare_media(service, sources)
    marked = media.prompt_marker(MediaKind.IMAGE).join(pieces[::2])
    text, _ = media.insert(marked, [], prepared, field)
    return Prompt(text, media=prepared)


def _pieces(inputs: str) -> Iterator[str]:
    """Texts and URLs of a prompt by turns; a text first and last."""
    begin = 0
    while True:
        start = inputs.find(_BEFORE_URL, begin)
        end = inputs.find(_AFTER_URL, start) if start >= 0 else -1
        if end < 0:
            yield inputs[begin:]
            return
        yield inputs[begin:start]
        yield inputs[start + len(_BEFORE_URL) : end]
        begin = end + 1
