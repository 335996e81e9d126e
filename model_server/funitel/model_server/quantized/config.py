"""Read the quantisation config of a checkpoint, and check it against `--quantize`.

Knows the configuration only; `storage` knows how the numbers lie in the files. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funitel.model_server.files.integrity import read_json
from funitel.proto.errors import SettingsError, UnsupportedModel, WeightsError

GPTQ, AWQ, COMPRESSED, FP8 = "gptq", "awq", "compressed-tensors", "fp8"
MXFP4 = "mxfp4"  # of stacks of experts, which their tensors describe; they are floating point once loaded
Q4_GROUP = 32
_GPTQ_BITS = (2, 4, 8)  # widths of which a 32-bit word holds a whole number
_PACKED_BITS = (4, 8)
_FLOAT8_METHODS = (FP8, "fbgemm_fp8")
_FLOAT8_FORMATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Quantised linear layers: `bits` each weight, one scale for each `group_size` inputs of an output (-1: for all).

    `is_zero_exact`: zero points are stored as they are; else one too small, as GPTQ files do unless they say `gptq_v2`.
    `group_outputs` is how many outputs share the scales of their groups. `is_compressed` says that float8 weights are
    described as compressed-tensors does.
    """

    method: str
    bits: int
    group_size: int
    is_zero_exact: bool = True
    group_outputs: int = 1
    is_compressed: bool = False

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Memory of a matrix kept as it is: integers, and scales of two bytes."""
        num_groups = 1 if self.group_size == -1 else -(-num_inputs // self.group_size)
        return num_outputs * (num_inputs * self.bits // 8 + num_groups * 2)

    @property
    def flags(self) -> tuple[str, ...]:
        """The values of `--quantize` that fit, the most telling one first."""
        if self.method == COMPRESSED and (self.bits, self.group_size) == (8, -1):
            return ("int8", COMPRESSED)
        if self.method == COMPRESSED and (self.bits, self.group_size) == (4, Q4_GROUP):
            return ("q4", COMPRESSED)
        return (self.method, COMPRESSED) if self.is_compressed else (self.method,)

    @classmethod
    def gptq(cls, bits: object, group_size: object, checkpoint_format: object = "gptq") -> "Quantization":
        """GPTQ tensors as their configuration describes them.

        Raises:
            UnsupportedModel: a number of bits, a group size or a format that cannot be read.
        """
        if bits not in _GPTQ_BITS:
            raise UnsupportedModel(f"gptq with {bits} bits is not supported; supported: {_listed(_GPTQ_BITS)}")
        if checkpoint_format not in (None, "gptq", "gptq_v2"):
            raise UnsupportedModel(
                f"gptq with checkpoint_format {checkpoint_format!r} is not supported; supported: gptq, gptq_v2"
            )
        return cls(
            method=GPTQ,
            bits=_integer("bits", bits),
            group_size=_group_size(group_size),
            is_zero_exact=checkpoint_format == "gptq_v2",
        )


def find_quantization(folder: Path) -> Quantization | None:
    """Read what a checkpoint folder says of its quantisation; None when it says nothing, or MXFP4.

    Source: contract reference 4.4 and 9.9: `quantization_config` or `compression_config` of config.json, else the
    files that older quantisers wrote.

    Raises:
        UnsupportedModel: a method or a variant of one that cannot be read.
        WeightsError: a configuration that makes no sense.
    """
    config = _read_if_present(folder / "config.json")
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            return _parse(config[key], f"{key} of config.json")
    for name in ("quantize_config.json", "quant_config.json"):
        if found := _read_if_present(folder / name):
            method = "awq" if "w_bit" in found else GPTQ
            return _parse({"quant_method": method} | found, name)
    return None


def check_flag(asked: str | None, found: Quantization | None) -> None:
    """Refuse a `--quantize` that the checkpoint does not fulfil.

    Raises: `SettingsError`.
    """
    if asked is None or (found is not None and asked in found.flags):
        return
    if asked == "gguf":
        raise SettingsError("--quantize gguf: blocks of a GGUF are kept as they are on a CPU only; give --device cpu")
    if found is None:
        raise SettingsError(
            f"--quantize {asked}: the weights of this checkpoint are not quantised; "
            f"funitel-server quantize MODEL_ID OUTPUT_DIR makes a checkpoint that is"
        )
    raise SettingsError(
        f"--quantize {asked}: this checkpoint is quantised as {found.flags[0]} ({found.bits} bits); leave the flag out"
    )


def _parse(config: object, where: str) -> Quantization | None:
    if not isinstance(config, Mapping):
        raise WeightsError(f"{where} must be an object, found {config!r}")
    method = config.get("quant_method")
    if method == MXFP4:
        return None
    try:
        if method == GPTQ:
            return Quantization.gptq(config.get("bits"), config.get("group_size"), config.get("checkpoint_format"))
        if method == COMPRESSED:
            return _parse_compressed(config)
        if method == AWQ:
            return _parse_awq(config)
        if method in _FLOAT8_METHODS:
            return _parse_float8(config)
    except WeightsError as error:
        raise WeightsError(f"{where}: {error.message}") from error
    supported = ", ".join((GPTQ, AWQ, COMPRESSED, *_FLOAT8_METHODS, MXFP4))
    raise UnsupportedModel(f"{where}: quant_method {method!r} is not supported; supported: {supported}")


def _parse_awq(config: Mapping[str, Any]) -> Quantization:
    """AutoAWQ's names, or those of the project it comes from."""
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise UnsupportedModel(f"awq with {bits} bits is not supported; supported: 4")
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise UnsupportedModel(f"awq with version {config.get('version')!r} is not supported; supported: gemm")
    return Quantization(
        method=AWQ, bits=4, group_size=_group_size(config.get("group_size", config.get("q_group_size")))
    )


def _parse_float8(config: Mapping[str, Any]) -> Quantization:
    """Float8 weights with a scale for all of a matrix, for each output, or for each block of it.

    Scales of activations, where there are some, are not used: activations have the precision of --dtype.
    """
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModel(f"fp8 with fmt {config.get('fmt')!r} is not supported; supported: e4m3")
    block = config.get("weight_block_size")
    if block is None:
        return Quantization(method=FP8, bits=8, group_size=-1)
    return _in_blocks(block, is_compressed=False)


def _in_blocks(block: object, *, is_compressed: bool) -> Quantization:
    if not isinstance(block, list) or len(block) != 2:
        raise WeightsError(f"the size of a block must be two integers, found {block!r}")
    outputs, inputs = (_integer("the size of a block", size) for size in block)
    if outputs < 1 or inputs < 1:
        raise WeightsError(f"the size of a block must be two integers > 0, found {block!r}")
    return Quantization(method=FP8, bits=8, group_size=inputs, group_outputs=outputs, is_compressed=is_compressed)


def _parse_compressed(config: Mapping[str, Any]) -> Quantization:
    """Weights of a compressed-tensors configuration; every group must store them alike."""
    parse_group = _float8_group if config.get("format") in _FLOAT8_FORMATS else _packed_group
    if parse_group is _packed_group and config.get("format") != "pack-quantized":
        supported = ", ".join(("pack-quantized", *_FLOAT8_FORMATS))
        raise UnsupportedModel(
            f"compressed-tensors with format {config.get('format')!r} is not supported; supported: {supported}"
        )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(g, Mapping) for g in groups.values()):
        raise WeightsError(f"config_groups must be an object of groups, found {groups!r}")
    found = {parse_group(group) for group in groups.values()}
    if len(found) > 1:
        raise UnsupportedModel("compressed-tensors with groups of different bits or sizes is not supported")
    return found.pop()


def _weights_of(group: Mapping[str, Any]) -> Mapping[str, Any]:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise WeightsError(f"weights of a config group must be an object, found {weights!r}")
    return weights


def _float8_group(group: Mapping[str, Any]) -> Quantization:
    weights = _weights_of(group)
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if kind != "float" or bits != 8:
        raise UnsupportedModel(f"compressed-tensors with {bits}-bit {kind} weights as floats is not supported: 8 bits")
    if strategy == "block":
        return _in_blocks(weights.get("block_structure"), is_compressed=True)
    if strategy not in ("tensor", "channel"):
        raise UnsupportedModel(
            f"compressed-tensors with one float8 scale a {strategy} is not supported: tensor, channel, block"
        )
    return Quantization(method=FP8, bits=8, group_size=-1, is_compressed=True)


def _packed_group(group: Mapping[str, Any]) -> Quantization:
    weights = _weights_of(group)
    if group.get("input_activations") is not None:
        raise UnsupportedModel("compressed-tensors with quantised activations is not supported")
    bits, kind = weights.get("num_bits"), weights.get("type")
    if kind != "int" or bits not in _PACKED_BITS:
        raise UnsupportedModel(
            f"compressed-tensors with {bits}-bit {kind} weights is not supported; "
            f"supported: int of {_listed(_PACKED_BITS)} bits"
        )
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise UnsupportedModel(f"compressed-tensors with one scale a {strategy} is not supported: group, channel")
    return Quantization(
        method=COMPRESSED,
        bits=_integer("num_bits", bits),
        group_size=_group_size(weights.get("group_size")) if strategy == "group" else -1,
    )


def _group_size(value: object) -> int:
    size = _integer("group_size", value)
    if size != -1 and size < 1:
        raise WeightsError(f"group_size must be -1 or > 0, found {size}")
    return size


def _integer(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WeightsError(f"{name} must be an integer, found {value!r}")
    return value


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _read_if_present(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
