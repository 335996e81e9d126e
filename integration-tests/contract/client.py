"""An independent client of TGI's v3 shard protocol, and a scenario that checks a shard against the contract.

Written from the contract reference alone (sections 1, 7.4 and 8), over a protocol file typed from its tables.
It shares no code with the product, and must run in a process that never imports the product's generated
protobuf code, for both define package generate.v3. Run it as a script; stdout is one JSON object:

    python integration-tests/contract/client.py --uds /run/shard --max-input-tokens 1024 \
        --max-prefill-tokens 4096 --max-total-tokens 2048 --tokenizer MODEL/tokenizer.json
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import math
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import contract_v3_pb2 as pb
import contract_v3_pb2_grpc as pb_grpc
import grpc

Stop = tuple[str, ...]
NOT_FOUND = "not found in cache"  # 1.6: "Batch ID ... not found in cache"
DEFAULT_PROMPTS = Path(__file__).resolve().parent.parent / "data" / "prompts.json"
FILLER_WORD = "_test "
WARMUP_MIMETYPE = "image/jpeg;base64"  # 1.5: that string, although the image is a PNG
BLOCK_SIZES = {"flashinfer": 1, "flashdecoding": 256, "flashdecoding-ipex": 64, "paged": 16}  # 1.3
MAX_POOL_TOKENS = 1 << 20  # no scenario needs more, whatever the shard offers


# --- blocks (7.4)


class BlockAllocator:
    """TGI's simple allocator: block 0 reserved, free list 1..n-1 used from its end."""

    def __init__(self, num_blocks: int, block_size: int, window_size: int | None = None) -> None:
        self.block_size = block_size
        self.window_size = window_size
        self._free = list(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, tokens: int, prefix: Sequence[int] = ()) -> list[int]:
        """Return the blocks of a request of so many tokens: the given whole-block prefix, then fresh ones."""
        held = min(tokens, self.window_size) if self.window_size else tokens
        wanted = math.ceil(held / self.block_size) - len(prefix)
        if wanted > len(self._free):
            raise MemoryError(f"{tokens} tokens want {wanted} blocks, {len(self._free)} are free")
        taken = self._free[len(self._free) - wanted :] if wanted > 0 else []
        del self._free[len(self._free) - len(taken) :]
        return [*prefix, *taken]

    def slots(self, blocks: Sequence[int], tokens: int) -> list[int]:
        """Expand blocks to one slot a token; over a window they repeat."""
        expansion = [block * self.block_size + offset for block in blocks for offset in range(self.block_size)]
        repeats = math.ceil(tokens / len(expansion)) if expansion else 0
        return (expansion * repeats)[:tokens]

    def free(self, blocks: Sequence[int]) -> None:
        if 0 in blocks or set(blocks) & set(self._free) or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks freed twice or never allocated: {list(blocks)}")
        self._free.extend(blocks)


# --- requests


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Next-token parameters; the defaults are the contract's neutral values."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    do_sample: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    watermark: bool = False

    @property
    def samples(self) -> bool:
        """8.1: when a token is drawn rather than the best one taken."""
        warped = self.temperature != 1.0 or self.top_k != 0 or self.top_p < 1.0 or self.typical_p < 1.0
        return self.do_sample or warped

    def to_proto(self) -> pb.NextTokenChooserParameters:
        return pb.NextTokenChooserParameters(**{name: getattr(self, name) for name in self.__dataclass_fields__})


GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, do_sample=True, seed=42)
EVERY_PARAMETER = SamplingParams(
    temperature=0.9,
    top_k=10,
    top_p=0.9,
    typical_p=0.9,
    do_sample=True,
    seed=7,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
)


def params_for(prompt: Prompt, sampling: SamplingParams) -> SamplingParams:
    """Give each prompt a seed of its own, so that rows sharing one generator are noticed."""
    offset = zlib.crc32(prompt.name.encode()) % 1000
    return replace(sampling, seed=sampling.seed + offset) if sampling.samples else sampling


WARMUP_PARAMS = SamplingParams(
    temperature=0.9,
    top_k=10,
    top_p=0.9,
    typical_p=0.9,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    watermark=True,
)


@dataclass(frozen=True)
class Prompt:
    name: str
    text: str
    add_special_tokens: bool = True


@dataclass(kw_only=True)
class Tracked:
    """One request on its way: what was asked, the blocks it holds, and everything the shards answered."""

    id: int
    label: str
    prompt: Prompt
    prompt_tokens: int  # exact with a tokenizer, else an upper bound
    exact: bool
    max_new_tokens: int
    truncate: int
    sampling: SamplingParams = GREEDY
    stop: Stop = ()
    ignore_eos: bool = False
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    cache_len: int = 0
    num_shared_blocks: int = 0
    chunk_len: int | None = None
    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    may_be_prefilling: bool = True
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_special: list[bool] = field(default_factory=list)
    top_tokens: list[pb.Tokens] = field(default_factory=list)
    prefill: pb.Tokens | None = None
    generated: pb.GeneratedText | None = None

    @property
    def finished(self) -> bool:
        return self.generated is not None

    def to_proto(self) -> pb.Request:
        stopping = pb.StoppingCriteriaParameters(
            max_new_tokens=self.max_new_tokens,
            stop_sequences=list(self.stop),
            ignore_eos_token=self.ignore_eos,
        )
        return pb.Request(
            id=self.id,
            inputs=self.prompt.text,
            input_chunks=pb.Input(chunks=[pb.InputChunk(text=self.prompt.text)]),
            truncate=self.truncate,
            parameters=self.sampling.to_proto(),
            stopping_parameters=stopping,
            prefill_logprobs=self.prefill_logprobs,
            top_n_tokens=self.top_n_tokens,
            blocks=self.blocks,
            slots=self.slots,
            cache_len=self.cache_len,
            add_special_tokens=self.prompt.add_special_tokens,
            chunk_len=self.chunk_len,
        )

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "label": self.label,
            "prompt": self.prompt.name,
            "id": self.id,
            "token_ids": self.ids,
        }
        out |= {"texts": self.texts, "logprobs": [plain_float(value) for value in self.logprobs]}
        out |= {"prompt_tokens": self.prompt_tokens if self.exact else None, "sampled": self.sampling.samples}
        if self.prefill is not None:
            out["prefill_ids"] = list(self.prefill.ids)
            out["prefill_logprobs"] = [plain_float(value) for value in self.prefill.logprobs]
        if self.generated is None:
            return out | {"generated_text": None, "finish_reason": None}
        out["seed"] = self.generated.seed if self.generated.HasField("seed") else None
        reason = pb.FinishReason.Name(self.generated.finish_reason)
        return out | {"generated_text": self.generated.text, "finish_reason": reason}


def plain_float(value: float) -> float | None:
    return value if math.isfinite(value) else None


def tiny_png() -> bytes:
    """Return a valid one-pixel PNG."""

    def section(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = section(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + section(b"IDAT", zlib.compress(b"\0\0\0\0")) + section(b"IEND", b"")


def warmup_request(max_input: int, truncate: int, max_total: int | None, image: bool) -> pb.Request:
    """Build one request of the warm-up batch (1.5)."""
    text = FILLER_WORD * max_input
    chunks, inputs = [pb.InputChunk(text=text)], text
    if image:
        chunks.append(pb.InputChunk(image=pb.Image(data=tiny_png(), mimetype=WARMUP_MIMETYPE)))
        inputs += f"![](data:{WARMUP_MIMETYPE},{base64.b64encode(tiny_png()).decode()})"
    stopping = pb.StoppingCriteriaParameters(
        max_new_tokens=1 if max_total is None else max_total - truncate, ignore_eos_token=True
    )
    return pb.Request(
        id=0,
        inputs=inputs,
        input_chunks=pb.Input(chunks=chunks),
        truncate=truncate,
        stopping_parameters=stopping,
        parameters=WARMUP_PARAMS.to_proto(),
        prefill_logprobs=True,
        top_n_tokens=20,
        add_special_tokens=True,
    )


def warmup_batch(
    max_input: int | None, max_prefill: int, max_total: int | None, max_batch_size: int | None, image: bool
) -> pb.Batch:
    """Build TGI's warm-up batch: ids all 0, truncated to fill the prefill budget, no blocks and no slots."""
    longest = max_prefill if max_input is None else max_input
    requests: list[pb.Request] = []
    left = max_prefill
    while left > 0 and len(requests) != max_batch_size:
        truncate = min(longest, left)
        requests.append(warmup_request(longest, truncate, max_total, image and not requests))
        left -= truncate
    return pb.Batch(id=0, requests=requests, size=len(requests), max_tokens=max_prefill - left)


# --- client


class ShardError(Exception):
    """At least one shard answered a call with an error: its code and text, by rank."""

    def __init__(self, rpc: str, failures: dict[int, tuple[str, str]]) -> None:
        super().__init__(f"{rpc}: " + "; ".join(f"rank {r}: {c}: {t}" for r, (c, t) in failures.items()))
        self.rpc = rpc
        self.failures = failures


@dataclass(frozen=True)
class Outcome:
    """What one shard made of one call."""

    rank: int
    reply: Any
    error: tuple[str, str] | None


@dataclass(frozen=True)
class Step:
    """A Prefill or Decode after fan-out: combined by TGI's rules, and as each shard answered it."""

    generations: list[pb.Generation]
    batch: pb.CachedBatch | None
    timings: Any  # the reply with the largest total_ns
    replies: list[Any]


@dataclass(frozen=True)
class WarmupTriple:
    max_supported_total_tokens: int | None
    max_input_tokens: int
    max_total_tokens: int

    @classmethod
    def of(cls, reply: pb.WarmupResponse) -> WarmupTriple:
        supported = reply.max_supported_total_tokens if reply.HasField("max_supported_total_tokens") else None
        return cls(supported, reply.max_input_tokens, reply.max_total_tokens)

    def order(self) -> tuple[int, int, int]:
        """Lexicographic, an absent first member before any number."""
        supported = self.max_supported_total_tokens
        return (-1 if supported is None else supported, self.max_input_tokens, self.max_total_tokens)


class ContractClient:
    """Every shard of one replica, spoken to in parallel, answers combined by TGI's rules (1.5)."""

    def __init__(
        self, uds_prefix: str | None = None, urls: Sequence[str] | None = None, timeout_seconds: float = 60.0
    ) -> None:
        if (uds_prefix is None) == (urls is None):
            raise ValueError("give either a socket prefix or the shards' urls")
        self.timeout_seconds = timeout_seconds
        self.outcomes: list[Outcome] = []  # of the last call, every rank
        self._channels: list[grpc.Channel] = []
        self.discovered = list(urls) if urls else self._discover(f"{uds_prefix}-0")
        self._stubs = [self._connect(url) for url in self.discovered]

    def __enter__(self) -> ContractClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            channel.close()

    @property
    def world_size(self) -> int:
        return len(self._stubs)

    def info(self) -> pb.InfoResponse:
        reply: pb.InfoResponse = self._last("Info", pb.InfoRequest())
        return reply

    def health(self) -> None:
        self._last("Health", pb.HealthRequest())

    def clear_cache(self, batch_id: int | None = None) -> None:
        """Drop one cached batch, or all."""
        self._all("ClearCache", pb.ClearCacheRequest(id=batch_id))

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> pb.CachedBatch:
        reply = self._last("FilterBatch", pb.FilterBatchRequest(batch_id=batch_id, request_ids=list(request_ids)))
        batch: pb.CachedBatch = reply.batch
        return batch

    def warmup(
        self,
        max_input: int | None,
        max_prefill: int,
        max_total: int | None,
        *,
        max_batch_size: int | None = None,
        image: bool = True,
    ) -> WarmupTriple:
        """Run the largest prefill; the lexicographic minimum of the shards' answers counts."""
        request = pb.WarmupRequest(
            batch=warmup_batch(max_input, max_prefill, max_total, max_batch_size, image),
            max_input_tokens=max_input,
            max_prefill_tokens=max_prefill,
            max_total_tokens=max_total,
        )
        return min((WarmupTriple.of(reply) for reply in self._all("Warmup", request)), key=WarmupTriple.order)

    def prefill(self, batch: pb.Batch, cached_batch: pb.CachedBatch | None = None) -> Step:
        return self._step("Prefill", pb.PrefillRequest(batch=batch, cached_batch=cached_batch))

    def decode(self, batches: Sequence[pb.CachedBatch]) -> Step:
        return self._step("Decode", pb.DecodeRequest(batches=list(batches)))

    def _discover(self, path: str) -> list[str]:
        stub = self._connect(f"unix://{path}")
        reply = stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=self.timeout_seconds, wait_for_ready=True)
        return list(reply.urls)

    def _connect(self, url: str) -> Any:
        target = "unix:" + url.removeprefix("unix://") if url.startswith("unix://") else url
        channel = grpc.insecure_channel(target, options=[("grpc.max_receive_message_length", -1)])
        self._channels.append(channel)
        return pb_grpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]

    def _fan_out(self, rpc: str, request: Any) -> list[Outcome]:
        """Send the same request to every shard at once and wait for all of them."""
        calls = [getattr(stub, rpc).future(request, timeout=self.timeout_seconds) for stub in self._stubs]
        self.outcomes = []
        for rank, call in enumerate(calls):
            try:
                self.outcomes.append(Outcome(rank, call.result(), None))
            except grpc.RpcError:
                self.outcomes.append(Outcome(rank, None, (call.code().name, call.details() or "")))
        return self.outcomes

    def _all(self, rpc: str, request: Any) -> list[Any]:
        outcomes = self._fan_out(rpc, request)
        failures = {outcome.rank: outcome.error for outcome in outcomes if outcome.error}
        if failures:
            raise ShardError(rpc, failures)
        return [outcome.reply for outcome in outcomes]

    def _last(self, rpc: str, request: Any) -> Any:
        """Only the last shard's answer decides; the scenario looks at `outcomes` for the others."""
        last = self._fan_out(rpc, request)[-1]
        if last.error:
            raise ShardError(rpc, {last.rank: last.error})
        return last.reply

    def _step(self, rpc: str, request: Any) -> Step:
        replies = self._all(rpc, request)
        generations = [generation for reply in (replies[-1], *replies[:-1]) for generation in reply.generations]
        batch = replies[-1].batch if replies[-1].HasField("batch") else None
        return Step(generations, batch, max(replies, key=lambda reply: reply.total_ns), replies)


# --- checks


@dataclass
class Check:
    """One rule, tested any number of times; the first failures are kept."""

    name: str
    rule: str
    count: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: str | None = None

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"name": self.name, "rule": self.rule, "ok": self.ok, "count": self.count}
        if self.skipped and not self.count:
            out["skipped"] = self.skipped
        return out if self.ok else out | {"num_failures": len(self.failures), "failures": self.failures[:3]}


class Checks:
    """The rules seen so far, by name; a failed rule never stops the scenario."""

    def __init__(self) -> None:
        self._by_name: dict[str, Check] = {}

    def __iter__(self) -> Iterator[Check]:
        return iter(self._by_name.values())

    def expect(self, name: str, rule: str, ok: bool, detail: object = "") -> bool:
        check = self._by_name.setdefault(name, Check(name, rule))
        check.count += 1
        if not ok:
            check.failures.append(str(detail))
        return ok

    def equal(self, name: str, rule: str, got: object, want: object, where: object = "") -> bool:
        return self.expect(name, rule, got == want, f"{where}: got {got!r}, want {want!r}")

    def skip(self, name: str, rule: str, why: str) -> None:
        self._by_name.setdefault(name, Check(name, rule)).skipped = why

    @property
    def num_failed(self) -> int:
        return sum(not check.ok for check in self)


# --- session


@dataclass(frozen=True, kw_only=True)
class Limits:
    max_input_tokens: int
    max_prefill_tokens: int
    max_total_tokens: int


CountTokens = Callable[[Prompt], int]


class Session:
    """The router's side of a scenario: ids, blocks, who is in which batch, and the rules of every step."""

    def __init__(
        self,
        client: ContractClient,
        info: pb.InfoResponse,
        limits: Limits,
        num_pool_tokens: int,
        checks: Checks,
        count_tokens: CountTokens | None = None,
    ) -> None:
        self.client = client
        self.info = info
        self.limits = limits
        self.checks = checks
        self.requests: list[Tracked] = []
        self._count_tokens = count_tokens
        self._members: dict[int, list[Tracked]] = {}
        self._num_batches = 0
        block_size = info.block_size or 1
        window = info.window_size if info.HasField("window_size") else None
        self.blocks = BlockAllocator(min(num_pool_tokens, MAX_POOL_TOKENS) // block_size, block_size, window)

    # -- requests

    def prompt_tokens(self, prompt: Prompt) -> tuple[int, bool]:
        """Return the prompt's length after truncation, and whether it is exact or an upper bound."""
        longest = self.prompt_limit()
        if self._count_tokens is not None:
            return min(self._count_tokens(prompt), longest), True
        return min(len(prompt.text.encode()) + 1, longest), False

    def request(
        self, label: str, prompt: Prompt, max_new_tokens: int, *, prefix: Sequence[int] = (), **asked: Any
    ) -> Tracked:
        """Admit a request: give it an id, and blocks for its prompt and every token it may generate."""
        count, exact = self.prompt_tokens(prompt)
        if exact:
            max_new_tokens = max(1, min(max_new_tokens, self.limits.max_total_tokens - count))
        tracked = Tracked(
            id=len(self.requests),
            label=label,
            prompt=prompt,
            prompt_tokens=count,
            exact=exact,
            max_new_tokens=max_new_tokens,
            truncate=self.prompt_limit(),
            cache_len=len(prefix) * self.blocks.block_size,
            num_shared_blocks=len(prefix),
            **asked,
        )
        if not self.info.requires_padding:
            tokens = count + max_new_tokens + self.info.speculate - 1
            tracked.blocks = self.blocks.allocate(tokens, prefix)
            tracked.slots = self.blocks.slots(tracked.blocks, tokens)
        if exact and tracked.chunk_len is None and count - tracked.cache_len > self.chunk_limit:
            tracked.chunk_len = self.chunk_limit
        self.requests.append(tracked)
        return tracked

    @property
    def chunk_limit(self) -> int:
        """The longest first chunk: a prefill budget less a few rows decoding beside it."""
        return max(1, self.limits.max_prefill_tokens - 4)

    def fits(self, *prompts: Prompt) -> bool:
        """Whether prompts can be prefilled whole in one batch."""
        return sum(self.prompt_tokens(prompt)[0] for prompt in prompts) <= self.chunk_limit

    def prompt_limit(self) -> int:
        longest = self.limits.max_input_tokens
        return longest if self.info.support_chunking else min(longest, self.limits.max_prefill_tokens)

    def release(self, tracked: Tracked) -> None:
        """Give back the blocks a request had of its own."""
        self.blocks.free(tracked.blocks[tracked.num_shared_blocks :])
        tracked.blocks = []

    # -- steps

    def batch_of(self, members: Sequence[Tracked]) -> pb.Batch:
        self._num_batches += 1
        return pb.Batch(
            id=self._num_batches,
            requests=[member.to_proto() for member in members],
            size=len(members),
            max_tokens=self._batch_tokens(members),
            max_blocks=max(len(member.blocks) for member in members),
        )

    def _batch_tokens(self, members: Sequence[Tracked]) -> int:
        """1.7: prefill and decode tokens, the decode part 0 on the paged path."""
        if not self.info.requires_padding:
            return sum(member.prompt_tokens for member in members)
        longest = max(member.prompt_tokens for member in members)
        return len(members) * longest + sum(member.max_new_tokens for member in members)

    def prefill(self, members: Sequence[Tracked], cached: pb.CachedBatch | None = None) -> pb.CachedBatch | None:
        """Prefill the members, joined to a cached batch where one is given (chunking only)."""
        batch = self.batch_of(members)
        earlier = self._members.pop(cached.id) if cached is not None else []
        step = self.client.prefill(batch, cached)
        for member in members:
            member.may_be_prefilling = member.chunk_len is not None
        result_id = batch.id if cached is None else cached.id
        waiting = [member for member in members if member.chunk_len is not None]
        return self._settle("Prefill", step, result_id, [*earlier, *members], silent=waiting, concat=cached is not None)

    def decode(self, *batches: pb.CachedBatch) -> pb.CachedBatch | None:
        members = [member for batch in batches for member in self._members.pop(batch.id)]
        step = self.client.decode(batches)
        return self._settle("Decode", step, batches[0].id, members, concat=len(batches) > 1)

    def filter(self, batch: pb.CachedBatch, keep: Sequence[Tracked]) -> pb.CachedBatch:
        reply = self.client.filter_batch(batch.id, [member.id for member in keep])
        for outcome in self.client.outcomes:
            got = outcome.reply.batch if outcome.error is None else outcome.error
            self.checks.equal("filter.shards_agree", "1.5", got, reply, f"rank {outcome.rank}")
        for member in self._members[batch.id]:
            if member not in keep:
                self.release(member)
        self._members[batch.id] = [member for member in self._members[batch.id] if member in keep]
        self.checks.equal("filter.batch_id_kept", "1.6", reply.id, batch.id)
        self._check_cached("FilterBatch", reply, self._members[batch.id])
        return reply

    def clear(self, batch: pb.CachedBatch) -> None:
        self.client.clear_cache(batch.id)
        for member in self._members.pop(batch.id):
            self.release(member)

    def run_to_end(self, batch: pb.CachedBatch | None) -> None:
        """Decode until every member ended, filtering out those that end earlier, as TGI's router does."""
        steps = 0
        while batch is not None:
            members = self._members[batch.id]
            steps += 1
            alive = [member for member in members if not member.finished]
            if len(alive) < len(members):
                batch = self.filter(batch, alive)
            batch = self.decode(batch)
            enough = max(member.prompt_tokens + member.max_new_tokens for member in members)
            if not self.checks.expect("decode.comes_to_an_end", "1.5", steps <= enough, f"{steps} steps"):
                raise RuntimeError(f"a batch did not end in {steps} steps")

    def forget(self, batch_id: int) -> None:
        """Give up a batch that a failed call may or may not have dropped on the shard."""
        self.client.clear_cache(batch_id)
        for member in self._members.pop(batch_id, []):
            self.release(member)

    # -- rules that hold on every step

    def _settle(
        self,
        rpc: str,
        step: Step,
        result_id: int,
        members: list[Tracked],
        *,
        silent: Sequence[Tracked] = (),
        concat: bool,
    ) -> pb.CachedBatch | None:
        self._check_shares(rpc, step, members, silent)
        by_id = {member.id: member for member in members}
        for generation in step.generations:
            if generation.request_id in by_id:
                self._absorb(generation, by_id[generation.request_id])
        self._check_reply(rpc, step, concat)
        all_finished = all(member.finished for member in members)
        self.checks.equal(
            "batch.omitted_exactly_when_all_finished",
            "1.6",
            step.batch is None,
            all_finished,
            f"{rpc} of {result_id}",
        )
        if all_finished or step.batch is None:
            for member in members:
                self.release(member)
            return None
        self.checks.equal("batch.result_id_is_the_first_batch", "1.6", step.batch.id, result_id, rpc)
        self._check_cached(rpc, step.batch, members)
        self._members[step.batch.id] = members
        return step.batch

    def _check_shares(self, rpc: str, step: Step, members: list[Tracked], silent: Sequence[Tracked]) -> None:
        counts = Counter(generation.request_id for generation in step.generations)
        expect = self.checks.expect
        for member in members:
            if member in silent:
                expect(
                    "chunk.no_generation_while_prefilling",
                    "7.6",
                    counts[member.id] == 0,
                    f"{rpc} {member.label}",
                )
            elif member.may_be_prefilling or member.finished:
                expect("generation.at_most_once", "1.5", counts[member.id] <= 1, f"{rpc} {member.label}")
            else:
                ok = counts[member.id] == 1
                expect(
                    "generation.exactly_once_across_shards",
                    "1.5",
                    ok,
                    f"{rpc} {member.label}: {counts[member.id]}",
                )
        unknown = set(counts) - {member.id for member in members}
        expect("generation.only_of_members", "1.5", not unknown, f"{rpc}: {unknown}")
        if self.info.requires_padding:
            return
        for rank, reply in enumerate(step.replies):
            strangers = [g.request_id for g in reply.generations if g.request_id % self.client.world_size != rank]
            expect("generation.on_the_owning_rank", "1.5", not strangers, f"{rpc} rank {rank}: {strangers}")

    def _check_reply(self, rpc: str, step: Step, concat: bool) -> None:
        for rank, reply in enumerate(step.replies):
            where = f"{rpc} rank {rank}"
            batch = reply.batch if reply.HasField("batch") else None
            self.checks.equal("batch.shards_agree", "1.5", batch, step.batch, where)
            has_concat = reply.HasField("concat_ns")
            self.checks.equal("timings.concat_only_when_concatenated", "1.3", has_concat, concat, where)
            sane = 0 < reply.forward_ns <= reply.total_ns
            self.checks.expect("timings.sane", "1.3", sane, f"{where}: {reply.forward_ns} of {reply.total_ns}")

    def _check_cached(self, rpc: str, batch: pb.CachedBatch, members: list[Tracked]) -> None:
        ids = [member.id for member in members]
        self.checks.equal("cached.request_ids", "1.6", list(batch.request_ids), ids, rpc)
        self.checks.equal("cached.size", "1.3", batch.size, len(members), rpc)
        if self.info.requires_padding or any(member.finished for member in members):
            return
        reserved = sum(len(member.blocks) for member in members) * self.blocks.block_size
        self.checks.equal("cached.max_tokens", "1.7", batch.max_tokens, reserved, rpc)
        if not any(member.may_be_prefilling for member in members) and not self.info.speculate:
            self.checks.equal("cached.current_tokens_decoding", "1.7", batch.current_tokens, len(members), rpc)

    def _absorb(self, generation: pb.Generation, member: Tracked) -> None:
        """Take over one Generation, checking that it is well formed."""
        first = not member.ids
        tokens, expect, where = generation.tokens, self.checks.expect, member.label
        lengths = {len(tokens.ids), len(tokens.logprobs), len(tokens.texts), len(tokens.is_special)}
        expect("tokens.at_least_one_and_parallel", "1.3", len(lengths) == 1 and 0 not in lengths, where)
        sane = all(math.isfinite(value) and value <= 1e-4 for value in tokens.logprobs)
        expect("tokens.logprobs_finite_and_not_positive", "8.3", sane, f"{where}: {list(tokens.logprobs)}")
        expect("generation.none_after_the_end", "1.3", not member.finished, where)
        expect("prefill.only_with_the_first_token", "1.3", first or not generation.prefill_tokens.ids, where)
        member.may_be_prefilling = False
        member.ids.extend(tokens.ids)
        member.texts.extend(tokens.texts)
        member.logprobs.extend(tokens.logprobs)
        member.is_special.extend(tokens.is_special)
        self._absorb_top(generation, member)
        if first and generation.HasField("prefill_tokens"):
            member.prefill = generation.prefill_tokens
            expect("prefill.only_when_asked", "1.3", member.prefill_logprobs or not member.prefill.ids, where)
        if generation.HasField("generated_text"):
            member.generated = generation.generated_text
            self._check_end(member)
        else:
            expect("length.ends_at_max_new_tokens", "8.4", len(member.ids) < member.max_new_tokens, where)

    def _absorb_top(self, generation: pb.Generation, member: Tracked) -> None:
        member.top_tokens.extend(generation.top_tokens)
        wanted = len(generation.tokens.ids) if member.top_n_tokens else 0
        self.checks.equal("top_tokens.one_entry_per_token", "1.3", len(generation.top_tokens), wanted, member.label)
        for top, token_id in zip(generation.top_tokens, generation.tokens.ids, strict=False):
            enough = len(top.ids) == len(top.logprobs) == len(top.texts) >= member.top_n_tokens
            self.checks.expect("top_tokens.at_least_n", "8.3", enough, f"{member.label}: {len(top.ids)}")
            best = [i for i, value in zip(top.ids, top.logprobs, strict=False) if value == max(top.logprobs)]
            greedy = member.sampling.samples or token_id in best
            self.checks.expect("top_tokens.greedy_choice_is_best", "8.3", greedy, member.label)

    def _check_end(self, member: Tracked) -> None:
        generated, checks = member.generated, self.checks
        if generated is None:
            return
        checks.equal("end.generated_tokens", "1.3", generated.generated_tokens, len(member.ids), member.label)
        checks.equal(
            "end.seed_only_when_sampling",
            "1.3",
            generated.HasField("seed"),
            member.sampling.samples,
            member.label,
        )
        if generated.HasField("seed"):
            checks.equal("end.seed_is_the_request_s", "1.3", generated.seed, member.sampling.seed, member.label)
        at_limit = len(member.ids) == member.max_new_tokens
        by_length = generated.finish_reason == pb.FINISH_REASON_LENGTH
        checks.equal("end.length_wins_at_the_limit", "8.4", by_length, at_limit, member.label)
        if generated.finish_reason == pb.FINISH_REASON_EOS_TOKEN:
            checks.expect("end.no_eos_when_ignored", "1.3", not member.ignore_eos, member.label)
        ok = same_text(member, generated.text)
        streamed = "".join(member.texts)
        checks.expect("end.text_is_the_streamed_text", "8.5", ok, f"{member.label}: {generated.text!r} != {streamed!r}")


def same_text(member: Tracked, text: str) -> bool:
    """Compare with the streamed texts less special tokens; an unfinished character may trail."""
    pairs = zip(member.texts, member.is_special, strict=False)
    streamed = "".join(piece for piece, special in pairs if not special)
    text, streamed = text.lstrip(" "), streamed.lstrip(" ")
    return text == streamed or (text.startswith(streamed) and "\ufffd" in text[len(streamed) :])


# --- scenario


@dataclass(frozen=True)
class ScenarioResult:
    requests: list[Tracked]
    checks: Checks
    observations: dict[str, Any]


def expect_error(session: Session, name: str, call: Callable[[], object], *, text: str | None = NOT_FOUND) -> None:
    """Check that a call fails on every shard: INTERNAL, and with the given text where one is promised."""
    try:
        call()
    except ShardError:
        pass
    for outcome in session.client.outcomes:
        failed = outcome.error is not None
        session.checks.expect(f"{name}.fails", "1.6", failed, f"rank {outcome.rank} answered")
        code, details = outcome.error or ("OK", "")
        session.checks.equal(f"{name}.code", "1.8", code, "INTERNAL", f"rank {outcome.rank}: {details}")
        if text is not None:
            session.checks.expect(f"{name}.text", "1.6", text in details, f"rank {outcome.rank}: {details!r}")


def still_cached(session: Session, batch: pb.CachedBatch, tracked: Sequence[Tracked]) -> bool:
    """Observe, where the contract is silent, whether a batch survived a failed call."""
    try:
        session.client.filter_batch(batch.id, [member.id for member in tracked])
    except ShardError:
        return False
    return True


def stage_info(session: Session) -> None:
    info, checks = session.info, session.checks
    session.client.info()
    info.DiscardUnknownFields()
    for outcome in session.client.outcomes:
        if outcome.reply is not None:
            outcome.reply.DiscardUnknownFields()  # what a peer adds beyond the contract may differ by rank
        checks.equal("info.shards_agree", "1.5", outcome.reply, info, f"rank {outcome.rank}")
    checks.expect("info.dtype", "1.3", info.dtype.startswith("torch."), info.dtype)
    checks.expect("info.device_type", "1.3", bool(info.device_type), info.device_type)
    if not info.requires_padding:
        known = BLOCK_SIZES.get(info.attention_impl)
        checks.expect("info.attention_impl", "1.3", known is not None, info.attention_impl)
        checks.equal("info.block_size", "1.3", info.block_size, known, info.attention_impl)
    checks.expect("info.window_size", "1.3", not info.HasField("window_size"), "upstream leaves it unset")
    checks.expect("info.no_chunking_with_speculation", "7.6", not (info.support_chunking and info.speculate))
    session.client.health()
    for outcome in session.client.outcomes:
        checks.expect("health.every_shard", "1.1", outcome.error is None, f"rank {outcome.rank}: {outcome.error}")


def stage_solo(
    session: Session, prompts: Sequence[Prompt], max_new_tokens: int, sampling: SamplingParams
) -> dict[str, Tracked]:
    """Run each prompt alone to its end; what later stages give for the same prompt must begin the same."""
    kind = "sampled" if sampling.samples else "greedy"
    runs: dict[str, Tracked] = {}
    for prompt in prompts:
        tracked = session.request(
            f"solo/{kind}/{prompt.name}", prompt, max_new_tokens, sampling=params_for(prompt, sampling)
        )
        session.run_to_end(session.prefill([tracked]))
        runs[prompt.name] = tracked
    return runs


def compare(session: Session, solo: dict[str, Tracked], *joined: Tracked) -> None:
    """Check that a request gave in company what it gives alone (up to the shorter of the two)."""
    for tracked in joined:
        want = solo[tracked.prompt.name].ids
        common = min(len(want), len(tracked.ids))
        name, rule = ("greedy.same_in_company_as_alone", "1.6")
        if tracked.sampling.samples:
            name, rule = ("sampled.same_in_company_as_alone", "7.7 FIX")
        session.checks.equal(name, rule, tracked.ids[:common], want[:common], tracked.label)


def stage_join(session: Session, label: str, pair: Sequence[Prompt], max_new: int, sampling: SamplingParams) -> Tracked:
    """prefill(1), decode(1), prefill(2), decode(1, 2), filter(1), decode until 1 ends."""
    first, second = (
        session.request(f"{label}/{i}", prompt, max_new, sampling=params_for(prompt, sampling), ignore_eos=True)
        for i, prompt in enumerate(pair, 1)
    )
    batch_1 = session.prefill([first])
    batch_1 = session.decode(batch_1) if batch_1 else None
    batch_2 = session.prefill([second])
    if batch_1 is None or batch_2 is None:
        raise RuntimeError("the scenario needs at least 5 new tokens a request")
    joined = session.decode(batch_1, batch_2)
    expect_error(session, "decode_of_a_concatenated_batch", lambda: session.client.decode([batch_2]))
    if joined is None:
        raise RuntimeError("the joined batch ended too early")
    session.run_to_end(session.filter(joined, [first]))
    expect_error(session, "decode_of_a_finished_batch", lambda: session.client.decode([joined]))
    return second


def stage_partial_finish(session: Session, pair: Sequence[Prompt], max_new_tokens: int) -> list[Tracked]:
    """A request that ends stays in its batch until FilterBatch; a one-token request is gone at once."""
    short = session.request("partial/short", pair[0], 2, ignore_eos=True)
    long = session.request("partial/long", pair[1], max_new_tokens, ignore_eos=True)
    batch = session.prefill([short, long])
    batch = session.decode(batch) if batch else None
    session.checks.expect("partial.short_finished", "1.6", short.finished, len(short.ids))
    kept = batch is not None and list(batch.request_ids) == [short.id, long.id]
    session.checks.expect("partial.finished_stays_until_filter", "1.6", kept, batch)
    session.run_to_end(batch)
    single = session.request("partial/single", pair[0], 1, ignore_eos=True)
    session.checks.expect("single.prefill_omits_the_batch", "1.6", session.prefill([single]) is None)
    return [short, long, single]


def stage_client_left(session: Session, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Tracked]:
    """ClearCache(id) drops that batch and no other; ClearCache() drops every one."""
    stays = session.request("left/stays", prompts[0], max_new_tokens, ignore_eos=True)
    leaves = session.request("left/leaves", prompts[1], max_new_tokens, ignore_eos=True)
    staying, leaving = session.prefill([stays]), session.prefill([leaves])
    leaving = session.decode(leaving) if leaving else None
    if staying is None or leaving is None:
        raise RuntimeError("the scenario needs at least 5 new tokens a request")
    session.clear(leaving)
    expect_error(session, "decode_of_a_cleared_batch", lambda: session.client.decode([leaving]))
    left = session.decode(staying)
    session.checks.expect("clear.leaves_other_batches_alone", "1.6", left is not None and len(stays.ids) == 2)
    session.client.clear_cache()
    expect_error(session, "decode_after_clearing_everything", lambda: session.client.decode([staying]))
    session.forget(staying.id)
    return [stays, leaves]


def stage_errors(session: Session, pair: Sequence[Prompt], max_new_tokens: int) -> dict[str, Any]:
    """Unknown ids, the empty filter list, the filter that keeps all; return what the contract leaves open."""
    client = session.client
    unknown = pb.CachedBatch(id=987_654_321, request_ids=[0], size=1)
    expect_error(session, "decode_of_an_unknown_batch", lambda: client.decode([unknown]))
    expect_error(session, "filter_of_an_unknown_batch", lambda: client.filter_batch(unknown.id, [0]))
    try:  # 7.5: the router clears a batch whose Prefill failed, so it must be no error
        client.clear_cache(unknown.id)
        session.checks.expect("clear.of_an_unknown_batch_is_no_error", "7.5", True)
    except ShardError as error:
        session.checks.expect("clear.of_an_unknown_batch_is_no_error", "7.5", False, error)
    observed: dict[str, Any] = {}
    both = [session.request(f"errors/{i}", p, max_new_tokens, ignore_eos=True) for i, p in enumerate(pair, 1)]
    batch = session.prefill(both)
    if batch is not None:
        same = session.filter(batch, both)
        session.checks.equal("filter.keeping_all_is_a_no_op", "1.6", same, batch)
        batch = session.decode(same)
    if batch is not None:
        dead_end = batch
        expect_error(session, "filter_to_nothing", lambda: client.filter_batch(dead_end.id, []), text=None)
        observed["batch_survives_filter_to_nothing"] = still_cached(session, dead_end, both)
        session.forget(dead_end.id)
    survivor = session.request("errors/mixed", pair[0], max_new_tokens, ignore_eos=True)
    batch = session.prefill([survivor])
    if batch is not None:
        mixed = [batch, unknown]
        expect_error(session, "decode_of_known_and_unknown", lambda: client.decode(mixed))
        observed["known_batch_survives_decode_with_unknown"] = still_cached(session, batch, [survivor])
        session.forget(batch.id)
    return observed


def stage_chunking(session: Session, label: str, pair: Sequence[Prompt], max_new: int, chunked: bool) -> list[Tracked]:
    """Join a request to a cached batch by Prefill: whole, or with a first chunk that Decode carries on."""
    running = session.request(f"{label}/running", pair[0], max_new, ignore_eos=True)
    batch = session.prefill([running])
    batch = session.decode(batch) if batch else None
    if batch is None:
        raise RuntimeError("the scenario needs at least 5 new tokens a request")
    count, exact = session.prompt_tokens(pair[1])
    chunk_len = (max(1, count // 3) if exact else 3) if chunked else None
    if chunk_len is not None:
        chunk_len = min(chunk_len, session.chunk_limit)
    joining = session.request(f"{label}/joining", pair[1], max_new, ignore_eos=True, chunk_len=chunk_len)
    batch = session.prefill([joining], batch)
    if chunk_len is not None and exact and batch is not None and not running.finished:
        budget = max(1, session.limits.max_prefill_tokens - 1)
        want = 1 + min(count - chunk_len, budget)
        session.checks.equal("chunk.current_tokens", "1.7", batch.current_tokens, want, label)
    session.run_to_end(batch)
    session.checks.expect("chunk.tokens_appear", "7.6", joining.finished, joining.label)
    return [running, joining]


def stage_chunk_alone(session: Session, prompt: Prompt, max_new_tokens: int) -> list[Tracked]:
    """A lone partial prefill gives no generation but a batch, which Decode carries on."""
    count, exact = session.prompt_tokens(prompt)
    chunk_len = min(max(1, count // 2) if exact else 3, session.chunk_limit)
    alone = session.request("chunk/alone", prompt, max_new_tokens, ignore_eos=True, chunk_len=chunk_len)
    batch = session.prefill([alone])
    session.checks.expect("chunk.batch_kept_while_prefilling", "7.6", batch is not None and not alone.ids)
    session.run_to_end(batch)
    return [alone]


def stage_prefix_reuse(session: Session, prompt: Prompt, max_new_tokens: int) -> list[Tracked]:
    """A request whose first blocks were filled by an earlier one starts behind them (`cache_len`)."""
    count, exact = session.prompt_tokens(prompt)
    num_shared = (count - 1) // session.blocks.block_size
    if not (exact and session.info.use_prefix_caching and num_shared):
        session.checks.skip("prefix.ran", "1.7", "no prefix caching, no exact lengths, or a prompt under one block")
        return []
    owner = session.request("prefix/owner", prompt, max_new_tokens, ignore_eos=True)
    batch = session.prefill([owner])
    while batch is not None and not owner.ids:
        batch = session.decode(batch)
    guest = session.request(
        "prefix/guest", prompt, max_new_tokens, ignore_eos=True, prefix=list(owner.blocks[:num_shared])
    )
    joined = session.prefill([guest])
    session.run_to_end(joined)
    session.run_to_end(batch)
    session.checks.expect("prefix.ran", "1.7", guest.finished, num_shared)
    return [owner, guest]


def stage_details(session: Session, prompts: Sequence[Prompt], max_new: int, expect_prefill: str) -> list[Tracked]:
    """Prompt logprobs (the first NaN) and top tokens."""
    asked = [
        session.request(f"details/{prompt.name}", prompt, max_new, prefill_logprobs=True, top_n_tokens=5)
        for prompt in prompts
    ]
    together = [asked] if session.fits(*prompts) else [[member] for member in asked]
    for members in together:
        session.run_to_end(session.prefill(members))
    checks = session.checks
    for member in asked:
        tokens = member.prefill if member.prefill is not None else pb.Tokens()
        promised = expect_prefill == "yes" or (expect_prefill == "auto" and session.info.requires_padding)
        if not tokens.ids:
            checks.expect("prefill.details_given", "8.3", not promised, member.label)
            continue
        checks.expect("prefill.details_given", "8.3", expect_prefill != "no", member.label)
        checks.expect("prefill.first_logprob_is_nan", "1.3", math.isnan(tokens.logprobs[0]), tokens.logprobs[0])
        sane = all(math.isfinite(value) and value <= 1e-4 for value in tokens.logprobs[1:])
        checks.expect("prefill.other_logprobs_finite", "8.3", sane, member.label)
        lengths = {len(tokens.ids), len(tokens.logprobs), len(tokens.texts)}
        checks.expect("prefill.parallel", "1.3", len(lengths) == 1, lengths)
        checks.expect("prefill.is_special_left_empty", "1.3", not tokens.is_special, member.label)
        if member.exact:
            checks.equal("prefill.one_per_prompt_token", "8.3", len(tokens.ids), member.prompt_tokens, member.label)
    return asked


def find_stop(run: Tracked) -> tuple[str, int] | None:
    """Pick a token text that first occurs where its token ends, and count the tokens up to there."""
    for index, text in enumerate(run.texts[:-1]):
        before = "".join(run.texts[:index])
        fresh = text.strip() and text not in before and (before + text).find(text) == len(before)
        if index >= 2 and fresh and not any(run.is_special[: index + 1]):
            return text, index + 1
    return None


def stage_stop(session: Session, solo: dict[str, Tracked], max_new_tokens: int) -> None:
    found = [(run, stop) for run in solo.values() if (stop := find_stop(run)) is not None]
    if not found:
        session.checks.skip("stop.sequence_ends_the_request", "8.4", "no run has a usable token text")
    for run, (text, length) in found[:3]:
        tracked = session.request(f"stop/{run.prompt.name}", run.prompt, max_new_tokens, stop=(text,))
        session.run_to_end(session.prefill([tracked]))
        reason = tracked.generated.finish_reason if tracked.generated else None
        got, want = (tracked.ids, reason), (run.ids[:length], pb.FINISH_REASON_STOP_SEQUENCE)
        session.checks.equal("stop.sequence_ends_the_request", "8.4", got, want, f"{tracked.label} {text!r}")


def stage_repeatable(session: Session, prompt: Prompt, max_new_tokens: int) -> None:
    """The same seed and parameters give the same tokens twice, with every parameter in use."""
    runs = [stage_solo(session, [prompt], max_new_tokens, EVERY_PARAMETER)[prompt.name] for _ in range(2)]
    session.checks.equal("sampled.repeatable_with_every_parameter", "8.2", runs[0].ids, runs[1].ids, prompt.name)


def pick(prompts: Sequence[Prompt], session: Session) -> list[Prompt]:
    """Order prompts for pairing: as they come, but the longest last."""
    longest = max(prompts, key=lambda prompt: session.prompt_tokens(prompt)[0])
    return [*(prompt for prompt in prompts if prompt is not longest), longest]


def scenario(
    session: Session, prompts: Sequence[Prompt], max_new_tokens: int, expect_prefill: str = "auto"
) -> ScenarioResult:
    """Drive a warmed-up replica through every rule of 1.5 to 1.8 that a client can see."""
    if len(prompts) < 3 or max_new_tokens < 5:
        raise ValueError("the scenario needs at least three prompts and five new tokens")
    one, two, *_, long = pick(prompts, session)
    num_free = session.blocks.num_free
    stage_info(session)
    solo = stage_solo(session, prompts, max_new_tokens, GREEDY)
    solo_sampled = stage_solo(session, [one, two, long], max_new_tokens, SEEDED)
    for kind, runs, sampling in (("greedy", solo, GREEDY), ("sampled", solo_sampled, SEEDED)):
        for pair in ((one, two), (long, one), (two, long)):
            stage_join(session, f"join/{kind}", pair, max_new_tokens, sampling)
            compare(session, runs, *session.requests[-2:])
    partial = (one, long) if session.fits(one, long) else (one, two)
    compare(session, solo, *stage_partial_finish(session, partial, max_new_tokens))
    compare(session, solo, *stage_client_left(session, (one, two), max_new_tokens))
    observations = stage_errors(session, (one, two), max_new_tokens)
    if session.info.support_chunking:
        compare(session, solo, *stage_chunking(session, "concat", (one, long), max_new_tokens, False))
        compare(session, solo, *stage_chunking(session, "chunk", (two, long), max_new_tokens, True))
        compare(session, solo, *stage_chunk_alone(session, long, max_new_tokens))
    else:
        session.checks.skip("chunk.tokens_appear", "7.6", "the shard does not support chunking")
    compare(session, solo, *stage_prefix_reuse(session, long, max_new_tokens))
    compare(session, solo, *stage_details(session, (one, two, long), max_new_tokens, expect_prefill))
    stage_stop(session, solo, max_new_tokens)
    stage_repeatable(session, two, max_new_tokens)
    session.checks.equal("client.every_block_came_back", "7.4", session.blocks.num_free, num_free)
    return ScenarioResult(session.requests, session.checks, observations)


# --- main


def check_warmup(checks: Checks, client: ContractClient, triple: WarmupTriple, info: pb.InfoResponse) -> None:
    checks.expect("warmup.input_below_total", "3", 0 < triple.max_input_tokens < triple.max_total_tokens, triple)
    has_supported = triple.max_supported_total_tokens is not None
    checks.equal("warmup.supported_unless_padded", "1.3", has_supported, not info.requires_padding)
    if triple.max_supported_total_tokens is not None:
        enough = triple.max_supported_total_tokens >= triple.max_total_tokens
        checks.expect("warmup.supports_one_whole_request", "2.7", enough, triple)
        whole = triple.max_supported_total_tokens % (info.block_size or 1) == 0
        checks.expect("warmup.supported_is_whole_blocks", "9.3", whole, triple)
    client.health()


def start(
    client: ContractClient, checks: Checks, args: argparse.Namespace, count_tokens: CountTokens | None
) -> tuple[Session, WarmupTriple]:
    """Go through TGI's start-up order (1.5): clear, info, warm-up."""
    client.clear_cache()
    info = client.info()
    triple = client.warmup(
        args.max_input_tokens, args.max_prefill_tokens, args.max_total_tokens, image=args.warmup_image
    )
    check_warmup(checks, client, triple, info)
    for name in ("max_input_tokens", "max_total_tokens"):
        if getattr(args, name) is not None:
            checks.equal("warmup.given_limits_are_kept", "9.3", getattr(triple, name), getattr(args, name), name)
    limits = Limits(
        max_input_tokens=triple.max_input_tokens,
        max_prefill_tokens=args.max_prefill_tokens,
        max_total_tokens=triple.max_total_tokens,
    )
    pool = triple.max_supported_total_tokens or 0
    return Session(client, info, limits, pool, checks, count_tokens), triple


def load_prompts(path: Path) -> list[Prompt]:
    """Read a list of strings, or of objects with `prompt`, and optionally `name` and `add_special_tokens`."""
    prompts = []
    for index, row in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        row = {"prompt": row} if isinstance(row, str) else row
        prompts.append(Prompt(row.get("name", str(index)), row["prompt"], row.get("add_special_tokens", True)))
    return prompts


def token_counter(path: Path) -> CountTokens:
    from tokenizers import Tokenizer  # optional: without it lengths are upper bounds

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda prompt: len(tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens).ids)


def info_json(info: pb.InfoResponse) -> dict[str, Any]:
    out = {name: getattr(info, name) for name in info.DESCRIPTOR.fields_by_name}
    return out | {"window_size": info.window_size if info.HasField("window_size") else None}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check a model shard against TGI's v3 contract.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--uds", metavar="PREFIX", help="sockets are PREFIX-0, PREFIX-1, ...")
    where.add_argument("--url", action="append", help="a shard's url in rank order, instead of discovery")
    parser.add_argument("--max-input-tokens", type=int)
    parser.add_argument("--max-prefill-tokens", type=int, default=4096)
    parser.add_argument("--max-total-tokens", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=12, help="for each request (at least 5)")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, help="JSON list of prompts")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, for exact prompt lengths")
    parser.add_argument("--prefill-details", choices=["auto", "yes", "no"], default="auto", help="whether served")
    parser.add_argument("--oracle", type=Path, help="what benchmarks/oracle.py wrote")
    parser.add_argument("--near-tie", type=float, default=1e-3, help="gap of logits where ids may differ")
    parser.add_argument("--no-warmup-image", dest="warmup_image", action="store_false")
    parser.add_argument("--timeout-seconds", type=float, default=60.0, help="for each call")
    return parser.parse_args(argv)


def compare_with_oracle(session: Session, path: Path, near_tie: float) -> None:
    """Check the greedy solo runs against benchmarks/oracle.py's, up to the first near tie."""
    rows = {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["completions"]}
    for tracked in session.requests:
        row = rows.get(tracked.prompt.name)
        if row is None or not tracked.label.startswith("solo/greedy/"):
            continue
        ids, got = row["completion_ids"], tracked.ids
        ends = row["finish_reason"] == "eos_token" and len(got) >= len(ids)
        sure = next((i for i, gap in enumerate(row["gaps"]) if gap < near_tie), None)
        common = min(len(ids), len(got)) if sure is None else min(sure, len(ids), len(got))
        want = ids[:common]
        session.checks.equal("greedy.same_as_the_oracle", "8.1", got[:common], want, tracked.label)
        if ends and sure is None:
            session.checks.equal("greedy.ends_like_the_oracle", "8.4", len(got), len(ids), tracked.label)


def run(client: ContractClient, args: argparse.Namespace, checks: Checks, report: dict[str, Any]) -> None:
    """Start, run the scenario, and fill in the report as far as the shard lets us get."""
    count_tokens = token_counter(args.tokenizer) if args.tokenizer else None
    report["urls"] = client.discovered
    session, triple = start(client, checks, args, count_tokens)
    report |= {"info": info_json(session.info), "warmup": vars(triple)}
    try:
        result = scenario(session, load_prompts(args.prompts), args.max_new_tokens, args.prefill_details)
        report["observations"] = result.observations
    finally:
        report["requests"] = [tracked.to_json() for tracked in session.requests]
        with contextlib.suppress(ShardError):
            client.clear_cache()
    if args.oracle is not None:
        compare_with_oracle(session, args.oracle, args.near_tie)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    checks = Checks()
    report: dict[str, Any] = {}
    problem = ""
    try:
        with ContractClient(args.uds, args.url, args.timeout_seconds) as client:
            run(client, args, checks, report)
    except (ShardError, RuntimeError, KeyError, MemoryError, grpc.RpcError) as error:
        problem = f"{type(error).__name__}: {error}"
    checks.expect("scenario.ran_to_its_end", "1", not problem, problem)
    report |= {"checks": [check.to_json() for check in checks], "num_failed": checks.num_failed}
    json.dump(report, sys.stdout, ensure_ascii=False)
    print()
    return 1 if checks.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
