"""Prepare a request for the engine: validate it, tokenize its prompt, and make a `GenerationJob` of it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from funitel.proto.errors import InvalidRequest
from funitel.router.core import request_context
from funitel.router.core.request import Adapter, Request, RequestMedia
from funitel.router.core.stream import Timings
from funitel.router.media.interface import PreparedMedia
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.beam_request import check_beams, with_beams, without_sampling
from funitel.router.serving.media import num_repeated, owned, placed
from funitel.router.serving.sampling_request import BrokenRule, SamplingRequest
from funitel.router.serving.service import Service
from funitel.router.serving.validation import (
    build_request,
    check_not_cut,
    check_parameters,
    check_prompt_ids,
    check_prompt_length,
    check_token_ids,
    with_default_stops,
    with_truncation,
)
from funitel.router.text.control_text import Spans
from funitel.router.text.tokenizer import Tokenizer, TooManyTokens, word_forms

NO_NAMES: Mapping[str, str] = {}
ADAPTER_FACT = "adapter"  # of the journal of a request: name, path and id


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to go on from, and how it enters the model: its tokens if they are given, else those of its text.

    `plain`, of a chat: the spans of its text in which control tokens are ordinary text. `media` are the items that
    its text has.
    """

    text: str
    add_special_tokens: bool = True
    ids: tuple[int, ...] | None = None
    plain: Spans | None = None
    media: tuple[PreparedMedia, ...] = ()


MAX_PROMPT_SCORES = 2**20
"""Values in the scores of all prompts of one request: their events and JSON must not hold up other requests."""


@dataclass(slots=True)
class GenerationJob:
    """A request on its way to the engine; `validated` is an instant of the monotonic clock."""

    service: Service
    request: Request
    arrived: Arrival
    validated: float = field(default_factory=time.monotonic)
    num_cached_tokens: int = 0  # of the prompt, known once its first token is there
    cached_by_tier: dict[str, int] = field(default_factory=dict)  # the same, see `TokenStream`
    num_tokens: int = 0  # of the completion, seen so far
    latest_token: float | None = None  # when one was seen last, on the monotonic clock
    is_part: bool = False  # of a request of several, one after the other, which is counted when all have ended

    @property
    def validation_seconds(self) -> float:
        """Arrival until queued."""
        return self.validated - self.arrived.at

    @property
    def num_answers(self) -> int:
        """Completions that it brings."""
        return 1 if self.request.beams is None else self.request.beams.num_returned

    def succeeded(self, timings: Timings, num_tokens: int) -> None:
        """Note that the whole answer was computed."""
        if self.is_part:
            return
        self.service.metrics.observe_success(self.validation_seconds, timings, num_tokens)

    def siblings(self, count: int) -> list["GenerationJob"]:
        """This job and others like it, `count` in all; the i-th samples with the seed plus i, modulo 2**64.

        One that searches beams is alone: it has several answers.
        """
        if count == 1 or self.request.beams is not None:
            return [self]
        sampling = self.request.sampling
        seeds = [(sampling.seed + place) % 2**64 for place in range(count)]
        return [replace(self, request=replace(self.request, sampling=replace(sampling, seed=seed))) for seed in seeds]


def check_prompt_scores(jobs: Sequence[GenerationJob], field: str) -> None:
    """Raise InvalidRequest where the scores of prompts would be too many values; `field` is what asks for them."""
    scored = [(len(job.request.input_ids), job.request.prompt_logprobs) for job in jobs]
    count = sum(length * (1 + num_top) for length, num_top in scored if num_top is not None)
    if count > MAX_PROMPT_SCORES:
        rule = f"must ask for at most {MAX_PROMPT_SCORES} values for the prompts of a request"
        raise InvalidRequest(f"`{field}` {rule}. Given: {count}", field)


async def prepare(
    service: Service,
    sampling: SamplingRequest,
    prompt: Prompt,
    *,
    stream: bool,
    arrived: Arrival,
    names: Mapping[str, str] = NO_NAMES,
) -> GenerationJob:
    """Check a request, tokenize its prompt and check its lengths.

    Args:
        service: the router's.
        sampling: how to sample and when to stop.
        prompt: what to go on from.
        stream: whether the answer will be streamed.
        arrived: when the request came, its key and its deadline.
        names: the API's names of fields that it calls otherwise than `SamplingRequest` does; for errors.

    Raises:
        NotReady: the shards do not answer yet.
        InvalidRequest: it breaks a rule.
    """
    try:
        adapter = _adapter(service, sampling, arrived)
        request = await _checked(service, sampling.resolved(service.recommended), prompt, names, stream=stream)
    except BrokenRule as broken:
        raise broken.error(names) from None
    grammar = sampling.grammar
    if grammar is not None:  # last, as TGI does, and the most expensive
        field = names.get("grammar", "grammar")
        if service.settings.disable_grammar_support:
            raise InvalidRequest("grammar is not supported: --disable-grammar-support is set", field)
        await service.grammars.check(grammar, field)
    service.metrics.observe_prompt(len(request.input_ids), request.stopping.max_new_tokens)
    context = request_context.current()
    cache_owner = b"" if service.settings.share_prefixes else arrived.cache_owner
    request = replace(
        request,
        adapter=adapter,
        key=arrived.key,
        priority=arrived.priority if sampling.priority is None else sampling.priority,
        deadline=arrived.deadline,
        request_id=context.request_id,
        key_name=context.key_name,
        cache_owner=cache_owner,
        media=owned(request.media, cache_owner, request.cache_salt),
    )
    context.operation, context.request = "text_completion", context.request or request
    return GenerationJob(service, request, arrived)


def _adapter(service: Service, sampling: SamplingRequest, arrived: Arrival) -> Adapter | None:
    """The adapter that a request names; raises BrokenRule, ModelNotFound, or Forbidden where its key is not for it.

    Of a request that is replayed it is the one that an earlier router has found: this router may not know it.
    """
    journal = request_context.current().journal
    adapter = None
    if journal.knows(ADAPTER_FACT):
        known_facts: list[str] = journal.draw(ADAPTER_FACT, list)
        adapter = Adapter(*known_facts)
    elif sampling.adapter_id:
        known = service.adapters.get(sampling.adapter_id)
        if known is None:
            raise BrokenRule(
                "adapter_id", "`$adapter_id` must be the name of an adapter", repr(sampling.adapter_id[:50])
            )
        adapter = known.adapter
    elif sampling.model:
        adapter = service.adapters.named_by_model(sampling.model)
    if adapter is None:
        return None
    if arrived.account is not None:
        arrived.account.check_model(adapter.name)
    found = [adapter.name, adapter.path, adapter.id]
    journal.draw(ADAPTER_FACT, lambda: found)
    return adapter


async def _checked(
    service: Service, sampling: SamplingRequest, prompt: Prompt, names: Mapping[str, str], *, stream: bool
) -> Request:
    """The request of checked parameters and a tokenized prompt; raises BrokenRule."""
    limits, tokenizer = service.engine.limits, service.tokenizer
    sampling = with_truncation(sampling, limits)
    if sampling.beams is not None:
        check_beams(sampling, sampling.beams, limits, service.settings, stream=stream)
        sampling = without_sampling(sampling)
    check_parameters(sampling, prompt.text, limits, service.settings, stream=stream)
    check_token_ids(sampling, tokenizer.num_tokens)
    sampling = with_default_stops(sampling, service.settings)
    language = sampling.target_language
    first_token = None if language is None else tokenizer.languages.token(language)
    input_ids, media, field = prompt.ids, tuple[RequestMedia, ...](), names.get("inputs", "inputs")
    if input_ids is not None:
        placed(service, input_ids, (), field)
    else:
        more = num_repeated(prompt.media)
        try:
            input_ids = await tokenizer.encode(
                prompt.text,
                add_special_tokens=prompt.add_special_tokens,
                field=field,
                plain=prompt.plain,
                max_tokens=max(0, limits.max_input_tokens - more),
                keep_last=None if prompt.media else sampling.truncate,
            )
        except TooManyTokens as known:
            many = TooManyTokens(known.num_tokens + more, is_exact=known.is_exact)
            check_prompt_length(many.num_tokens, sampling.max_new_tokens, limits, many.words)
            raise
        check_prompt_ids(input_ids, tokenizer.num_tokens)
        input_ids, media = placed(service, input_ids, prompt.media, field)
        if media:
            check_not_cut(len(input_ids), sampling.truncate)
    request = build_request(
        sampling,
        prompt.text,
        input_ids,
        limits,
        add_special_tokens=prompt.add_special_tokens,
        first_token=first_token,
        banned_tokens=await _banned_tokens(sampling.bad_words, tokenizer),
    )
    if media:
        request = replace(request, media=media)
    return request if sampling.beams is None else with_beams(request, sampling.beams, limits, tokenizer.codec)


async def _banned_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of words that must not come, at the beginning of a text and behind a space; raises BrokenRule."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise BrokenRule("bad_words", "`$bad_words` cannot have empty words", repr(word))
        for text in word_forms(word):
            found[await tokenizer.encode(text, add_special_tokens=False, field="bad_words")] = None
    return tuple(ids for ids in found if ids)
