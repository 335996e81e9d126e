"""The settings of one model: the server's, then its registration's, then those of the launch."""

from typing import Any

import pytest

from funitel.launcher.control_plane.model_settings import OWN_FIELDS, SERVER_FLAGS, settings_of
from funitel.launcher.control_plane.records import LaunchRequest, Registration
from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import InvalidRequest
from funitel.proto.settings.options import Counts

BASE = LauncherSettings(port=8080, max_batch_size=3, device="cpu")
VARIANTS = (
    {"model": "o/r", "format": "pytorch", "size": "1_8", "quantization": "none", "settings": {"revision": "v2"}},
    {"model": "o/g", "format": "gptq", "size": 7, "quantization": "Int4", "settings": {"quantize": "gptq"}},
)


def launched(registration: Registration | None = None, **fields: Any) -> LauncherSettings:
    return settings_of(BASE, LaunchRequest(**{"model": "m"} | fields), registration)


def refusal(registration: Registration | None = None, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        launched(registration, **fields)
    return refused.value


def test_the_launch_changes_what_the_server_has() -> None:
    settings = launched(
        name="mine",
        replicas=2,
        num_shard=4,
        quantize="int8",
        dtype="float16",
        settings={"max_batch_size": "8", "prefix_caching": "off", "default_stop": ["a"], "lora_adapters": "x=/x"},
    )
    assert (settings.model_id, settings.served_model_name, settings.num_replicas) == ("m", "mine", 2)
    assert (settings.num_shard, settings.quantize, settings.dtype) == (4, "int8", "float16")
    assert (settings.max_batch_size, settings.prefix_caching, settings.default_stop) == (8, False, ("a",))
    assert [each.name for each in settings.lora_adapters or ()] == ["x"]
    assert (settings.port, settings.device) == (8080, "cpu")


def test_a_registration_is_between_the_server_and_the_launch() -> None:
    registration = Registration(
        type="LLM",
        name="m",
        model="/models/m",
        settings={"max_batch_size": 5, "max_total_tokens": 99, "default_stop_token_ids": [2, 5]},
    )
    settings = launched(registration, settings={"max_batch_size": 7})
    assert (settings.model_id, settings.served_model_name) == ("/models/m", "m")
    assert (settings.max_batch_size, settings.max_total_tokens) == (7, 99)
    assert settings.default_stop_token_ids == Counts("2,5")
    files = {"model_spec": "/state/m.spec.json"}
    assert settings_of(BASE, LaunchRequest(model="m"), registration, files).model_spec == "/state/m.spec.json"


@pytest.mark.parametrize(
    ("variant", "model"),
    [
        ({}, "o/r"),
        ({"size": 1.8}, "o/r"),
        ({"size": "1.8", "quantization": None}, "o/r"),
        ({"format": "gptq"}, "o/g"),
        ({"size": "7", "quantization": "int4"}, "o/g"),
    ],
)
def test_a_variant_of_a_registration_is_chosen(variant: dict[str, Any], model: str) -> None:
    registration = Registration(type="LLM", name="m", model="o/r", variants=VARIANTS)
    settings = launched(registration, variant=variant)
    assert settings.model_id == model
    assert (settings.revision, settings.quantize) == (("v2", None) if model == "o/r" else (None, "gptq"))


def test_a_variant_that_is_not_there_is_refused_with_those_that_are() -> None:
    registration = Registration(type="LLM", name="m", model="o/r", variants=VARIANTS)
    error = refusal(registration, variant={"size": 70})
    assert error.message == (
        "m has no variant with size 70, it has: format pytorch, size 1_8, quantization none; "
        "format gptq, size 7, quantization Int4"
    )
    assert refusal(registration, model_type="embedding").param == "model_type"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"variant": {"size": 7}}, "model_size_in_billions"),
        ({"variant": {"format": "ggufv2"}}, "model_format"),
        ({"model": "/x.gguf", "variant": {"format": "pytorch"}}, "model_format"),
        ({"variant": {"quantization": "Int4"}}, "quantization"),
        ({"quantize": "better"}, "quantize"),
        ({"num_shard": 0}, "num_shard"),
        ({"settings": {"max_total_tokens": 5, "max_input_tokens": 9}}, "settings.max_input_tokens"),
        ({"settings": {"target_itl_ms": 5, "prefill_chunking": "false"}}, "settings.target_itl_ms"),
        ({"settings": {"max_batch_size": 0}}, "settings.max_batch_size"),
    ],
)
def test_what_cannot_be_names_its_field(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


def test_what_is_said_of_a_format_and_is_so_is_taken() -> None:
    assert launched(model="o/r:Q4_K_M", variant={"format": "ggufv2", "quantization": "Q4_K_M"}).model_id == "o/r:Q4_K_M"
    assert launched(quantize="awq", variant={"format": "awq", "quantization": "awq"}).quantize == "awq"


def test_a_value_of_tgis_is_taken_as_our_own_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "funitel"):
        assert launched(quantize="bitsandbytes").quantize == "int8"
        assert launched(quantize="marlin").quantize == "marlin"
    assert [message.split(":")[0] for message in caplog.messages] == [
        "--quantize bitsandbytes is taken as --quantize int8",
        "--quantize marlin is taken",
    ]
    assert "--quantize a16w4" in refusal(quantize="bitsandbytes-nf4").message


def test_flags_of_the_server_are_flags() -> None:
    later = {
        "wait_for_load",
        "state_dir",
        "database",
        "memory_budget",
        "control_socket",
        "engine",
        "partition",
        "layers",
    }
    assert (SERVER_FLAGS | OWN_FIELDS.keys()) - set(LauncherSettings.__dataclass_fields__) <= later
