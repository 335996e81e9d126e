"""TGI's flags and variables that funitel takes without honouring them, as two tables with the reason of each row.

An *inert* one changes no answer here: when it is given, one line of the log says so. A *refused* one would change the
answer, so the program does not start. Everything else of TGI's is honoured and a field of a settings dataclass.
`settings.as_command` makes options of the rows, for `ROWS` of each program.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Program = Literal["launcher", "router", "shard", "download", "quantize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiFlag:
    """One flag and variable of TGI.

    Attributes:
        name: of the flag, with underscores; the variable is the same in capitals.
        flag: programs that have it as a flag, and as its variable where `has_variable`.
        variable: programs that have it as a variable only.
        kind: what a value is made of: bool is a switch, else called with the text, and raises ValueError.
        choices: the only values TGI takes; empty for any.
        why: completes "... is accepted and changes nothing: " or "... cannot be honoured: ".
    """

    name: str
    flag: tuple[Program, ...] = ()
    variable: tuple[Program, ...] = ()
    has_variable: bool = True
    kind: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    why: str

    @property
    def env(self) -> str | None:
        """Name of the variable."""
        return self.name.upper() if self.has_variable else None

    def asks(self, value: Any) -> bool:
        """Whether a value asks for anything: a switch that is off does not."""
        return value is not None and value is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inert(TgiFlag):
    """Accepted, though it changes no answer here."""

    def remark(self, given: str) -> str:
        """The line of the log; `given` is the flag or variable with its value."""
        return f"{given} is accepted and changes nothing: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(TgiFlag):
    """Refused at start, but for the values in `allowed`, which ask for what happens anyway."""

    allowed: tuple[str, ...] = ()

    def asks(self, value: Any) -> bool:
        """Whether a value asks for what cannot be done."""
        return TgiFlag.asks(self, value) and str(value) not in self.allowed

    def refusal(self, given: str) -> str:
        """The line of the error; `given` is the flag or variable with its value."""
        return f"{given} cannot be honoured: {self.why}"


_CHILDREN: tuple[Program, ...] = ("launcher", "router", "shard", "download")
_ON_SHARDS: tuple[Program, ...] = ("launcher", "shard")

INERT: tuple[Inert, ...] = (
    Inert(
        name="trust_remote_code",
        flag=("router", "download", "quantize"),
        kind=bool,
        why="only shards run the code that comes with a model",
    ),
    Inert(
        name="disable_custom_kernels",
        flag=("launcher",),
        variable=("shard",),
        kind=bool,
        why="there are no custom Bloom and GPT-NeoX kernels to switch off",
    ),
    Inert(
        name="usage_stats",
        flag=("launcher", "router"),
        choices=("on", "off", "no-stack"),
        why="nothing about the use of this server is ever sent anywhere",
    ),
    Inert(
        name="max_image_fetch_size",
        flag=("router",),
        variable=("launcher",),
        kind=int,
        why="this server takes text only and fetches no images",
    ),
    Inert(name="ngrok_authtoken", flag=("launcher", "router"), why="it belongs to --ngrok, which is refused"),
    Inert(name="ngrok_edge", flag=("launcher", "router"), why="it belongs to --ngrok, which is refused"),
    Inert(
        name="max_input_tokens",
        flag=("shard",),
        has_variable=False,
        kind=int,
        why="the router checks the length of prompts",
    ),
    Inert(
        name="merge_lora",
        flag=("download",),
        has_variable=False,
        kind=bool,
        why="adapters are not merged; a repository that holds nothing but an adapter is refused",
    ),
    Inert(
        name="auto_convert",
        flag=("download",),
        has_variable=False,
        kind=bool,
        why="PyTorch's own files are served as they are, where a repository has no safetensors",
    ),
    Inert(
        name="tgi_wiggle_room",
        variable=_ON_SHARDS,
        why="--cuda-memory-fraction alone decides how much memory the KV pool may take",
    ),
    Inert(name="use_flash_attention", variable=_ON_SHARDS, why="the attention backend is chosen at start"),
    Inert(name="ze_affinity_mask", variable=("launcher",), why="Intel GPUs are not used"),
    Inert(name="xpu_memory_fraction", variable=_ON_SHARDS, why="Intel GPUs are not used"),
    Inert(name="disable_exllama", variable=_ON_SHARDS, why="there are no Exllama kernels"),
    Inert(name="exllama_version", variable=_ON_SHARDS, why="there are no Exllama kernels"),
    Inert(name="use_cutlass_w8a8", variable=_ON_SHARDS, why="there are no CUTLASS kernels"),
    Inert(name="rocm_use_flash_attn_v2_triton", variable=_ON_SHARDS, why="AMD GPUs are not used"),
    Inert(name="rocm_use_custom_paged_attn", variable=_ON_SHARDS, why="AMD GPUs are not used"),
    Inert(name="rocm_use_skinny_gemm", variable=_ON_SHARDS, why="AMD GPUs are not used"),
    Inert(name="aip_http_port", variable=("launcher", "router"), why="--port, or PORT, says where the server listens"),
    Inert(name="debug", variable=_ON_SHARDS, why="there is no fake process group; --log-level says what is logged"),
    Inert(name="log_colorize", variable=("launcher", "router"), why="logs have no colours"),
    Inert(name="log_format", variable=("launcher", "router"), why="--json-output decides the form of the logs"),
)

REFUSED: tuple[Refused, ...] = (
    Refused(
        name="speculate",
        flag=_ON_SHARDS,
        kind=int,
        allowed=("0",),
        why="there is no speculative decoding; leave it out or give 0",
    ),
    Refused(
        name="lora_adapters",
        flag=("launcher",),
        variable=("shard",),
        why="adapters cannot be served; merge the adapter into its base model and serve that",
    ),
    Refused(
        name="ngrok",
        flag=("launcher", "router"),
        kind=bool,
        why="no tunnel is opened; run ngrok beside this server and point it at --port",
    ),
    Refused(
        name="weights_cache_override",
        flag=("launcher",),
        variable=("shard", "download"),
        why="weights are read from the model's own folder; give that as --model-id",
    ),
    Refused(
        name="extension",
        flag=("download",),
        has_variable=False,
        allowed=(".safetensors",),
        why="safetensors are taken where there are any, PyTorch's own files elsewhere; leave it out",
    ),
)

# Values of honoured flags that are refused, with the reason; `settings` takes them beside a field's own choices.
REFUSED_VALUES: dict[str, dict[str, str]] = {
    "quantize": dict.fromkeys(
        (
            "eetq",
            "exl2",
            "marlin",
            "bitsandbytes",
            "bitsandbytes-nf4",
            "bitsandbytes-fp4",
        ),
        "such weights can neither be read nor made; serve a checkpoint that is not quantised, or as GPTQ, AWQ or fp8",
    ),
    "rope_scaling": {
        "dynamic": "rotations would depend on what shares the batch; give linear, which stretches them for all",
    },
}


def rows_of(program: Program) -> Iterator[TgiFlag]:
    """The rows that concern one program."""
    return (row for row in (*INERT, *REFUSED) if program in row.flag or program in row.variable)
