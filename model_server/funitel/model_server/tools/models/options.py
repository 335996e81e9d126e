"""Every way to serve a model on this machine, usable or not, each with the reason; and the one to take.

An option is held against what the loaders would do: the same estimate, with the same errors. No weight is read.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from funitel.model_server.cpu.precision import MADE
from funitel.model_server.engines.llama_cpp.estimate import llama_cpp_needs
from funitel.model_server.files.gguf_pointer import POINTER, part_paths, read_pointer
from funitel.model_server.files.gguf_refusal import refusal_of
from funitel.model_server.files.integrity import read_json, weight_files
from funitel.model_server.quantized.published import find_quantization
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.registry.nearest import nearest_row
from funitel.model_server.settings import DTYPES, LLAMA_CPP, NATIVE, QUANTIZATIONS, TRANSFORMERS, ModelsSettings
from funitel.model_server.settings.block_names import ALIASES
from funitel.model_server.tools.models import transformers_estimate
from funitel.model_server.tools.models.estimate import kind_of, needs_of
from funitel.model_server.tools.models.needs import Needs, with_memory
from funitel.proto.errors import FunitelError, MissingPackage, NoRow
from funitel.proto.extras import check_extra

GGUF, SAFETENSORS, PYTORCH = "gguf", "safetensors", "pytorch"
_MADE_BY_QUANTIZE = ("gptq",)  # what `funitel-server quantize` makes of a checkpoint, by the name of its method
_SIZED = ("GiB", 2**30), ("MiB", 2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to serve a model. `quantize` and `dtype` are the values of the flags, None where they are not given.

    `bytes` are weights and the KV pool that would be made beside them, of all ranks; None where that is not known.
    """

    engine: str
    format: str
    quantize: str | None
    dtype: str | None
    device: str
    usable: bool = False
    reason: str
    bytes: int | None = None
    fits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """The option to take, and why."""

    engine: str
    format: str
    quantize: str | None
    dtype: str | None
    device: str
    num_shard: int
    bytes: int | None
    reason: str


def size(num_bytes: int) -> str:
    """Bytes as people say them."""
    return next((f"{num_bytes / unit:.1f} {name}" for name, unit in _SIZED if num_bytes >= unit), f"{num_bytes} B")


def options_of(settings: ModelsSettings, folder: Path) -> list[Option]:
    """Every option for the model in `folder`, which may hold headers alone."""
    return _with_alternatives(list(_Subject(settings, folder).options()))


def suggest(options: Sequence[Option], num_shard: int) -> Suggestion | None:
    """The usable option to take where a user asks for none; None where none is usable.

    A GPU comes before a CPU, our own code before transformers' and llama.cpp's, and precisions in the order of speed.
    """
    usable = [each for each in options if each.usable]
    if not usable:
        return None
    best = min(usable, key=_rank)
    others = f", the first of {len(usable)} usable options in the order of speed" if len(usable) > 1 else ""
    return Suggestion(
        engine=best.engine,
        format=best.format,
        quantize=best.quantize,
        dtype=best.dtype,
        device=best.device,
        num_shard=num_shard,
        bytes=best.bytes,
        reason=f"{best.reason}{others}",
    )


_ENGINES = (NATIVE, TRANSFORMERS, LLAMA_CPP)
_ON_GPU = (None, "bfloat16", "fp8", "int8", "float16", "float32", *ALIASES)
_ON_CPU = (None, "gguf", "int8", "float32", "bfloat16", "float16", *ALIASES)
_QUANTIZATIONS = tuple(each for each in QUANTIZATIONS if each != "a8w8")  # which is int8


def _rank(option: Option) -> tuple[int, int, int]:
    order = _ON_GPU if option.device == "cuda" else _ON_CPU
    precision = option.quantize or option.dtype
    own = 0 if precision not in order else order.index(precision)  # a checkpoint's own quantisation comes first
    return ("cuda", "cpu").index(option.device), _ENGINES.index(option.engine), own


def _with_alternatives(options: list[Option]) -> list[Option]:
    """Options that do not fit, each with the largest of the same device that does."""
    told = []
    for option in options:
        if option.bytes is not None and not option.fits:
            smaller = [each for each in options if each.usable and each.device == option.device and each.bytes]
            best = min(smaller, key=lambda each: each.bytes or 0, default=None)
            if best is not None:
                flags = f"--quantize {best.quantize}" if best.quantize else f"--dtype {best.dtype}"
                option = replace(option, reason=f"{option.reason}; {flags} would take {size(best.bytes or 0)}")
        told.append(option)
    return told


class _Subject:
    """A model, and the options for it."""

    def __init__(self, settings: ModelsSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._config = read_json(folder / "config.json")
        self._format = format_of(folder)
        self._kind = kind_of(self._config)
        self._num_gpus = torch.cuda.device_count()

    def options(self) -> Iterator[Option]:
        """All of them."""
        for device in ("cuda", "cpu"):
            for dtype in DTYPES:
                yield self._native(None, dtype, device)
            for quantize in _QUANTIZATIONS:
                yield self._native(quantize, None, device)
            for dtype in DTYPES:
                yield self._transformers(dtype, device)
            yield self._llama_cpp(device)

    def _native(self, quantize: str | None, dtype: str | None, device: str) -> Option:
        option = Option(
            engine=NATIVE, format=self._format, quantize=quantize, dtype=dtype, device=device, reason="unknown"
        )
        against = self._against_native() or self._against_quantize(quantize, device) or self._against_device(device)
        if against is not None:
            return replace(option, reason=against)
        try:
            needs = needs_of(replace(self._settings, quantize=quantize, dtype=dtype, device=device), self._folder)
        except FunitelError as error:
            return replace(option, reason=error.message)
        if quantize in MADE and device == "cpu" and needs.served_by == "torch":
            return replace(option, reason=f"--quantize {quantize} needs the fused CPU step: {needs.why}")
        return _judged(option, needs, self._how(needs, quantize))

    def _against_native(self) -> str | None:
        refusal = refusal_of(self._folder)
        if refusal is not None:
            return f"no row for this architecture: {refusal}"
        if self._kind != "decoder" or self._settings.model_spec is not None:
            return None
        try:
            spec_of(self._config)
        except NoRow as no_row:
            return f"no row for this architecture ({no_row.why}): the nearest is {nearest_row(self._config)}"
        except FunitelError as error:
            return error.message
        return None

    def _against_quantize(self, quantize: str | None, device: str) -> str | None:
        if quantize is None:
            return None
        try:
            own = find_quantization(self._folder)
        except FunitelError as error:
            return error.message
        if own is not None:
            flags = own.flags
            return None if quantize in flags else f"the checkpoint is quantised as {flags[0]} ({own.bits} bits) already"
        if quantize == "gguf" and self._format != GGUF:
            return f"blocks are kept as they are of a GGUF, and this model is {self._format}"
        if quantize == "gguf" and device == "cuda":
            return "blocks of a GGUF are kept as they are on a CPU only"
        if quantize in _MADE_BY_QUANTIZE:
            command = f"funitel-server quantize MODEL OUTPUT_DIR --method {quantize}"
            return f"the weights are not quantised as {quantize}: {command} makes a checkpoint that is"
        if quantize in ("awq", "compressed-tensors"):
            return f"the weights are not quantised as {quantize}: it is for checkpoints that are published so"
        if self._kind != "decoder":
            return f"--quantize {quantize} is for decoders, and this is an {self._kind}"
        if quantize == "fp8" and device == "cpu":
            return "fp8 needs a GPU; on a CPU int8 takes as little memory"
        if quantize == "fp8" and not self._num_gpus:
            return "fp8 needs a GPU, and this machine has none that torch can use"
        return None

    def _against_device(self, device: str) -> str | None:
        if device == "cuda" and not self._num_gpus:
            return "this machine has no GPU that torch can use"
        if device == "cuda" and self._settings.num_shard > self._num_gpus:
            return f"{self._settings.num_shard} shards need as many GPUs, and there are {self._num_gpus}"
        return None

    def _how(self, needs: Needs, quantize: str | None) -> str:
        """Why an option is usable."""
        if needs.served_by != "the fused C++ step":
            why = f": {needs.why}" if needs.why else ""
            return f"{needs.served_by} computes it in {quantize or needs.precision}{why}"
        if needs.precision == "the GGUF's blocks":
            return f"the fused C++ step computes blocks of {self._block_types()} as they are"
        if quantize is not None:
            return f"the fused C++ step computes in {needs.precision}, to which weights are rounded as they are loaded"
        expanded = ", to which the blocks are expanded" if self._format == GGUF else ""
        return f"the fused C++ step computes in {needs.precision}{expanded}"

    def _block_types(self) -> str:
        """The types that most matrices of the GGUF have."""
        tensors = read_pointer(self._folder / POINTER).tensors.values()
        kinds = Counter(each.kind for each in tensors if len(each.shape) > 1)
        return " and ".join(kind for kind, _ in kinds.most_common(2)) or "no type"

    def _transformers(self, dtype: str, device: str) -> Option:
        option = Option(
            engine=TRANSFORMERS, format=self._format, quantize=None, dtype=dtype, device=device, reason="unknown"
        )
        if self._format == GGUF:
            return replace(option, reason="transformers reads safetensors, and this model is a GGUF")
        if self._kind != "decoder":
            return replace(option, reason=f"--engine transformers is for decoders, and this is an {self._kind}")
        against = self._against_device(device)
        if against is not None:
            return replace(option, reason=against)
        settings = replace(self._settings, quantize=None, dtype=dtype, device=device, model_spec=None)
        try:
            no_row = NoRow("transformers does not know it", why="its own code")
            needs = transformers_estimate.estimate(settings, self._folder, no_row)
        except FunitelError as error:
            return replace(option, reason=error.message)
        slower = "" if self._against_native() else ", slower than native"
        return _judged(option, needs, f"transformers' own code computes it in {dtype}{slower}")

    def _llama_cpp(self, device: str) -> Option:
        option = Option(engine=LLAMA_CPP, format=GGUF, quantize="gguf", dtype=None, device=device, reason="unknown")
        if self._format != GGUF:
            reason = f"llama.cpp reads a GGUF, and this model is {self._format}: name one, such as owner/name:Q4_K_M"
            return replace(option, reason=reason)
        if device != "cpu":
            return replace(option, reason="--engine llama_cpp runs on a CPU only")
        if self._settings.num_shard > 1:
            return replace(option, reason="--engine llama_cpp runs on one shard, and in replicas")
        try:
            pointer = self._folder / POINTER
            found = llama_cpp_needs(part_paths(pointer, read_pointer(pointer))[0])
            needs = Needs(
                architecture=found.architecture,
                served_by="llama.cpp",
                precision="the GGUF's blocks",
                kv_precision="float16",
                context=found.context,
                weights=(found.weights,),
            )
            pools = [_TokenPools(self._settings.block_size, self._settings.block_size * found.a_token)]
            judged = _judged(
                option,
                with_memory(needs, replace(self._settings, device="cpu"), pools),
                f"llama.cpp computes the blocks as they are, where it knows the architecture {found.architecture}; "
                "no prefix caching, adapters or drafts",
            )
            check_extra("llama-cpp", "--engine llama_cpp")
        except MissingPackage as error:
            return replace(judged, usable=False, reason=error.message)
        except FunitelError as error:
            return replace(option, reason=error.message)
        return judged


@dataclass(frozen=True, slots=True)
class _TokenPools:
    """See PoolSizes: those of llama.cpp."""

    block_size: int
    bytes_per_block: int
    state_layout: None = None


def _judged(option: Option, needs: Needs, how: str) -> Option:
    """An option that can be served, if it fits."""
    pool = needs.pool // needs.block_size if needs.block_size else 0
    num_bytes = sum(needs.weights) + pool * sum(needs.blocks) + needs.state_slots * sum(needs.states)
    if needs.fits:
        return replace(option, usable=True, reason=how, bytes=num_bytes, fits=True)
    reason = f"does not fit: needs {size(sum(needs.weights))} for weights alone, {size(needs.free)} are free"
    return replace(option, reason=reason, bytes=num_bytes)


def format_of(folder: Path) -> str:
    """The format of a model's weights. Raises: `WeightsError`: there are none."""
    first = weight_files(folder)[0]
    return GGUF if first.name == POINTER else SAFETENSORS if first.suffix == ".safetensors" else PYTORCH
