"""Which attention a GPU computes with, and flash-attn behind our interface: all equal the reference, without a GPU."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from funitel.model_server.attention import select as check
from funitel.model_server.attention.backend import AttentionBackend, AttentionRule, RecordableAttention
from funitel.model_server.attention.flash import flash_2, flash_3
from funitel.model_server.attention.select import KernelCheck, Makers, SplitAttention, choose, choose_attention
from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.spec.model_spec import ModelSpec, Position, WholeSpans
from funitel.proto.errors import SettingsError
from funitel_testing.flash import fake_flash_2, fake_flash_3

CPU = torch.device("cpu")
HEADS = HeadSplit(0, 6, 0, 2)
ROWS = [(0, 5), (300, 1), (40, 1), (0, 11), (270, 6)]


def spec(**more: Any) -> ModelSpec:
    fixed: dict[str, Any] = {"architecture": "test", "vocab_size": 1, "hidden_size": 1, "intermediate_size": 1}
    shape: dict[str, Any] = {"num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16}
    return ModelSpec(**fixed, **shape, max_position_embeddings=1000, **more)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_2())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fake_flash_3())
    return


RULES = {
    "plain": AttentionRule(0.25),
    "window": AttentionRule(0.2, window=7),
    "softcap": AttentionRule(0.5, softcap=3.0),
    "slopes": AttentionRule(0.25, slopes=torch.linspace(0.01, 0.3, 6)),
}


def step(block_size: int, rows: list[tuple[int, int]] = ROWS) -> tuple[ForwardBatch, KVCache, torch.Tensor]:
    needed = [-(-sum(row) // block_size) for row in rows]
    blocks = np.random.default_rng(1).permutation(np.arange(1, sum(needed) + 1)).astype(np.int32)
    tables = np.split(blocks, np.cumsum(needed)[:-1])
    spans = [RowSpan([0] * n, begin, table) for (begin, n), table in zip(rows, tables, strict=True)]
    cache = KVCache(spec(), HEADS, len(blocks) + 1, block_size, torch.bfloat16, CPU)
    generator = torch.Generator().manual_seed(2)
    cache.pool.normal_(generator=generator)
    batch = ForwardBatch.build(spans, block_size, CPU)
    return batch, cache, torch.randn(batch.num_tokens, 6, 16, generator=generator).to(torch.bfloat16)


def is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found.float() - expected.float()).norm() / expected.float().norm()) < 1e-2


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("make", "block_size"), [(flash_2, 256), (flash_3, 16)])
def test_flash_attn_as_the_reference(make: Any, block_size: int, rule: AttentionRule) -> None:
    if make is flash_3 and rule.slopes is not None:
        with pytest.raises(ValueError, match="no slopes"):
            flash_3(spec(position=Position.ALIBI), block_size, CPU, torch.bfloat16)
        return
    backend = make(spec(), block_size, CPU, torch.bfloat16)
    assert isinstance(backend, RecordableAttention)
    reference = TorchAttention(block_size, CPU)
    batch, cache, query = step(block_size)
    expected = reference.attend(query, cache, 1, reference.plan(batch), rule)
    assert is_near(backend.attend(query, cache, 1, backend.plan(batch), rule), expected)
    decoding, cache, query = step(block_size, [(300, 1), (40, 1), (513, 1)])
    contexts = torch.tensor([row.end for row in decoding.rows], dtype=torch.int32)
    tables = torch.zeros(3, 40, dtype=torch.int32)
    for line, row in zip(tables, decoding.rows, strict=True):
        line[: len(row.block_table)] = torch.from_numpy(row.block_table)
    expected = reference.attend(query, cache, 1, reference.plan(decoding), rule)
    assert is_near(backend.attend(query, cache, 1, backend.plan_rows(contexts, tables), rule), expected)


@pytest.mark.parametrize(
    ("make", "block_size", "dtype", "line"),
    [
        (flash_2, 16, torch.bfloat16, "--block-size must be a multiple of 256 for it, given 16"),
        (flash_3, 16, torch.float32, "it takes float16 and bfloat16, not float32"),
    ],
)
def test_what_flash_attn_cannot_do_is_said(make: Any, block_size: int, dtype: torch.dtype, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        make(spec(), block_size, CPU, dtype)


@pytest.mark.parametrize("make", [flash_2, flash_3])
def test_flash_attn_refuses_what_it_would_leave_out(make: Any) -> None:
    with pytest.raises(ValueError, match="it has no sinks"):
        make(spec(has_sinks=True), 256, CPU, torch.bfloat16)
    with pytest.raises(ValueError, match="it does not attend within chunks"):
        make(spec(chunk_sizes=(None, 8)), 256, CPU, torch.bfloat16)
    with pytest.raises(ValueError, match="it does not let tokens of an image see those behind them"):
        make(spec(whole_spans=WholeSpans.ALL), 256, CPU, torch.bfloat16)


def test_kernels_that_leave_out_spans_are_found_wrong() -> None:
    class Causal(TorchAttention):
        """Lets no token see those behind it."""

        def attend(self, query: Any, cache: Any, layer: int, plan: Any, rule: AttentionRule) -> Any:
            return super().attend(query, cache, layer, plan, replace(rule, sees_spans=False))

    reference, causal = TorchAttention(16, CPU), Causal(16, CPU)
    check.KernelCheck(spec(), HEADS, 16, CPU, torch.float32).check(causal, reference)
    with pytest.raises(ValueError, match="a probe is off"):
        check.KernelCheck(spec(whole_spans=WholeSpans.WINDOWS), HEADS, 16, CPU, torch.float32).check(causal, reference)


def test_the_triton_kernels_refuse_chunks() -> None:
    with pytest.raises(ValueError, match="it does not attend within chunks"):
        check._triton(spec(chunk_sizes=(None, 8)), HEADS, 16, CPU, torch.bfloat16)


@pytest.mark.parametrize("more", [{"has_sinks": True}, {"chunk_sizes": (8, None)}, {"sliding_windows": (None, 8)}])
def test_only_plain_attention_takes_the_reference_for_prompts(more: dict[str, Any]) -> None:
    assert check._is_plain(spec())
    assert not check._is_plain(spec(**more))


def test_a_check_of_a_model_with_sinks_has_some() -> None:
    class WithoutSinks(Right):
        def attend(self, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
            return super().attend(query, *arguments[:-1], replace(arguments[-1], sinks=None))

    checked = KernelCheck(spec(has_sinks=True), HEADS, 16, CPU, torch.float32)
    checked.check(Right(16, CPU), TorchAttention(16, CPU))
    with pytest.raises(ValueError, match="a probe is off by"):
        checked.check(WithoutSinks(16, CPU), TorchAttention(16, CPU))


@pytest.mark.parametrize("is_for_fresh", [False, True])
@pytest.mark.parametrize("rows", [ROWS, [(0, 5), (300, 1), (0, 11), (0, 1)], [(0, 4)], [(9, 1)]], ids=str)
def test_divided_attention_as_the_reference(rows: list[tuple[int, int]], is_for_fresh: bool) -> None:
    reference = TorchAttention(16, CPU)
    batch, cache, query = step(16, rows)
    expected = reference.attend(query, cache, 0, reference.plan(batch), RULES["plain"])
    prompts: AttentionBackend = reference if is_for_fresh else flash_3(spec(), 16, CPU, torch.bfloat16)
    divided = SplitAttention(flash_3(spec(), 16, CPU, torch.bfloat16), prompts, is_for_fresh=is_for_fresh)
    plan = divided.plan(batch)
    assert is_near(divided.attend(query, cache, 0, plan, RULES["plain"]), expected)
    has_prompts = batch.num_decode < len(rows)
    is_apart = has_prompts and not (is_for_fresh and rows is ROWS)
    assert (plan.prompts is not None) is is_apart


class Wrong(TorchAttention):
    """Right but for a hair of each head."""

    def attend(self, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return super().attend(query, *arguments) * 1.05

    def plan_rows(self, contexts: torch.Tensor, tables: torch.Tensor) -> None:
        raise NotImplementedError


class Right(Wrong):
    """The reference, by another name."""

    def attend(self, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return TorchAttention.attend(self, query, *arguments)


def named(name: str, made: TorchAttention) -> Callable[[], RecordableAttention]:
    made.name = name
    assert isinstance(made, RecordableAttention)
    return lambda: made


class Times:
    """A stopwatch that knows what everything takes: by backend, decoding and prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: tuple[float, float]) -> None:
        def timed(
            own: KernelCheck, backends: list[AttentionBackend], rows: check.Rows, stopwatch: check.Stopwatch
        ) -> list[float]:
            return [seconds[each.name][rows is check.PROMPT] for each in backends]

        monkeypatch.setattr(KernelCheck, "seconds", timed)


def chosen(makers: Makers, wanted: str | None = None, *, is_plain: bool = True) -> AttentionBackend:
    reference = TorchAttention(16, CPU)
    probe = KernelCheck(spec(), HEADS, 16, CPU, torch.float32)
    return choose(makers, reference, probe, lambda work: 0.0, wanted, is_plain=is_plain)


def test_the_fastest_of_those_that_are_right(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    makers = {"a": named("a", Right(16, CPU)), "b": named("b", Right(16, CPU)), "c": named("c", Wrong(16, CPU))}
    Times(monkeypatch, a=(2.0, 3.0), b=(1.0, 4.0), c=(0.1, 0.1), paged=(9.0, 5.0))
    assert chosen(makers).name == "b and a"
    assert "attention: c is not used: ValueError: a probe is off by 0.05" in caplog.text
    assert "attention of decoding: b (of a 2000000 us, b 1000000 us)" in caplog.text
    Times(monkeypatch, a=(1.0, 3.0), b=(2.0, 4.0), paged=(9.0, 5.0))
    assert chosen(makers).name == "a"
    Times(monkeypatch, a=(1.0, 3.0), b=(2.0, 4.0), paged=(9.0, 2.0))
    assert chosen(makers).name == "a and paged"  # fresh prompts in torch
    assert chosen(makers, is_plain=False).name == "a"


def test_with_nothing_right_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Times(monkeypatch, triton=(2.0, 2.0), paged=(9.0, 9.0))

    def missing() -> RecordableAttention:
        raise ImportError("No module named 'flash_attn_interface'")

    assert type(chosen({"flash": missing, "c": named("c", Wrong(16, CPU))})) is TorchAttention
    assert "attention runs in torch" in caplog.text
    makers = {"flash-attn 3": missing, "triton": named("triton", Right(16, CPU))}
    with pytest.raises(SettingsError, match="--attention flash cannot be had here"):
        chosen(makers, "flash")
    assert chosen(makers, "flashdecoding").name == "triton"  # TGI's name asks for what is nearest


@pytest.mark.parametrize(
    ("wanted", "name"),
    [("torch", "paged"), ("triton", "triton"), ("paged", "triton"), ("flashinfer", "flash"), ("flash", "flash")],
)
def test_what_is_wanted(monkeypatch: pytest.MonkeyPatch, wanted: str, name: str) -> None:
    Times(monkeypatch, triton=(2.0, 2.0), flash=(1.0, 1.0), paged=(9.0, 9.0))
    makers = {"flash-attn 2": named("flash", Right(16, CPU)), "triton": named("triton", Right(16, CPU))}
    assert chosen(makers, wanted).name == name


def test_a_trial_times_every_backend_on_the_same_step() -> None:
    seen: list[tuple[int, int]] = []

    class Noted(TorchAttention):
        def plan(self, batch: ForwardBatch) -> Any:
            seen.append((batch.num_tokens, batch.num_decode))
            return super().plan(batch)

    def stopwatch(work: Callable[[], object]) -> float:
        work()
        return len(seen)

    probe = KernelCheck(spec(), HEADS, 16, CPU, torch.float32)
    assert probe.seconds([Noted(16, CPU), Noted(16, CPU)], [(20, 1), (0, 3)], stopwatch) == [1.0, 2.0]
    assert seen == [(4, 1)] * 2
    assert len(probe.decode) == 64
    assert set(probe.decode) == {(4095, 1)}


def test_on_a_cpu_it_is_the_reference() -> None:
    assert type(choose_attention(spec(), HEADS, 16, CPU, torch.float32, "triton")) is TorchAttention
