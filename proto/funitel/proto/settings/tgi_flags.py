"""Tables of TGI's flags and variables that funitel accepts without effect or refuses, with a reason for each.

An *inert* one changes no answer here and is logged when given. A *refused* one would change answers, so the program
does not start. All other flags of TGI are honoured, as fields of a settings dataclass; so are *translated* values,
which have another name here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Program = Literal["launcher", "router", "shard", "download", "quantize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiFlag:
    """One flag and variable of TGI.

    Attributes:
        name: of the flag, with underscores; the variable is its upper case.
        flag: programs that have it as a flag, and as a variable if `has_variable`.
        variable: programs that have it as a variable only.
        kind: bool for a switch, else a parser of the text, which raises ValueError.
        choices: the values that TGI accepts; empty for any.
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
        """Whether a value is given; a switch that is off is not."""
        return value is not None and value is not False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inert(TgiFlag):
    """Accepted without effect."""

    def remark(self, given: str) -> str:
        """The line of the log; `given` is the flag or variable with its value."""
        return f"{given} is accepted and changes nothing: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(TgiFlag):
    """Refused at start, except for the values in `allowed`, which match the default behaviour."""

    allowed: tuple[str, ...] = ()

    def asks(self, value: Any) -> bool:
        """Whether a value is given that cannot be honoured."""
        return TgiFlag.asks(self, value) and str(value) not in self.allowed

    def refusal(self, given: str) -> str:
        """The line of the error; `given` is the flag or variable with its value."""
        return f"{given} cannot be honoured: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """What a value of TGI's stands for here.

    Attributes:
        value: what the setting becomes; TGI's own word where the checkpoint decides.
        why: completes "... is taken as --quantize int8: ", or "... is taken: " where the value is TGI's own.
    """

    value: str
    why: str

    def remark(self, name: str, given: str) -> str:
        """The line of the log; `name` is the setting's, `given` the flag or variable with its value."""
        flag = f"--{name.replace('_', '-')} {self.value}"
        is_kept = given.replace("=", " ").endswith(f" {self.value}")
        return f"{given} is taken{'' if is_kept else f' as {flag}'}: {self.why}"


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
        name="lora_adapters",
        variable=("shard",),
        why="the router tells shards which adapters to load",
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

# Refused values of honoured flags, with the reason; accepted by the parser beside a field's choices.
REFUSED_VALUES: dict[str, dict[str, str]] = {
    "quantize": {
        "exl2": "EXL2's weights of 2.5 to 8 bits are not read; give the unquantised checkpoint and --quantize q3h, or "
        "q2 to q8, or a GGUF",
        **dict.fromkeys(
            ("bitsandbytes-nf4", "bitsandbytes-fp4"),
            "bitsandbytes' codes of 4 bits are not made; --quantize a16w4 makes weights of 4 bits as they are loaded",
        ),
    },
    "rope_scaling": {"dynamic": "rotations would depend on the other sequences of the batch; give linear"},
}


# Values of honoured flags that have another name here; accepted by the parser beside a field's choices, never offered.
TRANSLATED_VALUES: dict[str, dict[str, Translated]] = {
    "quantize": {
        **dict.fromkeys(
            ("eetq", "bitsandbytes"),
            Translated(value="int8", why="8-bit weights with a scale for each output, made as they are loaded"),
        ),
        "marlin": Translated(
            value="marlin",
            why="it names kernels of TGI; here the checkpoint's own quantisation decides which kernels compute",
        ),
    },
}


def rows_of(program: Program) -> Iterator[TgiFlag]:
    """The rows of one program."""
    return (row for row in (*INERT, *REFUSED) if program in row.flag or program in row.variable)
