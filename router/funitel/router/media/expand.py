"""Put what stands for media items into a rendered prompt, and find them again among its tokens."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import MediaKind, MediaSpan
from funitel.router.core.request import RequestMedia
from funitel.router.media.interface import PreparedMedia
from funitel.router.text.control_text import Spans

NOUNS = {MediaKind.IMAGE: "image", MediaKind.AUDIO: "sound"}


def insert(
    text: str,
    plain: Spans,
    prepared: Sequence[PreparedMedia],
    markers: Mapping[MediaKind, str],
    field: str = "messages",
) -> tuple[str, Spans]:
    """Replace the markers of a rendered prompt, in order, by the text of the items; return it with its plain spans.

    A marker in a plain span, or over the edge of one, is ordinary text.

    Args:
        text: the prompt.
        plain: spans of it in characters, in order, that are ordinary text.
        prepared: the items, in order; those of one kind take the markers of that kind.
        markers: by kind.
        field: of the request, for errors.

    Raises:
        InvalidRequest: there are not as many markers of a kind as items.
    """
    found: list[tuple[int, int, str]] = []
    for kind, marker in markers.items():
        items = [item for item in prepared if item.input.kind == kind]
        places = _places(text, plain, marker)
        if len(places) != len(items):
            noun = NOUNS[kind]
            raise InvalidRequest(
                f"`{field}` has {len(items)} {noun}s, and the prompt {len(places)} places for {noun}s ({marker})", field
            )
        found += [(place, place + len(marker), item.text) for place, item in zip(places, items, strict=True)]
    return _replaced(text, plain, sorted(found))


def _places(text: str, plain: Spans, marker: str) -> list[int]:
    """Where a marker stands that no plain span touches."""
    edges = [0, *(edge for span in plain for edge in span), len(text)]
    places = []
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        place = text.find(marker, begin, end)
        while place >= 0:
            places.append(place)
            place = text.find(marker, place + len(marker), end)
    return places


def _replaced(text: str, plain: Spans, changes: Sequence[tuple[int, int, str]]) -> tuple[str, Spans]:
    """Replace [begin, end) of a text, and move the plain spans, which no change touches."""
    if not changes:
        return text, plain
    parts = [text[: changes[0][0]]]
    for (_, begin, new), (end, _, _) in pairwise([*changes, (len(text), len(text), "")]):
        parts += [new, text[begin:end]]
    moved: Spans = []
    shift, rest = 0, list(reversed(changes))
    for begin, end in plain:
        while rest and rest[-1][1] <= begin:
            start, stop, new = rest.pop()
            shift += len(new) - (stop - start)
        moved.append((begin + shift, end + shift))
    return "".join(parts), moved


def place(
    ids: Sequence[int],
    prepared: Sequence[PreparedMedia],
    placeholders: Mapping[MediaKind, int],
    field: str = "messages",
) -> tuple[list[int], tuple[RequestMedia, ...]]:
    """Repeat the placeholders of a prompt as often as the runs of its items say; return it with the items' places.

    Args:
        ids: tokens of a prompt of `insert`, with one placeholder for each run.
        prepared: its items, in order.
        placeholders: the token that takes a feature, by kind.
        field: of the request, for errors.

    Raises:
        InvalidRequest: there are not as many placeholders as runs.
    """
    kinds = {token: kind for kind, token in placeholders.items()}
    waiting = {kind: [item for item in reversed(prepared) if item.input.kind == kind] for kind in placeholders}
    placed: list[RequestMedia] = []
    expanded: list[int] = []
    copied, index, num_ids = 0, 0, len(ids)
    while index < num_ids:
        kind = kinds.get(ids[index])
        if kind is None:
            index += 1
            continue
        expanded += ids[copied:index]
        if not waiting[kind]:
            raise _mismatch(field, kind)
        item = waiting[kind].pop()
        begin = len(expanded)
        for number, run in enumerate(item.runs):
            if number:
                try:
                    following = ids.index(placeholders[kind], index)
                except ValueError:
                    raise _mismatch(field, kind) from None
                expanded += ids[index:following]
                index = following
            expanded += [placeholders[kind]] * run
            index += 1
        copied = index
        span = MediaSpan(item.input.key, begin, len(expanded) - begin, item.input.grid)
        placed.append(RequestMedia(span, item.input))
    expanded += ids[copied:]
    for kind, items in waiting.items():
        if items:
            raise _mismatch(field, kind)
    return expanded, tuple(placed)


def _mismatch(field: str, kind: MediaKind) -> InvalidRequest:
    return InvalidRequest(f"the tokens of `{field}` do not have the places of its {NOUNS[kind]}s, one for each", field)
