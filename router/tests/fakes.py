"""Stand-ins for what a router needs: an engine that follows a script, a model folder whose tokens are bytes."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from funitel.proto.errors import FunitelError, Overloaded, TemplateError
from funitel.proto.step import FinishReason, GeneratedText, Generation, PromptTop, Tokens
from funitel.router.core.request import Adapter, Limits, Request
from funitel.router.core.stream import TokenStream
from funitel.router.engine.paused import PausedRequests
from funitel.router.engine.snapshot import EngineView
from funitel.router.sandbox.pool import WorkerUnavailable
from funitel.router.sandbox.worker import Answer
from funitel.router.scheduler.admission import Reservation, Reservations
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.text import chat_template

Serve = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]

LIMITS = Limits(max_input_tokens=100, max_total_tokens=200, pool_tokens=1000)
PIECES = ("Hello", " wor", "ld", "!")
EOS = "</s>"
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class RendersHere:
    """Stands in for the pool of processes that render chats: hundreds of tests need not start one each."""

    def __init__(self, module: str, setup: Any, **limits: Any) -> None:
        self._setup = setup
        self._answer: Answer | None = None

    async def warm_up(self) -> None:
        try:
            self._answer = self._answer or chat_template.prepare(self._setup)
        except TemplateError as error:
            raise WorkerUnavailable(error.message, is_final=True) from None

    async def run(self, question: Any, key: bytes = b"") -> Any:
        await self.warm_up()
        assert self._answer is not None
        return json.loads(json.dumps(self._answer(json.loads(json.dumps(question)))))

    async def close(self) -> None:
        pass


@dataclass
class FakeEngine:
    """Generates the script's pieces, one a token, and settles stops, lengths and the end as a shard does."""

    pieces: Sequence[str] = PIECES
    limits: Limits = LIMITS
    compute_type: str = "1-fake"
    pause: float = 0.0  # seconds before each step
    stride: int = 1  # tokens a step
    error: FunitelError | None = None  # instead of the step numbered `fails_at`
    fails_at: int = 0
    max_requests: int = 8
    num_cached_tokens: int = 0  # of every prompt
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    logprobs: Sequence[float] = ()  # of the sequences, in order of submission
    requests: list[Request] = field(default_factory=list)
    cancelled: list[Request] = field(default_factory=list)
    is_closed: bool = False
    sick: FunitelError | None = None
    takes_adapters: bool = False
    layer_parts: str | None = None
    loaded: list[Adapter] = field(default_factory=list)
    pinned: list[Adapter] = field(default_factory=list)
    retired: list[Adapter] = field(default_factory=list)
    refused: dict[str, FunitelError] = field(default_factory=dict)  # what loading the adapter of a name raises
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    streams: list[TokenStream] = field(default_factory=list)
    replayed: frozenset[str] | None = None
    replays_ended: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)  # output keys
    reservations: Reservations = field(default_factory=Reservations)

    async def connect(self, settings: RouterSettings, metrics: Metrics) -> "FakeEngine":
        return self

    def replays_begun(self, journals: Collection[str]) -> None:
        self.replayed = frozenset(journals)

    def replay_ended(self, journal: str) -> None:
        self.replays_ended.append(journal)

    def release_outputs(self, keys: Iterable[str]) -> None:
        self.released += keys

    async def was_cancelled(self) -> bool:
        return bool(self.cancelled)

    def check_room(self, incoming: Request) -> None:
        if len(self.tasks) + self.reservations.in_flight(incoming.key).num_requests >= self.max_requests:
            raise Overloaded(f": at most {self.max_requests}")

    def reserve(self, incoming: Request) -> Reservation:
        self.check_room(incoming)
        return self.reservations.hold(incoming.key)

    @property
    def paused(self) -> PausedRequests:
        return PausedRequests(lambda: (), lambda *_: None, lambda: False, Metrics())

    @property
    def views(self) -> dict[int, EngineView]:
        return {}

    def submit(self, request: Request) -> TokenStream:
        if len(self.tasks) >= self.max_requests:
            raise Overloaded(f": at most {self.max_requests}")
        logprob = self.logprobs[len(self.requests)] if len(self.requests) < len(self.logprobs) else -0.5
        self.requests.append(request)
        stream = TokenStream(request, lambda: self._cancel(request, task))
        stream.num_cached_tokens = self.num_cached_tokens
        stream.cached_by_tier = self.cached_by_tier
        self.streams.append(stream)
        task = asyncio.create_task(self._generate(request, stream, logprob))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return stream

    def _cancel(self, request: Request, task: "asyncio.Task[None]") -> None:
        self.cancelled.append(request)
        task.cancel()

    async def load_adapter(self, adapter: Adapter, *, is_pinned: bool = False) -> None:
        if adapter.name in self.refused:
            raise self.refused[adapter.name]
        self.loaded.append(adapter)
        if is_pinned:
            self.pinned.append(adapter)

    def retire_adapter(self, adapter: Adapter) -> None:
        self.retired.append(adapter)

    async def health(self) -> None:
        if self.sick is not None:
            raise self.sick

    def fail_all(self, error: FunitelError) -> None:
        for task in self.tasks:
            task.cancel()
        for stream in self.streams:
            if stream.timings.finished is None:
                stream.deliver(error)

    async def close(self) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.is_closed = True

    def _leave(self) -> None:
        """Free the place of the current task, as the engine does before it delivers the last event."""
        self.tasks.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _generate(self, request: Request, stream: TokenStream, logprob: float) -> None:
        steps = scripted(request, self.pieces, self.stride, logprob)
        for number, generation in enumerate(steps):
            await asyncio.sleep(self.pause)
            if self.error is not None and number == self.fails_at:
                self._leave()
                stream.deliver(self.error)
                return
            stream.timings.started = stream.timings.started or stream.timings.submitted
            if stream.trace is not None:
                if number == 0:
                    stream.trace.enter(len(request.input_ids), self.num_cached_tokens)
                stream.trace.send(1, 2)
            if generation.finished is not None:
                self._leave()
            stream.deliver(generation)


async def eventually(claim: Callable[[], Awaitable[object]], what: str) -> None:
    """Wait until `claim` holds, for five seconds at most."""
    for _ in range(500):
        if await claim():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never happened: {what}")


def scripted(request: Request, pieces: Sequence[str], stride: int = 1, logprob: float = -0.5) -> list[Generation]:
    """The steps a shard would answer with if the model wrote `pieces` and then the end."""
    texts: list[str] = []
    finished: GeneratedText | None = None
    for piece in (*pieces, EOS):
        texts.append(piece)
        finished = _finish(request, texts)
        if finished is not None:
            break
    assert finished is not None
    groups = [range(start, min(start + stride, len(texts))) for start in range(0, len(texts), stride)]
    steps = [_generation(request, texts, group, logprob) for group in groups]
    steps[-1] = replace(steps[-1], finished=finished)
    if request.prefill_logprobs:
        count = len(request.input_ids)
        prefill = Tokens(request.input_ids, (float("nan"), *(-1.0,) * (count - 1)), ("?",) * count)
        steps[0] = replace(steps[0], prefill_tokens=prefill)
    if request.prompt_logprobs is not None:
        steps[0] = replace(steps[0], **scored_prompt(request.input_ids, request.prompt_logprobs))
    return steps


def scored_prompt(ids: Sequence[int], width: int) -> dict[str, Any]:
    """Scores of a prompt of `byte_tokenizer`: at each place the likeliest tokens are 0, 1, 2 and so on."""
    decode = byte_tokenizer().decode
    count, likeliest = len(ids), tuple(range(width))
    special = tuple(token_id >= 256 for token_id in ids)
    texts = tuple(decode([token_id], skip_special_tokens=False) for token_id in ids)
    top = PromptTop(
        width=width,
        ids=likeliest * (count - 1),
        logprobs=tuple(-0.25 - token_id for token_id in likeliest) * (count - 1),
        ranks=(7,) * (count - 1),
        texts={token_id: decode([token_id]) for token_id in likeliest},
    )
    prefill = Tokens(tuple(ids), (float("nan"), *(-1.0,) * (count - 1)), texts, special)
    return {"prefill_tokens": prefill, "prompt_top": top}


def _generation(request: Request, texts: list[str], places: range, logprob: float) -> Generation:
    top = [
        Tokens((place, 99), (logprob, float("-inf")), (texts[place], "x"), (False, False))
        for place in places
        if request.top_n_tokens
    ]
    tokens = Tokens(
        tuple(places),
        (logprob,) * len(places),
        tuple(texts[place] for place in places),
        tuple(texts[place] == EOS for place in places),
    )
    return Generation(0, tokens, tuple(top))


def _finish(request: Request, texts: list[str]) -> GeneratedText | None:
    text = "".join(text for text in texts if text != EOS)
    found = [(text.find(stop), index) for index, stop in enumerate(request.stopping.stop_sequences) if stop in text]
    seed = request.sampling.seed if request.sampling.is_sampled else None
    if found:
        start, index = min(found)
        stop = request.stopping.stop_sequences[index]
        return GeneratedText(text[: start + len(stop)], len(texts), FinishReason.STOP_SEQUENCE, seed, index, start)
    if texts[-1] == EOS:
        return GeneratedText(text, len(texts), FinishReason.EOS_TOKEN, seed)
    if len(texts) == request.stopping.max_new_tokens:
        return GeneratedText(text, len(texts), FinishReason.LENGTH, seed)
    return None


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte, and `<s>` before a text unless special tokens are off."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", EOS])
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return tokenizer


def write_model(folder: Path, **config: object) -> Path:
    """Write a model folder; `config` is added to tokenizer_config.json."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    content = {"bos_token": "<s>", "eos_token": {"content": EOS}, "chat_template": CHAT_TEMPLATE} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder
