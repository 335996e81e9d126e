"""What a checkpoint's configuration may say of its quantisation, and what `--quantize` may ask of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.quantized.config import BLOCKS, Quantization, check_flag
from funitel.model_server.quantized.published import find_quantization
from funitel.proto.errors import SettingsError, UnsupportedModel, WeightsError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def packed(bits: object = 4, strategy: str = "group", group_size: object = 32, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None} | more
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def found_in(folder: Path, **files: Any) -> Quantization | None:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return find_quantization(folder)


def test_a_float_checkpoint_says_nothing(tmp_path: Path) -> None:
    assert found_in(tmp_path) is None
    assert found_in(tmp_path, config={"quantization_config": None}) is None


def test_gptq_of_config_json(tmp_path: Path) -> None:
    found = found_in(tmp_path, config={"quantization_config": GPTQ})
    assert found == Quantization(method="gptq", bits=4, group_size=128, is_zero_exact=False)
    exact = found_in(tmp_path, config={"quantization_config": GPTQ | {"checkpoint_format": "gptq_v2"}})
    assert exact is not None
    assert exact.is_zero_exact


def test_the_file_of_older_quantisers_is_read_when_config_json_is_silent(tmp_path: Path) -> None:
    old = {"bits": 8, "group_size": -1, "damp_percent": 0.01}
    found = found_in(tmp_path, config={}, quantize_config=old)
    assert found is not None
    assert (found.method, found.bits, found.group_size) == ("gptq", 8, -1)
    found = found_in(tmp_path, config={"quantization_config": GPTQ}, quantize_config=old)
    assert found is not None
    assert found.bits == 4


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (packed(8, "channel", None), ("int8", "compressed-tensors")),
        (packed(4, "group", 32), ("q4", "compressed-tensors")),
        (packed(4, "group", 128), ("compressed-tensors",)),
    ],
)
def test_compressed_tensors(tmp_path: Path, key: str, config: dict[str, Any], flags: tuple[str, ...]) -> None:
    found = found_in(tmp_path, config={key: config})
    assert found is not None
    assert found.flags == flags


def test_awq_under_either_of_its_names_for_things(tmp_path: Path) -> None:
    expected = Quantization(method="awq", bits=4, group_size=128)
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    assert found_in(tmp_path, config={"quantization_config": config}) == expected
    assert found_in(tmp_path, config={}, quant_config={"w_bit": 4, "q_group_size": 128}) == expected


def float4(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, **changes}
    return packed() | {"format": "nvfp4-pack-quantized", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("files", "flags"),
    [
        ({"config": {"quantization_config": float4()}}, ("nvfp4", "compressed-tensors")),
        ({"config": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}}, ("nvfp4",)),
        ({"hf_quant_config": {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, "config": {}}, ("nvfp4",)),
    ],
)
def test_float4(tmp_path: Path, files: dict[str, Any], flags: tuple[str, ...]) -> None:
    found = found_in(tmp_path, **files)
    assert found is not None
    assert (found.flags, found.bits, found.group_size) == (flags, 4, 16)


def test_bytes_of_compressed_tensors_and_its_rounded_activations_which_stay_as_they_are(tmp_path: Path) -> None:
    config = packed(8, "channel", None, input_activations={"num_bits": 8, "dynamic": True})
    found = found_in(tmp_path, config={"quantization_config": config | {"format": "int-quantized"}})
    assert found is not None
    assert (found.flags, found.group_size) == (("int-quantized", "compressed-tensors"), -1)
    mixed = config["config_groups"]["group_0"] | {"format": "int-quantized"}
    config |= {"format": "mixed-precision", "config_groups": {"group_0": mixed}}
    assert found_in(tmp_path, config={"quantization_config": config}) == found


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("kind", ["dense", "sparse-24-bitmask", "sparse-bitmask"])
def test_sparse_weights_are_quantised_if_there_are_groups(kind: str, key: str, tmp_path: Path) -> None:
    given = packed() | {"sparsity_config": {"format": kind, "sparsity_structure": "2:4"}}
    assert found_in(tmp_path, config={key: given}) == found_in(tmp_path, config={key: packed()}) is not None
    for groups in ({"config_groups": {}}, {"config_groups": None}):
        assert found_in(tmp_path, config={key: given | groups}) is None
    del given["config_groups"]
    assert found_in(tmp_path, config={key: given}) is None


def test_modelopt_float8(tmp_path: Path) -> None:
    found = found_in(tmp_path, hf_quant_config={"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})
    assert found == Quantization(method="fp8", bits=8, group_size=-1)


def test_float8(tmp_path: Path) -> None:
    found = found_in(tmp_path, config={"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 64]}})
    assert found is not None
    assert (found.flags, found.group_size, found.group_outputs) == (("fp8",), 64, 128)
    found = found_in(tmp_path, config={"quantization_config": {"quant_method": "fbgemm_fp8"}})
    assert found is not None
    assert (found.flags, found.group_size) == (("fp8",), -1)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"quantization_config": {"quant_method": "exl2"}}}, "quant_method 'exl2' is not supported"),
        ({"config": {"quantization_config": {"quant_method": "awq", "bits": 8}}}, "bits 8 .* with awq; supported: 4$"),
        ({"quant_config": {"w_bit": 4, "q_group_size": 128, "version": "gemv"}}, "version 'gemv' .*; supported: gemm$"),
        (
            {"config": {"quantization_config": {"quant_method": "awq", "bits": 4, "zero_point": False}}},
            "zero_point False is not supported with awq; supported: True$",
        ),
        ({"config": {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}}, "fmt 'e5m2' .*: e4m3, "),
        ({"config": {"quantization_config": GPTQ | {"bits": 3}}}, "bits 3 .* with gptq; supported: 2, 4, 8$"),
        ({"config": {"quantization_config": GPTQ | {"bits": True}}}, "bits True is not supported with gptq"),
        ({"config": {"quantization_config": GPTQ | {"checkpoint_format": "marlin"}}}, "checkpoint_format 'marlin' "),
        (
            {"config": {"quantization_config": GPTQ | {"dynamic": {r"+:.*\.down_proj": {"bits": 8}}}}},
            "dynamic .* has {'bits': 8}, which is not supported; supported: .*'bits': 4.* in all layers$",
        ),
        (
            {"config": {"quantization_config": packed() | {"format": "mxfp4-pack-quantized"}}},
            "format 'mxfp4-pack-quantized' .*; supported: pack-quantized, int-quantized, .*nvfp4-pack-quantized$",
        ),
        ({"config": {"quantization_config": packed() | {"format": "float-quantized"}}}, "type 'int' .*: float$"),
        ({"config": {"quantization_config": packed(6)}}, "num_bits 6 is not supported .*; supported: 4, 8$"),
        ({"config": {"quantization_config": packed(strategy="tensor")}}, "strategy 'tensor' .*: group, channel$"),
        (
            {"config": {"quantization_config": packed() | {"sparsity_config": {"format": "sparse-8-16"}}}},
            "sparsity_config.format 'sparse-8-16' .*; supported: dense, sparse-24-bitmask, sparse-bitmask$",
        ),
        (
            {"config": {"quantization_config": packed() | {"transform_config": {"config_groups": {"u": {}}}}}},
            "transform_config with rotations",
        ),
        (
            {"config": {"quantization_config": float4(group_size=32)}},
            "group_size 32 is not supported with compressed-tensors; supported: 16$",
        ),
        (
            {"config": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}}},
            "quant_algo 'W4A8_AWQ' is not supported with modelopt; supported: FP8, NVFP4$",
        ),
        (
            {"hf_quant_config": {"quantization": {"quant_algo": "NVFP4", "group_size": 32}}},
            "hf_quant_config.json: group_size 32 is not supported with nvfp4; supported: 16$",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as caught:
        found_in(tmp_path, **files)
    assert caught.value.message.startswith(
        ("quantization_config of config.json: ", *(f"{name}.json: " for name in files))
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("gptq", "quantization_config of config.json must be an object, found 'gptq'"),
        (GPTQ | {"group_size": 0}, "quantization_config of config.json: group_size must be -1 or > 0, found 0"),
        (GPTQ | {"group_size": "128"}, "group_size must be an integer, found '128'"),
        (packed(group_size=None), "group_size must be an integer, found None"),
        (packed() | {"config_groups": {}}, "config_groups must be an object of groups"),
        (packed(weights=None), "weights of a config group must be an object"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two integers > 0"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size must be two integers > 0"),
        (GPTQ | {"dynamic": 3}, "quantization_config of config.json has a value of the wrong kind"),
    ],
)
def test_nonsense_is_named(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        found_in(tmp_path, config={"quantization_config": config})


def test_groups_that_differ_are_refused(tmp_path: Path) -> None:
    config = packed()
    config["config_groups"]["group_1"] = packed(8)["config_groups"]["group_0"]
    with pytest.raises(UnsupportedModel, match="config_groups with different bits"):
        found_in(tmp_path, config={"quantization_config": config})


def test_the_flag_must_fit_the_checkpoint() -> None:
    gptq = Quantization(method="gptq", bits=4, group_size=128)
    int8 = Quantization(method="compressed-tensors", bits=8, group_size=-1)
    for asked, found in ((None, None), (None, gptq), ("gptq", gptq), ("int8", int8), ("compressed-tensors", int8)):
        check_flag(asked, found)
    for found in (gptq, int8):
        check_flag("marlin", found)
    with pytest.raises(SettingsError, match="--quantize marlin: .* those of this checkpoint are not; --quantize int8"):
        check_flag("marlin", None)
    with pytest.raises(SettingsError, match="--quantize gguf: blocks of a GGUF .* on a CPU only"):
        check_flag("gguf", None)
    with pytest.raises(SettingsError, match="--quantize gptq: the weights of this checkpoint are not quantised"):
        check_flag("gptq", None)
    with pytest.raises(SettingsError, match=r"--quantize int8: this checkpoint is quantised as gptq \(4 bits\)"):
        check_flag("int8", gptq)
    with pytest.raises(SettingsError, match=r"--quantize gptq: this checkpoint is quantised as int8 \(8 bits\)"):
        check_flag("gptq", int8)
    blocks = Quantization(method=BLOCKS, bits=0, group_size=-1, formats=(("", "q3h_b64t1"),))
    with pytest.raises(SettingsError, match=r"--quantize q4: this checkpoint is quantised as q3h_b64t1; leave the"):
        check_flag("q4", blocks)
