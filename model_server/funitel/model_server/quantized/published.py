"""Read the quantisation of a checkpoint off its configuration, as each project that publishes checkpoints writes it.

Knows the configuration only; the storages of `checkpoint` know how the numbers lie in the files. No torch here.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from funitel.model_server.files.integrity import read_json
from funitel.model_server.quantized.config import (
    AWQ,
    BLOCKS,
    COMPRESSED,
    FP8,
    GPTQ,
    INT_QUANTIZED,
    MARLIN_24,
    NVFP4,
    Quantization,
)
from funitel.model_server.settings.block_names import BLOCK_FORMATS
from funitel.proto.errors import UnsupportedModel, WeightsError

Config = Mapping[str, Any]
_Allowed = TypeVar("_Allowed", int, str)

MXFP4 = "mxfp4"  # of stacks of experts, which their tensors describe; they are floating point once loaded
_MODELOPT = ("modelopt", "modelopt_fp4")
_FLOAT8_METHODS = (FP8, "fbgemm_fp8")
_METHODS = (GPTQ, AWQ, BLOCKS, COMPRESSED, *_FLOAT8_METHODS, MXFP4, *_MODELOPT)
_MODELOPT_FILE = "hf_quant_config.json"
_GPTQ_BITS = (2, 4, 8)  # widths of which a 32-bit word holds a whole number
_FLOAT4_GROUP = 16
_SPARSITIES = ("dense", "sparse-24-bitmask", "sparse-bitmask")


def find_quantization(folder: Path) -> Quantization | None:
    """Read what a checkpoint folder says of its quantisation; None when it says nothing, MXFP4, or sparse floats.

    Source: contract reference 4.4 and 9.9: `quantization_config` or `compression_config` of config.json, else the
    files that older quantisers and ModelOpt wrote.

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
            method = AWQ if "w_bit" in found else GPTQ
            return _parse({"quant_method": method} | found, name)
    if found := _read_if_present(folder / _MODELOPT_FILE):
        given = found.get("quantization")
        return _parse({"quant_method": _MODELOPT[0], **given} if isinstance(given, Mapping) else given, _MODELOPT_FILE)
    return None


def parse_gptq(config: Config) -> Quantization:
    """GPTQ tensors as their configuration describes them.

    Raises:
        UnsupportedModel: a number of bits, a group size or a format that cannot be read.
        WeightsError: a field that makes no sense.
    """
    bits = _one_of("bits", config.get("bits"), GPTQ, _GPTQ_BITS)
    version = _one_of("checkpoint_format", config.get("checkpoint_format") or "gptq", GPTQ, ("gptq", "gptq_v2"))
    sizes = {"bits": bits, "group_size": config.get("group_size")}
    for pattern, changes in (config.get("dynamic") or {}).items():
        differing = {key: changes[key] for key in sizes.keys() & changes.keys() if changes[key] != sizes[key]}
        if differing and not pattern.startswith("-:"):
            raise UnsupportedModel(
                f"dynamic {pattern!r} has {differing}, which is not supported; supported: {sizes} in all layers"
            )
    return Quantization(
        method=GPTQ,
        bits=bits,
        group_size=_group_size(config.get("group_size")),
        is_zero_exact=version == "gptq_v2",
    )


def _parse(config: object, where: str) -> Quantization | None:
    if not isinstance(config, Mapping):
        raise WeightsError(f"{where} must be an object, found {config!r}")
    method = config.get("quant_method")
    try:
        if method == MXFP4:
            return None
        return _parser(method)(config)
    except WeightsError as error:
        raise WeightsError(f"{where}: {error.message}") from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{where}: {error.message}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise WeightsError(f"{where} has a value of the wrong kind: {error}") from error


def _parser(method: object) -> Callable[[Config], Quantization | None]:
    for methods, parse in (
        ((GPTQ,), parse_gptq),
        ((AWQ,), _parse_awq),
        ((BLOCKS,), _parse_blocks),
        ((COMPRESSED,), _parse_compressed),
        (_FLOAT8_METHODS, _parse_float8),
        (_MODELOPT, _parse_modelopt),
    ):
        if method in methods:
            return parse
    raise UnsupportedModel(f"quant_method {method!r} is not supported; supported: {', '.join(_METHODS)}")


def _parse_awq(config: Config) -> Quantization:
    """AutoAWQ's names, or those of the project it comes from."""
    bits = _one_of("bits", config.get("bits", config.get("w_bit")), AWQ, (4,))
    _one_of("version", str(config.get("version", "gemm")).lower(), AWQ, ("gemm",))
    if config.get("zero_point") is False:
        raise UnsupportedModel("zero_point False is not supported with awq; supported: True")
    size = config.get("group_size", config.get("q_group_size"))
    return Quantization(method=AWQ, bits=bits, group_size=_group_size(size))


def _parse_blocks(config: Config) -> Quantization:
    """Blocks that `funitel quantize --to` wrote: a format, and those of layers that have another."""
    others = config.get("tensors") or {}
    if not isinstance(others, Mapping):
        raise WeightsError(f"tensors must be an object, found {others!r}")
    formats = {"": config.get("format")} | dict(others)
    for name in formats.values():
        _one_of("format", name, BLOCKS, BLOCK_FORMATS)
    return Quantization(method=BLOCKS, bits=0, group_size=0, formats=tuple(formats.items()))


def _parse_float8(config: Config) -> Quantization:
    """Float8 weights with a scale for all of a matrix, for each output, or for each block of it.

    Scales of activations, where there are some, are not used: activations have the precision of --dtype.
    """
    _one_of("fmt", config.get("fmt", "e4m3"), FP8, ("e4m3", "float8_e4m3fn"))
    block = config.get("weight_block_size")
    if block is None:
        return Quantization(method=FP8, bits=8, group_size=-1)
    return _in_blocks("weight_block_size", block, is_compressed=False)


def _parse_modelopt(config: Config) -> Quantization:
    """ModelOpt's two kinds of floats; what it says of caches and activations is not used."""
    kind = _one_of("quant_algo", config.get("quant_algo"), "modelopt", ("FP8", "NVFP4"))
    if kind == "FP8":
        return Quantization(method=FP8, bits=8, group_size=-1)
    groups = config.get("config_groups")
    sizes = {_weights_of(group).get("group_size") for group in _groups(groups)} if groups else {_FLOAT4_GROUP}
    for size in sizes | {config.get("group_size", _FLOAT4_GROUP)}:
        _one_of("group_size", size, NVFP4, (_FLOAT4_GROUP,))
    return Quantization(method=NVFP4, bits=4, group_size=_FLOAT4_GROUP)


def _in_blocks(field: str, block: object, *, is_compressed: bool) -> Quantization:
    if not isinstance(block, list) or len(block) != 2:
        raise WeightsError(f"{field} must be two integers > 0, found {block!r}")
    outputs, inputs = (_integer(field, size) for size in block)
    if outputs < 1 or inputs < 1:
        raise WeightsError(f"{field} must be two integers > 0, found {block!r}")
    return Quantization(method=FP8, bits=8, group_size=inputs, group_outputs=outputs, is_compressed=is_compressed)


def _parse_compressed(config: Config) -> Quantization | None:
    """Weights of a compressed-tensors configuration; every group must store them alike. None: they are sparse only.

    Scales of activations are not used, nor are these rounded: they have the precision of --dtype. Which tensors are
    sparse shows in their names.
    """
    sparsity = (config.get("sparsity_config") or {}).get("format")
    _one_of("sparsity_config.format", sparsity or "dense", COMPRESSED, _SPARSITIES)
    if (config.get("transform_config") or {}).get("config_groups"):
        raise UnsupportedModel("transform_config with rotations of weights is not supported; supported: none")
    if sparsity and config.get("config_groups") in (None, {}):
        return None
    found = set()
    for group in _groups(config.get("config_groups")):
        kind = _one_of("format", group.get("format") or config.get("format"), COMPRESSED, tuple(_FORMATS))
        found.add(_FORMATS[kind](_weights_of(group)))
    if len(found) > 1:
        raise UnsupportedModel(
            "config_groups with different bits, group sizes or formats are not supported; supported: all groups alike"
        )
    return found.pop()


def _groups(groups: object) -> list[Config]:
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(g, Mapping) for g in groups.values()):
        raise WeightsError(f"config_groups must be an object of groups, found {groups!r}")
    return list(groups.values())


def _weights_of(group: Config) -> Config:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise WeightsError(f"weights of a config group must be an object, found {weights!r}")
    return weights


def _packed(weights: Config) -> Quantization:
    """Integers in words."""
    return _integers(weights, COMPRESSED, (4, 8), ("group", "channel"))


def _unpacked(weights: Config) -> Quantization:
    """Integers, a byte each."""
    return _integers(weights, INT_QUANTIZED, (8,), ("group", "channel", "tensor"))


def _marlin_24(weights: Config) -> Quantization:
    """Integers of 2:4 sparse matrices in tiles, as their writer makes them."""
    if weights.get("symmetric") is False:
        raise UnsupportedModel(f"symmetric False is not supported with {MARLIN_24}; supported: True")
    found = _integers(weights, MARLIN_24, (4, 8), ("group", "channel"))
    _one_of("group_size", found.group_size, MARLIN_24, (-1, 128))
    return found


def _integers(weights: Config, method: str, widths: tuple[int, ...], strategies: tuple[str, ...]) -> Quantization:
    _one_of("type", weights.get("type"), COMPRESSED, ("int",))
    bits = _one_of("num_bits", weights.get("num_bits"), COMPRESSED, widths)
    strategy = _one_of("strategy", weights.get("strategy"), COMPRESSED, strategies)
    return Quantization(
        method=method,
        bits=bits,
        group_size=_group_size(weights.get("group_size")) if strategy == "group" else -1,
        is_compressed=method != COMPRESSED,
    )


def _float8(weights: Config) -> Quantization:
    _one_of("type", weights.get("type"), COMPRESSED, ("float",))
    _one_of("num_bits", weights.get("num_bits"), COMPRESSED, (8,))
    if _one_of("strategy", weights.get("strategy"), COMPRESSED, ("tensor", "channel", "block")) == "block":
        return _in_blocks("block_structure", weights.get("block_structure"), is_compressed=True)
    return Quantization(method=FP8, bits=8, group_size=-1, is_compressed=True)


def _float4(weights: Config) -> Quantization:
    _one_of("type", weights.get("type"), COMPRESSED, ("float",))
    _one_of("num_bits", weights.get("num_bits"), COMPRESSED, (4,))
    _one_of("strategy", weights.get("strategy"), COMPRESSED, ("tensor_group",))
    _one_of("group_size", weights.get("group_size"), COMPRESSED, (_FLOAT4_GROUP,))
    return Quantization(method=NVFP4, bits=4, group_size=_FLOAT4_GROUP, is_compressed=True)


_FORMATS: Mapping[str, Callable[[Config], Quantization]] = {
    "pack-quantized": _packed,
    "int-quantized": _unpacked,
    "float-quantized": _float8,
    "naive-quantized": _float8,
    "marlin-24": _marlin_24,
    "nvfp4-pack-quantized": _float4,
}


def _one_of(field: str, value: Any, method: str, allowed: tuple[_Allowed, ...]) -> _Allowed:
    found = next((each for each in allowed if each == value and not isinstance(value, bool)), None)
    if found is None:
        listed = ", ".join(map(str, allowed))
        raise UnsupportedModel(f"{field} {value!r} is not supported with {method}; supported: {listed}")
    return found


def _group_size(value: object) -> int:
    size = _integer("group_size", value)
    if size != -1 and size < 1:
        raise WeightsError(f"group_size must be -1 or > 0, found {size}")
    return size


def _integer(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WeightsError(f"{name} must be an integer, found {value!r}")
    return value


def _read_if_present(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
