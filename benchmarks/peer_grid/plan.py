"""The grid: which cells there are, how much each one asks, and about how long it takes. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from types import MappingProxyType

from .shapes import SHAPES, num_active, num_bytes

DEMO = "demo"
PROMPT_TOKENS, OUTPUT_TOKENS = 108, 64
DEMO_BYTES, DEMO_ACTIVE = 140_000_000, 134_000_000
START_SECONDS, TUNING_RUNS = 12.0, 9


@dataclass(frozen=True, slots=True)
class Workload:
    """What a cell asks of a server. `kind` says what a peer is tuned for: one stream, many, or prefill."""

    name: str
    streams: int
    prompt_tokens: int
    output_tokens: int
    kind: str


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        **{
            str(streams): Workload(
                str(streams), streams, PROMPT_TOKENS, OUTPUT_TOKENS, "one" if streams == 1 else "many"
            )
            for streams in (1, 4, 16, 64)
        },
        **{f"prefill-{tokens}": Workload(f"prefill-{tokens}", 1, tokens, 1, "prefill") for tokens in (512, 4096)},
    }
)


@dataclass(frozen=True, slots=True)
class Format:
    """A file, and how this server is told to compute with it; `is_same` if the peer computes with the same bits."""

    name: str
    file: str
    ours: tuple[str, ...] = ()
    is_same: bool = True

    @property
    def of_peer(self) -> str:
        """The format that the peer computes with."""
        return self.name if self.is_same else self.file


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        form.name: form
        for form in (
            Format("q4_k_m", "q4_k_m"),
            Format("q4_0", "q4_0"),
            Format("q4_1", "q4_1"),
            Format("q8_0", "q8_0"),
            Format("bf16", "bf16", ("--dtype", "bfloat16")),
            Format("float32", "bf16", ("--dtype", "float32")),
            Format("int8", "bf16", ("--quantize", "int8"), is_same=False),
        )
    }
)

PEERS_OF_FILE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("q4_k_m", "q4_0", "q4_1", "q8_0"), ("llama.cpp", "ik_llama.cpp", "openvino")),
        "bf16": ("vllm",),
    }
)
FORMATS_OF_MODEL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        DEMO: ("q4_1", "q8_0", "bf16", "int8", "float32"),
        "0.5b": ("q4_k_m", "q8_0", "bf16", "int8"),
        "1b": ("q4_k_m", "q4_0", "q8_0", "bf16", "int8"),
        "3b": ("q4_k_m", "q8_0", "bf16", "int8"),
        "8b": ("q4_k_m",),
        "moe": ("q4_k_m",),
    }
)
REQUESTS_OF_A_STREAM: Mapping[str, int] = MappingProxyType({DEMO: 8, "0.5b": 4, "1b": 3, "3b": 2, "8b": 1, "moe": 2})
"""Requests of the only stream of a level; the streams of a larger level send one each, or of the demo model two."""

SECONDARY = ("ik_llama.cpp", "openvino")
SECONDARY_MODELS, SECONDARY_WORKLOADS = (DEMO, "1b"), ("1", "16", "prefill-512")
"""Of these peers: one size, and the workloads that say most."""

SHORT = ("demo/q4_1/llama.cpp/*", "demo/q8_0/llama.cpp/*", "1b/q*/llama.cpp/*", "demo/int8/vllm/*", "1b/int8/vllm/*")
SHORT_WORKLOADS = ("1", "16")


@dataclass(frozen=True, slots=True)
class Cell:
    """One model in one format, one peer, one workload."""

    model: str
    form: str
    peer: str
    workload: Workload

    @property
    def key(self) -> str:
        """Its name: `1b/q4_0/llama.cpp/16`."""
        return f"{self.pair}/{self.workload.name}"

    @property
    def pair(self) -> str:
        """Its name without the workload."""
        return f"{self.model}/{self.form}/{self.peer}"

    @property
    def peer_key(self) -> str:
        """What the options of a peer are tuned for."""
        return f"{self.model}/{FORMATS[self.form].of_peer}/{self.peer}"

    @property
    def num_requests(self) -> int:
        """Requests of one round."""
        if self.workload.kind == "prefill":
            return 1 if self.workload.prompt_tokens > 1000 and self.model != DEMO else 2
        if self.workload.streams == 1:
            return REQUESTS_OF_A_STREAM[self.model]
        return self.workload.streams * (2 if self.model == DEMO and self.workload.streams < 64 else 1)


def grid() -> Iterator[Cell]:
    """Every cell, those of one pair of servers together."""
    for model, forms in FORMATS_OF_MODEL.items():
        for form in forms:
            for peer in PEERS_OF_FILE[FORMATS[form].file]:
                for workload in WORKLOADS.values():
                    if _is_in_grid(model, peer, workload):
                        yield Cell(model, form, peer, workload)


def _is_in_grid(model: str, peer: str, workload: Workload) -> bool:
    if model == "8b":
        return workload.name == "1" and peer == "llama.cpp"
    if model == "moe":
        return workload.name in ("1", "4", "16") and peer == "llama.cpp"
    return peer not in SECONDARY or (model in SECONDARY_MODELS and workload.name in SECONDARY_WORKLOADS)


def choose(patterns: Sequence[str], *, is_short: bool) -> list[Cell]:
    """The cells with a name that matches one of the patterns; all without patterns."""
    cells = list(grid())
    if is_short:
        short = [cell for cell in cells if any(fnmatch(cell.key, pattern) for pattern in SHORT)]
        cells = [cell for cell in short if cell.workload.name in SHORT_WORKLOADS]
    return [cell for cell in cells if not patterns or any(_is_named(cell, each) for each in patterns)]


def _is_named(cell: Cell, pattern: str) -> bool:
    """Whether a pattern is the name of a cell, or of its first parts."""
    return fnmatch(cell.key, pattern) or fnmatch(cell.key, f"{pattern.rstrip('/')}/*")


def rounds_of(cell: Cell, rounds: int) -> int:
    """Rounds of a cell: the largest model gets three."""
    return min(rounds, 3) if cell.model == "8b" else rounds


def estimate_seconds(cells: Sequence[Cell], rounds: int, *, read_rate: float, multiply_rate: float) -> float:
    """About how long some cells take, without building: from the bytes that are read and the products that are made.

    Args:
        read_rate: bytes a second that both servers reach on the average.
        multiply_rate: products a second that both reach.
    """
    seconds, pairs, kinds = 0.0, set(), set()
    for cell in cells:
        once = _round_seconds(cell, read_rate, multiply_rate)
        seconds += 2 * rounds_of(cell, rounds) * once
        pairs.add(cell.pair)
        kind = (cell.pair, cell.workload.kind)
        if kind not in kinds:
            kinds.add(kind)
            seconds += TUNING_RUNS * (START_SECONDS + once / 4)
    return seconds + 2 * START_SECONDS * len(pairs)


def _round_seconds(cell: Cell, read_rate: float, multiply_rate: float) -> float:
    work, file = cell.workload, FORMATS[cell.form].file
    if cell.model == DEMO:
        step_bytes, active = DEMO_BYTES, DEMO_ACTIVE
    else:
        shape = SHAPES[cell.model]
        active = num_active(shape)
        step_bytes = active * 9 // 16 if shape.num_experts else num_bytes(shape, file)  # of Q4_K: 4.5 bits
    steps = work.output_tokens * -(-cell.num_requests // work.streams)
    products = active * cell.num_requests * (work.prompt_tokens + work.output_tokens)
    return steps * step_bytes / read_rate + products / multiply_rate
