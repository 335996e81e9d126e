"""One server under test: its supported options, prompts of a given length, and timed requests."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from funitel.launcher.bench.apis import DIALECTS, IGNORE_EOS, USAGE, GenerationQuery, read_reply
from funitel.launcher.bench.figures import Failure, Timeline
from funitel.launcher.bench.http import Endpoint, RequestFailed
from funitel.launcher.bench.workload import WORDS, PromptSpec
from funitel.launcher.terminal_ui.http_client import START_ADVICE
from funitel.proto.errors import FunitelError, NotReady

PROBE_WORDS = 16
FITTING_TRIES = 6
REFUSALS = ("HTTP 400", "HTTP 422")  # answers to unknown fields

# Field of /tokenize at vLLM, at llama-server, at TGI and funitel; the first that works is used.
TOKENIZE_FIELDS = ("prompt", "content", "inputs")


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready to be sent."""

    text: str
    output_tokens: int


class Target:
    """A server; `probe` detects its supported options."""

    def __init__(self, name: str, api: str, endpoint: Endpoint, *, model: str, options: frozenset[str], timeout: float):
        """`options` are requested, and the server may support only some; `timeout` is in seconds, per request."""
        self.name, self.api, self.endpoint, self.model = name, api, endpoint, model
        self._dialect = DIALECTS[api]
        self._options = options & self._dialect.options
        self._timeout = timeout
        self._tokenize_field: str | None = None
        self._overhead = 0  # tokens that the server adds to a prompt: template, special tokens

    @property
    def counts_prompts(self) -> bool:
        """Whether prompts can be cut to a length in tokens; else a word counts as one token."""
        return self._tokenize_field is not None

    @property
    def ignores_eos(self) -> bool:
        """Whether the server accepts the option to go on after the end token."""
        return IGNORE_EOS in self._options

    @property
    def reports_usage(self) -> bool:
        """Whether the server reports the number of generated tokens."""
        return USAGE in self._options or self.api == "tgi"

    async def probe(self) -> None:
        """Find the model, the supported options, and the way to count tokens.

        Raises:
            NotReady: no server answers.
            FunitelError: the server does not answer a plain request.
        """
        try:
            if self._dialect.needs_model and not self.model:
                self.model = await self._first_model()
            text = " ".join(WORDS[:PROBE_WORDS])
            timeline = await self._negotiate_options(text)
            counted = await self._find_tokenizer(text)
        except RequestFailed as error:
            raise _not_ready(error.failure) from error
        if counted is not None and timeline.num_prompt_tokens is not None:
            self._overhead = max(0, timeline.num_prompt_tokens - counted)

    async def _first_model(self) -> str:
        """The first model that the server lists; empty if it lists none."""
        reply = await self.endpoint.request("GET", "/v1/models", b"", self._timeout)
        try:
            return str(json.loads(reply.body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            return ""

    async def _negotiate_options(self, text: str) -> Timeline:
        """Find and keep the largest set of options that the server accepts."""
        failure: Failure | None = None
        for options in _subsets(self._options):
            self._options = options
            timeline = await self.ask(PreparedRequest(text, output_tokens=2))
            failure = timeline.failure
            if failure is None:
                return timeline
            if failure.kind in ("connect", "timeout"):
                raise _not_ready(failure)
            if failure.kind not in REFUSALS:
                break
        assert failure is not None
        path = self._dialect.path
        advice = f": {self.endpoint.advice}" if failure.kind == "HTTP 401" else ""
        raise FunitelError(
            f"{self.endpoint.url}{path} does not answer a first request: {failure.kind}: {failure.message}{advice}"
        )

    async def _find_tokenizer(self, text: str) -> int | None:
        """Find the field of its /tokenize, if it has one; return its count."""
        for field in TOKENIZE_FIELDS:
            self._tokenize_field = field
            if counted := await self._count(text):
                return counted
        self._tokenize_field = None
        return None

    async def _count(self, text: str) -> int | None:
        body: dict[str, Any] = {self._tokenize_field or "": text}
        if self._tokenize_field == "prompt":
            body |= {"model": self.model}
        reply = await self.endpoint.request("POST", "/tokenize", json.dumps(body).encode(), self._timeout)
        if reply.status != 200:
            return None
        try:
            answer = json.loads(reply.body)
        except ValueError:
            return None
        tokens = answer.get("tokens") if isinstance(answer, dict) else answer
        return len(tokens) if isinstance(tokens, list) else None

    async def prepare(self, specs: Sequence[PromptSpec]) -> list[PreparedRequest]:
        """Cut prompts to their lengths, including the tokens that the server adds.

        Raises:
            NotReady: the server does not answer.
        """
        try:
            prefixes = {spec.prefix_words: await self._fit(spec.prefix_words, spec.prefix_tokens, "") for spec in specs}
            return [await self._prepare(spec, prefixes[spec.prefix_words]) for spec in specs]
        except RequestFailed as error:
            raise NotReady(str(error)) from error

    async def _prepare(self, spec: PromptSpec, prefix: str) -> PreparedRequest:
        text = await self._fit(spec.words, spec.prompt_tokens - self._overhead, prefix)
        return PreparedRequest(text, spec.output_tokens)

    async def _fit(self, words: Sequence[str], num_tokens: int, prefix: str) -> str:
        """The prefix and as many of the words as make `num_tokens` in all, at least one word."""

        def cut(num_words: int) -> str:
            return " ".join(filter(None, [prefix, *words[:num_words]]))

        if not words:
            return prefix
        taken = num_tokens - len(prefix.split())
        for _ in range(FITTING_TRIES if self.counts_prompts else 0):
            taken = min(max(taken, 1), len(words))
            text = cut(taken)
            counted = await self._count(text)
            step = 0 if counted is None else round((num_tokens - counted) / max(1.0, counted / len(text.split())))
            if step == 0:
                break
            taken += step
        return cut(min(max(taken, 1), len(words)))

    async def ask(self, prompt: PreparedRequest, started: float | None = None) -> Timeline:
        """Send one request and return its timeline, also for a failure.

        Args:
            started: its scheduled instant, by `time.perf_counter`; now when not given.
        """
        query = GenerationQuery(self.model, prompt.text, prompt.output_tokens, self._options)
        body = json.dumps(self._dialect.body(query)).encode()
        began = time.perf_counter() if started is None else started
        try:
            reply = await self.endpoint.request("POST", self._dialect.path, body, self._timeout)
        except RequestFailed as error:
            return Timeline(began, time.perf_counter(), failure=error.failure)
        return read_reply(self._dialect, began, reply)


def _not_ready(failure: Failure) -> NotReady:
    advice = f"; {START_ADVICE}" if failure.kind == "connect" else ""
    return NotReady(f"{failure.message}{advice}")


def _subsets(options: frozenset[str]) -> Iterator[frozenset[str]]:
    """All subsets, larger ones first."""
    for size in range(len(options), -1, -1):
        yield from map(frozenset, combinations(sorted(options), size))
