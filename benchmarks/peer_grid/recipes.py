"""How each server is started for a workload, and which of its options are tuned. Pure.

The first value of an option is the one that tuning begins with.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from .builds import Built
from .plan import Format, Workload

Options = Mapping[str, str]
"""Name of an option -> its value, as on a command line."""

ROUNDING = 256  # tokens that the context of a stream is rounded up to
MARGIN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server is started with."""

    model: Path
    form: Format
    workload: Workload
    options: Options
    port: int

    @property
    def context(self) -> int:
        """Tokens of one stream, rounded up."""
        tokens = self.workload.prompt_tokens + self.workload.output_tokens + MARGIN_TOKENS
        return -(-tokens // ROUNDING) * ROUNDING


@dataclass(frozen=True, slots=True)
class Command:
    """A command line and the variables that it needs besides the environment."""

    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One kind of server.

    `tuned` has the values of each option; `of_kinds` the options that matter to each kind of workload.
    """

    name: str
    build: str  # in builds.BUILDS; empty for this server
    command: Callable[[Built, Launch], Command]
    tuned: Callable[[int], Mapping[str, tuple[str, ...]]]
    of_kinds: Mapping[str, tuple[str, ...]]
    bench: Callable[[Built, Launch], Command] | None = None

    def values(self, kind: str, cores: int) -> dict[str, tuple[str, ...]]:
        """The values to try of each option for a kind of workload."""
        tuned = self.tuned(cores)
        return {name: tuned[name] for name in self.of_kinds[kind]}

    def defaults(self, cores: int) -> dict[str, str]:
        """The first value of every option."""
        return {name: values[0] for name, values in self.tuned(cores).items()}


def _threads(cores: int) -> tuple[str, ...]:
    """All cores, and one less for the client and the rest of the server."""
    return (str(cores), str(cores - 1)) if cores > 1 else ("1",)


def _ours(built: Built, launch: Launch) -> Command:
    """This server, with room for as many tokens of keys and values as its peers get."""
    capacity = launch.workload.streams * launch.context
    arguments = (
        *(sys.executable, "-m", "funitel", "--model-id", str(launch.model), "--port", str(launch.port)),
        *("--hostname", "127.0.0.1", *launch.form.ours),
        *("--max-total-tokens", str(launch.context), "--max-batch-total-tokens", str(capacity)),
    )
    return Command(arguments, {"FUNITEL_CACHE": str(built.programs)})


OURS = Recipe("funitel", "", _ours, lambda cores: {}, {"one": (), "many": (), "prefill": ()})


def _llama_tuned(cores: int) -> dict[str, tuple[str, ...]]:
    return {
        "threads": _threads(cores),
        "poll": ("50", "0", "100"),
        "flash-attn": ("on", "off"),
        "kv-type": ("f16", "q8_0"),
        "ubatch-size": ("512", "128", "2048"),
        "cache-ram": ("0", "8192"),
        "kv-unified": ("off", "on"),
    }


def _llama_server(built: Built, launch: Launch) -> Command:
    options, streams = launch.options, launch.workload.streams
    return Command(
        (
            *(built.program("llama-server"), "--model", str(launch.model), "--host", "127.0.0.1"),
            *("--port", str(launch.port), "--parallel", str(streams), "--ctx-size", str(streams * launch.context)),
            *("--threads", options["threads"], "--threads-batch", options["threads"], "--poll", options["poll"]),
            *("--flash-attn", options["flash-attn"], "--cache-ram", options["cache-ram"]),
            "--kv-unified" if options["kv-unified"] == "on" else "--no-kv-unified",
            *("--cache-type-k", options["kv-type"], "--cache-type-v", options["kv-type"]),
            *("--batch-size", "2048", "--ubatch-size", options["ubatch-size"]),
        )
    )


def _llama_bench(built: Built, launch: Launch) -> Command:
    options, work = launch.options, launch.workload
    asked: tuple[str, ...]
    if work.kind == "prefill":
        asked = ("--n-prompt", str(work.prompt_tokens), "--n-gen", "0")
    else:
        asked = ("--n-prompt", "0", "--n-gen", str(work.output_tokens), "--n-depth", str(work.prompt_tokens))
    return Command(
        (
            *(built.program("llama-bench"), "--model", str(launch.model), *asked, "--repetitions", "1"),
            *("--threads", options["threads"], "--poll", options["poll"]),
            *("--flash-attn", {"on": "1", "off": "0"}[options["flash-attn"]]),
            *("--cache-type-k", options["kv-type"], "--cache-type-v", options["kv-type"]),
            *("--ubatch-size", options["ubatch-size"], "--output", "json"),
        )
    )


_LLAMA_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "one": ("threads", "poll", "flash-attn", "kv-type"),
        "many": ("threads", "poll", "flash-attn", "kv-type", "ubatch-size", "cache-ram", "kv-unified"),
        "prefill": ("threads", "flash-attn", "kv-type", "ubatch-size", "cache-ram"),
    }
)

LLAMA = Recipe("llama.cpp", "llama.cpp", _llama_server, _llama_tuned, _LLAMA_KINDS, bench=_llama_bench)


def _ik_tuned(cores: int) -> dict[str, tuple[str, ...]]:
    return {
        "threads": _threads(cores),
        "run-time-repack": ("on", "off"),
        "flash-attn": ("on", "off"),
        "kv-type": ("f16", "q8_0"),
        "ubatch-size": ("512", "2048"),
    }


def _ik_server(built: Built, launch: Launch) -> Command:
    options, streams = launch.options, launch.workload.streams
    return Command(
        (
            *(built.program("llama-server"), "--model", str(launch.model), "--host", "127.0.0.1"),
            *("--port", str(launch.port), "--parallel", str(streams), "--ctx-size", str(streams * launch.context)),
            *("--threads", options["threads"], "--threads-batch", options["threads"]),
            *(
                "--flash-attn",
                options["flash-attn"],
                *(("--run-time-repack",) if options["run-time-repack"] == "on" else ()),
            ),
            *("--cache-type-k", options["kv-type"], "--cache-type-v", options["kv-type"]),
            *("--batch-size", "2048", "--ubatch-size", options["ubatch-size"]),
        )
    )


IK = Recipe(
    "ik_llama.cpp",
    "ik_llama.cpp",
    _ik_server,
    _ik_tuned,
    {
        "one": ("threads", "run-time-repack", "flash-attn", "kv-type"),
        "many": ("threads", "run-time-repack", "flash-attn", "kv-type", "ubatch-size"),
        "prefill": ("threads", "run-time-repack", "flash-attn", "ubatch-size"),
    },
)


def _vllm_tuned(cores: int) -> dict[str, tuple[str, ...]]:
    return {
        "threads": _threads(cores),
        "compile": ("on", "off"),
        "max-num-batched-tokens": ("2048", "8192"),
    }


def _vllm_server(built: Built, launch: Launch) -> Command:
    options, is_exact = launch.options, launch.form.name == "float32"
    arguments = (
        *(built.program("python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(launch.model)),
        *("--host", "127.0.0.1", "--port", str(launch.port), "--max-model-len", str(launch.context)),
        *("--dtype", "float32" if is_exact else "bfloat16", "--max-num-seqs", str(launch.workload.streams)),
        *("--max-num-batched-tokens", str(max(launch.context, int(options["max-num-batched-tokens"])))),
        "--no-enable-prefix-caching",
        *(() if options["compile"] == "on" else ("--enforce-eager",)),
    )
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "4" if is_exact else "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(options['threads']) - 1}",
        "OMP_NUM_THREADS": options["threads"],
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Command(arguments, variables)


VLLM = Recipe(
    "vllm",
    "vllm",
    _vllm_server,
    _vllm_tuned,
    {
        "one": ("threads", "compile"),
        "many": ("threads", "compile", "max-num-batched-tokens"),
        "prefill": ("threads", "compile", "max-num-batched-tokens"),
    },
)


def _openvino_tuned(cores: int) -> dict[str, tuple[str, ...]]:
    return {"threads": _threads(cores), "kv-type": ("", "f16"), "batched-tokens": ("512", "256", "4096")}


def _openvino_host(built: Built, launch: Launch) -> Command:
    options = launch.options
    return Command(
        (
            *(built.program("python"), str(Path(__file__).with_name("openvino_host.py")), str(launch.model)),
            *("--port", str(launch.port), "--threads", options["threads"], "--kv-type", options["kv-type"]),
            *("--streams", str(launch.workload.streams), "--batched-tokens", options["batched-tokens"]),
        )
    )


OPENVINO = Recipe(
    "openvino",
    "openvino",
    _openvino_host,
    _openvino_tuned,
    {
        "one": ("threads", "kv-type"),
        "many": ("threads", "kv-type", "batched-tokens"),
        "prefill": ("threads", "kv-type", "batched-tokens"),
    },
)

PEERS: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in (LLAMA, IK, VLLM, OPENVINO)})
