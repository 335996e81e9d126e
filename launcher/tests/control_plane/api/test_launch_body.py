"""Bodies of launches, ours and Xinference's: what they become, and the field that an error names."""

from typing import Any

import pytest

from funitel.launcher.control_plane.api.launch_body import launch_of
from funitel.launcher.control_plane.records import LaunchRequest
from funitel.proto.errors import InvalidRequest

PEFT = "peft_model_config"
NOTHING = {  # what the client of Xinference sends where its user says nothing
    "model_uid": None,
    "model_engine": None,
    "peft_model_config": None,
    "model_type": "LLM",
    "model_size_in_billions": None,
    "model_format": None,
    "quantization": None,
    "replica": 1,
    "n_worker": 1,
    "n_gpu": "auto",
    "request_limits": None,
    "worker_ip": None,
    "gpu_idx": None,
    "model_path": None,
    "enable_virtual_env": None,
    "virtual_env_packages": None,
    "envs": None,
}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "smol"}, {}),
        ({"model": "smol", "name": None, "ttl": None, "settings": None}, {}),
        ({"model": "smol", "layers": "3,4"}, {"layers": "3,4"}),
        ({"model": "smol", "settings": {"max_batch_size": 4, "numa": True, "dtype": None}}, None),
        ({"model": "smol", "settings": {"cuda_graphs": [1, 2]}}, {"settings": {"cuda_graphs": [1, 2]}}),
    ],
)
def test_ours(body: dict[str, Any], expected: dict[str, Any] | None) -> None:
    if expected is None:
        with pytest.raises(InvalidRequest, match="`settings.dtype` is no further setting: give it as `dtype`"):
            launch_of(body)
    else:
        assert launch_of(body) == LaunchRequest(**{"model": "smol"} | expected)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smol", "smol"),
        ("owner/repo", "owner/repo"),
        ("owner/repo:Q4_K_M", "owner/repo:Q4_K_M"),
        ("/models/tiny", "tiny"),
        ("/models/tiny/", "tiny"),
        ("/models/x.gguf", "x.gguf"),
        ("~/tiny", "tiny"),
    ],
)
def test_the_name_of_a_model_that_is_given_none(model: str, name: str) -> None:
    assert launch_of({"model": model}).served_name == name


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "model", "must be given"),
        ({"model": None}, "model", "must be given"),
        ({"model": 1}, "model", "must be a string"),
        ({"model": " "}, "model", "not empty"),
        ({"model": "x\n"}, "model", "print"),
        ({"model": "x", "name": ""}, "name", "not empty"),
        ({"model": "x", "name": "tgi"}, "name", "the default model"),
        ({"model": "x", "name": "instances"}, "name", "a path of the API"),
        ({"model": "x", "name": "a,b"}, "name", "without a comma"),
        ({"model": "x", "name": "a" * 201}, "name", "at most 200 characters"),
        ({"model": "x", "name": "a/../b"}, "name", ".."),
        ({"model": "x", "replicas": 0}, "replicas", "1..1024"),
        ({"model": "x", "replicas": True}, "replicas", "whole number"),
        ({"model": "x", "replicas": "2"}, "replicas", "whole number"),
        ({"model": "x", "num_shard": 1.5}, "num_shard", "whole number"),
        ({"model": "x", "ttl": 0}, "ttl", "> 0"),
        ({"model": "x", "ttl": float("nan")}, "ttl", "> 0"),
        ({"model": "x", "ttl": 10**400}, "ttl", "> 0"),
        ({"model": "x", "pinned": 1}, "pinned", "true or false"),
        ({"model": "x", "engine": "vllm"}, "engine", "native, transformers, llama_cpp"),
        ({"model": "x", "executor": "k8s"}, "executor", "local, worker, ray"),
        ({"model": "x", "executor": "local", "worker": "w"}, "worker", "leave one out"),
        ({"model": "x", "layers": [1, "2"]}, "layers", "whole numbers"),
        ({"model": "x", "weight": -1}, "weight", "> 0"),
        ({"model": "x", "retries": -1}, "retries", "0..1000"),
        ({"model": "x", "model_type": "image"}, "model_type", "LLM, embedding, rerank"),
        ({"model": "x", "settings": []}, "settings", "an object"),
        ({"model": "x", "replica": 2}, "replica", "did you mean replicas?"),
        ({"model": "x", "colour": 2}, "colour", "unknown field"),
        ({"model": "x", "settings": {"port": 80}}, "settings.port", "a setting of the server"),
        ({"model": "x", "settings": {"api_key": "x"}}, "settings.api_key", "a setting of the server"),
        ({"model": "x", "settings": {"max_batch_siz": 8}}, "settings.max_batch_siz", "did you mean max_batch_size?"),
        ({"model": "x", "settings": {"max_batch_size": "x"}}, "settings.max_batch_size", "not a valid integer"),
        ({"model": "x", "settings": {"max_batch_size": True}}, "settings.max_batch_size", "true is not a value"),
        ({"model": "x", "settings": {"max_batch_size": {}}}, "settings.max_batch_size", "a text, a number"),
        ({"model": "x", "settings": {"numa": "perhaps"}}, "settings.numa", "true, 1, yes"),
        ({"model": "x", "settings": {"attention": "best"}}, "settings.attention", "is not one of"),
        ({"model": "x", "settings": {"lora_adapters": ","}}, "settings.lora_adapters", "settings.lora_adapters"),
        ({"model": "x", "settings": {"device": None}}, "settings.device", "must not be null"),
    ],
)
def test_an_error_of_ours_names_the_field(body: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        launch_of(body)
    assert refused.value.param == field
    assert words in refused.value.message
    assert field in refused.value.message
    assert "\n" not in refused.value.message


# Xinference's


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        (NOTHING, {"model_type": "LLM"}),
        ({"model_uid": "mine", "replica": 2, "request_limits": 4}, {"name": "mine", "replicas": 2, "request_limit": 4}),
        ({"model_engine": "Transformers"}, {"engine": "transformers"}),
        ({"model_engine": "llama.cpp"}, {"engine": "llama_cpp"}),
        ({"model_path": "/m/tiny"}, {"model": "/m/tiny", "name": "smol"}),
        ({"model_path": "/m/tiny", "model_uid": "u"}, {"model": "/m/tiny", "name": "u"}),
        ({"n_gpu": 2}, {"num_shard": 2, "settings": {"device": "cuda"}}),
        ({"n_gpu": 0}, {"settings": {"device": "cpu"}}),
        ({"worker_ip": "10.0.0.2"}, {"worker": "10.0.0.2"}),
        ({"model_format": "awq"}, {"quantize": "awq", "variant": {"format": "awq"}}),
        ({"model_format": "pytorch", "quantization": "none"}, {"variant": {"format": "pytorch"}}),
        ({"quantization": "int8"}, {"quantize": "int8", "variant": {"quantization": "int8"}}),
        ({"model_size_in_billions": "1_8"}, {"variant": {"size": "1_8"}}),
        (
            {"model_format": "ggufv2", "quantization": "Q4_K_M", "model_name": "owner/repo"},
            {"model": "owner/repo:Q4_K_M", "variant": {"format": "ggufv2", "quantization": "Q4_K_M"}},
        ),
        (
            {"peft_model_config": {"lora_list": [{"lora_name": "a", "local_path": "/a"}]}},
            {"settings": {"lora_adapters": "a=/a"}},
        ),
        ({"max_batch_size": 8, "dtype": "float16"}, {"dtype": "float16", "settings": {"max_batch_size": 8}}),
        ({"trust_remote_code": True}, {}),
    ],
)
def test_xinferences(body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert launch_of({"model_name": "smol"} | body) == LaunchRequest(**{"model": "smol"} | expected)


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"model_name": ""}, "model_name", "not empty"),
        ({"model_type": "image"}, "model_type", "is not served"),
        ({"model_type": "llm"}, "model_type", "LLM, embedding, rerank"),
        ({"model_engine": "vLLM"}, "model_engine", "is no engine of this server"),
        ({"model_engine": "magic"}, "model_engine", "must be one of"),
        ({"model_format": "mlx"}, "model_format", "pytorch, gptq, awq, fp8, ggufv2"),
        ({"n_worker": 2}, "n_worker", "partition"),
        ({"n_gpu": "two"}, "n_gpu", "must be auto"),
        ({"gpu_idx": [0]}, "gpu_idx", "CUDA_VISIBLE_DEVICES"),
        ({"download_hub": "modelscope"}, "download_hub", "Hugging Face hub"),
        ({"envs": {"A": "1"}}, "envs", "no environment"),
        ({"enable_virtual_env": True}, "enable_virtual_env", "no Python environment"),
        ({"replica": 0}, "replica", "1..1024"),
        ({"request_limits": "many"}, "request_limits", "whole number"),
        ({"model_size_in_billions": []}, "model_size_in_billions", "must be a number"),
        (
            {"peft_model_config": {"lora_list": [{"lora_name": "a"}]}},
            "peft_model_config.lora_list[0].local_path",
            "given",
        ),
        (
            {"peft_model_config": {"image_lora_load_kwargs": {"a": 1}}},
            "peft_model_config.image_lora_load_kwargs",
            "images",
        ),
        ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization", "is no flag of funitel serve"),
        ({"max_batch_size": "x"}, "max_batch_size", "not a valid integer"),
        ({"port": 80}, "port", "a setting of the server"),
        ({"dtype": 1}, "dtype", "must be a string"),
    ],
)
def test_an_error_of_xinferences_names_the_field(body: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        launch_of({"model_name": "smol"} | body)
    assert refused.value.param == field
    assert words in refused.value.message
    assert "settings." not in refused.value.message
