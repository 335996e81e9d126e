"""The media of a prompt on their way to the engine: checked against the model, prepared, placed among its tokens."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import MediaKind
from funitel.router.core import request_context
from funitel.router.core.request import Limits, RequestMedia
from funitel.router.media.expand import NOUNS
from funitel.router.media.interface import MediaSource, PreparedMedia
from funitel.router.media.service import MediaService
from funitel.router.serving.service import Service

Prepared = tuple[PreparedMedia, ...]


async def prepare_media(service: Service, sources: Sequence[MediaSource]) -> Prepared:
    """Fetch, decode and process the media items of a prompt, in its order.

    Raises:
        InvalidRequest: the model does not take an item, the item cannot be had, or the shards could not keep all.
        Overloaded: too many items of the request's key wait.
    """
    if not sources:
        return ()
    media = _taking(service, sources)
    prepared = tuple(await media.prepare(sources, request_context.current().owner))
    _check_room(sources, prepared, service.engine.limits)
    return prepared


def _taking(service: Service, sources: Sequence[MediaSource]) -> MediaService:
    """The service of media; raises InvalidRequest for the first item that the model does not take."""
    media = service.media
    taken = service.media_kinds
    refused = next((source for source in sources if source.kind not in taken), None)
    if media is None or refused is not None:
        source = refused or sources[0]
        what = " and ".join(("text", *(f"{NOUNS[kind]}s" for kind in sorted(taken))))
        words = f"`{source.place}`: the model {service.model_id} takes no {NOUNS[source.kind]}s, only {what}"
        raise InvalidRequest(words, source.place)
    return media


def _check_room(sources: Sequence[MediaSource], prepared: Prepared, limits: Limits) -> None:
    """Raise InvalidRequest where the shards could not keep the features of all items at once."""
    facts = limits.media
    if facts is None:
        return
    needed, seen = 0, set[bytes]()
    for source, item in zip(sources, prepared, strict=True):
        if item.input.key not in seen:
            seen.add(item.input.key)
            needed += item.input.num_features * facts.feature_bytes
        if needed > facts.cache_bytes:
            raise InvalidRequest(
                f"`{source.place}`: the features of the request's {NOUNS[source.kind]}s must take at most "
                f"{facts.cache_bytes} bytes. Given: {needed}",
                source.place,
            )


def num_repeated(prepared: Prepared) -> int:
    """Tokens of a prompt that are not in its text: each run of placeholders is written there once."""
    return sum(sum(item.runs) - len(item.runs) for item in prepared)


def placed(
    service: Service, ids: Sequence[int], prepared: Prepared, field: str
) -> tuple[tuple[int, ...], tuple[RequestMedia, ...]]:
    """Return the tokens of a prompt with all placeholders, and the places of its items.

    Raises:
        InvalidRequest: an item has more tokens than a step can have, where its tokens must be in one step; or a token
            stands for an item that is not there.
    """
    media = service.media
    if media is None:
        return tuple(ids), ()
    if not prepared:
        for kind, token in media.placeholders.items():
            if token in ids:
                noun, text = NOUNS[kind], service.tokenizer.token_text(token)
                raise InvalidRequest(f"`{field}` has a token that stands for an {noun}, {text}, and no {noun}", field)
        return tuple(ids), ()
    expanded, items = media.place(ids, prepared, field)
    most = service.engine.limits.max_span_tokens
    longest = max((each.span.length for each in items), default=0)
    if most and longest > most:
        raise InvalidRequest(
            f"an image of `{field}` must have at most {most} tokens, --max-batch-prefill-tokens. Given: {longest}",
            field,
        )
    return tuple(expanded), items


def owned(media: tuple[RequestMedia, ...], owner: bytes, salt: str) -> tuple[RequestMedia, ...]:
    """The media of a prompt as those of an owner and a salt, which share no cached features with others.

    The time of an answer would tell others that an image was here. Without owner and salt all share them.
    """
    if not (owner or salt):
        return media
    root = hashlib.sha256(owner + salt.encode()).digest()
    found = []
    for each in media:
        key = hashlib.sha256(root + each.input.key).digest()
        found.append(RequestMedia(replace(each.span, key=key), replace(each.input, key=key)))
    return tuple(found)


def with_all_rows(service: Service, rows: str, prepared: Prepared) -> str:
    """The JSON list of the tokens of a prompt, each placeholder as often as the model reads it."""
    if not prepared or service.media is None:
        return rows
    kinds = {token: kind for kind, token in service.media.placeholders.items()}
    runs = {
        kind: iter([run for each in prepared if each.input.kind == kind for run in each.runs]) for kind in MediaKind
    }
    listed: list[Any] = []
    for row in json.loads(rows):
        kind = kinds.get(row["id"])
        listed += [row] * (1 if kind is None else next(runs[kind], 1))
    return json.dumps(listed, ensure_ascii=False, separators=(",", ":"))
