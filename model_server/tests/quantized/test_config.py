"""What a checkpoint's configuration may say of its quantisation, and what `--quantize` may ask of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.quantized.config import Quantization, check_flag, find_quantization
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
        ({"config": {"quantization_config": {"quant_method": "awq", "bits": 8}}}, "awq with 8 bits"),
        ({"quant_config": {"w_bit": 4, "q_group_size": 128, "version": "gemv"}}, "awq with version 'gemv'"),
        ({"config": {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}}, "fp8 with fmt 'e5m2'"),
        ({"config": {"quantization_config": GPTQ | {"bits": 3}}}, "3 bits is not supported; supported: 2, 4, 8"),
        ({"config": {"quantization_config": GPTQ | {"checkpoint_format": "marlin"}}}, "'marlin' is not supported"),
        (
            {"config": {"quantization_config": packed() | {"format": "nvfp4-pack-quantized"}}},
            "supported: pack-quantized",
        ),
        ({"config": {"quantization_config": packed() | {"format": "float-quantized"}}}, "4-bit int weights as floats"),
        ({"config": {"quantization_config": packed(6)}}, "6-bit int weights"),
        ({"config": {"quantization_config": packed(strategy="tensor")}}, "one scale a tensor"),
        ({"config": {"quantization_config": packed(input_activations={"num_bits": 8})}}, "quantised activations"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        found_in(tmp_path, **files)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("gptq", "quantization_config of config.json must be an object, found 'gptq'"),
        (GPTQ | {"group_size": 0}, "quantization_config of config.json: group_size must be -1 or > 0, found 0"),
        (GPTQ | {"group_size": "128"}, "group_size must be an integer, found '128'"),
        (packed(group_size=None), "group_size must be an integer, found None"),
        (packed() | {"config_groups": {}}, "config_groups must be an object of groups"),
        (packed(weights=None), "weights of a config group must be an object"),
    ],
)
def test_nonsense_is_named(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        found_in(tmp_path, config={"quantization_config": config})


def test_groups_that_differ_are_refused(tmp_path: Path) -> None:
    config = packed()
    config["config_groups"]["group_1"] = packed(8)["config_groups"]["group_0"]
    with pytest.raises(UnsupportedModel, match="different bits or sizes"):
        found_in(tmp_path, config={"quantization_config": config})


def test_the_flag_must_fit_the_checkpoint() -> None:
    gptq = Quantization.gptq(4, 128)
    int8 = Quantization(method="compressed-tensors", bits=8, group_size=-1)
    for asked, found in ((None, None), (None, gptq), ("gptq", gptq), ("int8", int8), ("compressed-tensors", int8)):
        check_flag(asked, found)
    with pytest.raises(SettingsError, match="--quantize gguf: blocks of a GGUF .* on a CPU only"):
        check_flag("gguf", None)
    with pytest.raises(SettingsError, match="--quantize gptq: the weights of this checkpoint are not quantised"):
        check_flag("gptq", None)
    with pytest.raises(SettingsError, match=r"--quantize int8: this checkpoint is quantised as gptq \(4 bits\)"):
        check_flag("int8", gptq)
    with pytest.raises(SettingsError, match=r"--quantize gptq: this checkpoint is quantised as int8 \(8 bits\)"):
        check_flag("gptq", int8)
