"""X3: registrations in our form and in Xinference's, and the field that an error names."""

import json
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.control_plane.api.registration_body import registration_of
from funitel.launcher.control_plane.records import Registration
from funitel.proto.errors import InvalidRequest

XINFERENCE: dict[str, Any] = {
    "version": 2,
    "context_length": 2048,
    "model_name": "custom-llama",
    "model_lang": ["en", "zh"],
    "model_ability": ["generate", "chat", "tools"],
    "model_description": "A custom\nmodel.",
    "model_family": "llama-3.1-instruct",
    "chat_template": "{{ messages }}\n",
    "stop_token_ids": [2, 5],
    "stop": ["</s>", "<|im_end|>"],
    "tool_parser": "llama3",
    "reasoning_start_tag": "<think>",
    "reasoning_end_tag": "</think>",
    "virtualenv": None,
    "model_specs": [
        {
            "model_format": "pytorch",
            "model_size_in_billions": "1_8",
            "quantization": "none",
            "model_id": "owner/repo",
            "model_revision": "v2",
            "model_hub": "huggingface",
        },
        {
            "model_format": "ggufv2",
            "model_size_in_billions": 7,
            "quantizations": ["Q4_K_M", "Q8_0"],
            "model_id": "owner/gguf",
            "model_file_name_template": "m.{quantization}.gguf",
        },
        {"model_format": "gptq", "model_size_in_billions": 7, "quantization": "Int4", "model_id": "owner/gptq"},
    ],
}


def registered(definition: Any, type: str = "LLM", **body: Any) -> Registration:
    return registration_of(type, {"model": definition, **body})


def refusal(definition: Any, type: str = "LLM", **body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        registered(definition, type, **body)
    assert "\n" not in refused.value.message
    return refused.value


# Ours


@pytest.mark.parametrize("name", ["model_name", "name"])
@pytest.mark.parametrize("place", ["model", "model_uri", "path"])
def test_ours_in_all_its_words(name: str, place: str, tmp_path: Path) -> None:
    definition = {
        name: "tiny",
        place: str(tmp_path),
        "settings": {"max_batch_size": 2, "quantize": "int8"},
        "context_length": 100,
        "model_description": "Tiny.",
        "chat_template": "{{ messages }}",
        "spec": {"num_layers": 2},
        "model_type": "LLM",
    }
    found = registered(json.dumps(definition), persist=False)
    assert (found.type, found.name, found.model, found.persist) == ("LLM", "tiny", str(tmp_path), False)
    assert found.settings == {"max_total_tokens": 100, "max_batch_size": 2, "quantize": "int8"}
    assert (found.chat_template, found.spec, found.description) == ("{{ messages }}", {"num_layers": 2}, "Tiny.")
    assert found.definition == definition
    assert found.created > 0


def test_places_are_paths_uris_repositories_and_names(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    for given, model in (
        (str(tmp_path), str(tmp_path)),
        (f"file://{tmp_path}/x.gguf", f"{tmp_path}/x.gguf"),
        ("owner/repo", "owner/repo"),
        ("owner/repo:Q4_K_M", "owner/repo:Q4_K_M"),
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
    ):
        assert registered({"name": "t", "model": given}).model == model
    assert registered({"name": "t", "model": "owner/repo"}).persist is True


def test_the_context_of_an_encoder_is_that_of_its_texts() -> None:
    found = registered({"name": "e", "model": "owner/repo", "context_length": 128}, "embedding")
    assert found.settings == {"max_input_tokens": 128}


@pytest.mark.parametrize(
    ("definition", "field", "words"),
    [
        (None, "model", "must be given"),
        ("{", "model", "is not JSON"),
        ("[]", "model", "must be a JSON object"),
        (5, "model", "must be a JSON object"),
        ({"model": "o/r"}, "model_name", "must be given"),
        ({"name": "t"}, "model", "must be given"),
        ({"name": "t", "model_name": "t", "model": "o/r"}, "name", "are the same"),
        ({"name": "t", "model": "o/r", "path": "/"}, "path", "are the same"),
        ({"name": "smollm2-135m-instruct", "model": "o/r"}, "name", "a name of the catalogue"),
        ({"model_name": "tgi", "model": "o/r"}, "model_name", "the default model"),
        ({"name": "t", "model": "/no/such/folder"}, "model", "names no folder or file"),
        ({"name": "t", "model": "./here"}, "model", "an absolute path"),
        ({"name": "t", "model": "s3://bucket/x"}, "model", "file://PATH"),
        ({"name": "t", "model": "file://host"}, "model", "an absolute path"),
        ({"name": "t", "model": "o/r", "context_length": 0}, "context_length", "within 1.."),
        ({"name": "t", "model": "o/r", "settings": {"port": 1}}, "settings.port", "of the server"),
        ({"name": "t", "model": "o/r", "settings": {"num_replicas": 1}}, "settings.num_replicas", "of a launch"),
        ({"name": "t", "model": "o/r", "spec": []}, "spec", "an object"),
        ({"name": "t", "model": "o/r", "model_type": "embedding"}, "model_type", "must be LLM"),
        ({"name": "t", "model": "o/r", "colour": 1}, "colour", "unknown field"),
        ({"name": "t", "model": "o/r", "chat_template": ""}, "chat_template", "not empty"),
        (
            {"name": "t", "model": "o/r", "spec": {}, "settings": {"model_spec": "/x"}},
            "settings.model_spec",
            "the same setting",
        ),
    ],
)
def test_x3_an_error_of_ours_names_the_field(definition: Any, field: str, words: str) -> None:
    error = refusal(definition)
    assert error.param == field
    assert words in error.message


def test_the_body_around_it() -> None:
    good = {"name": "t", "model": "o/r"}
    assert refusal(good, "image").param == "model_type"
    assert refusal(good, persist="yes").param == "persist"
    assert refusal(good, worker_ip="10.0.0.1").param == "worker_ip"
    assert refusal(good, colour=1).param == "colour"
    with pytest.raises(InvalidRequest):
        registration_of("LLM", [])


# Xinference's


def test_x3_xinferences_llm_becomes_variants_and_flags() -> None:
    found = registered(json.dumps(XINFERENCE))
    assert (found.name, found.model, found.chat_template) == ("custom-llama", "owner/repo", "{{ messages }}\n")
    assert found.settings == {
        "max_total_tokens": 2048,
        "default_stop": ["</s>", "<|im_end|>"],
        "default_stop_token_ids": [2, 5],
        "reasoning_parser": "think",
        "tool_call_parser": "llama3_json",
    }
    assert [
        (each["model"], each["format"], each["size"], each["quantization"], each["settings"]) for each in found.variants
    ] == [
        ("owner/repo", "pytorch", "1_8", "none", {"revision": "v2"}),
        ("owner/gguf/m.Q4_K_M.gguf", "ggufv2", 7, "Q4_K_M", {}),
        ("owner/gguf/m.Q8_0.gguf", "ggufv2", 7, "Q8_0", {}),
        ("owner/gptq", "gptq", 7, "Int4", {"quantize": "gptq"}),
    ]
    assert found.definition == XINFERENCE


def test_x3_a_local_model_of_xinference(tmp_path: Path) -> None:
    spec = {"model_format": "pytorch", "model_size_in_billions": 1, "quantization": "none", "model_uri": str(tmp_path)}
    found = registered({"model_name": "t", "model_specs": [spec]})
    assert found.model == str(tmp_path)
    (tmp_path / "m-Q4_0.gguf").touch()
    spec = {
        "model_format": "ggufv2",
        "quantizations": ["Q4_0"],
        "model_uri": f"file://{tmp_path}",
        "model_file_name_template": "m-{quantization}.gguf",
    }
    assert registered({"model_name": "t", "model_specs": [spec]}).model == f"{tmp_path}/m-Q4_0.gguf"


def test_xinferences_encoders() -> None:
    specs = [{"model_format": "pytorch", "quantization": "none", "model_id": "o/e"}]
    embedding = {"model_name": "e", "dimensions": 384, "max_tokens": 512, "language": ["en"], "model_specs": specs}
    assert registered(embedding, "embedding").settings == {"max_input_tokens": 512}
    rerank = {"model_name": "r", "type": "normal", "max_tokens": 512, "language": ["en"], "model_specs": specs}
    assert registered(rerank, "rerank").model == "o/e"
    assert refusal(rerank | {"type": "LLM-based"}, "rerank").param == "type"
    assert refusal(embedding | {"dimensions": -1}, "embedding").param == "dimensions"


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"model_name": None}, "model_name", "must be given"),
        ({"model_specs": []}, "model_specs", "at least one spec"),
        ({"model_specs": [1]}, "model_specs[0]", "must be a JSON object"),
        ({"model_specs": [{"model_format": "mlx"}]}, "model_specs[0].model_format", "is not served"),
        ({"model_specs": [{"model_format": "zip"}]}, "model_specs[0].model_format", "must be one of"),
        ({"model_specs": [{"model_format": "pytorch"}]}, "model_specs[0].model_uri", "must be given"),
        (
            {"model_specs": [{"model_format": "ggufv2", "model_id": "o/r"}]},
            "model_specs[0].model_file_name_template",
            "must be given",
        ),
        (
            {"model_specs": [{"model_format": "pytorch", "model_uri": "/no/such"}]},
            "model_specs[0].model_uri",
            "names no folder",
        ),
        (
            {"model_specs": [{"model_format": "pytorch", "model_id": "o/r", "model_hub": "modelscope"}]},
            "model_specs[0].model_hub",
            "Hugging Face hub",
        ),
        (
            {"model_specs": [{"model_format": "pytorch", "model_id": "o/r", "colour": 1}]},
            "model_specs[0].colour",
            "unknown field",
        ),
        ({"version": 3}, "version", "1..2"),
        ({"model_ability": ["chat", "vision"]}, "model_ability[1]", "is not served"),
        ({"model_ability": ["fly"]}, "model_ability[0]", "must be one of"),
        ({"stop": "</s>"}, "stop", "a list of strings"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "token ids"),
        ({"reasoning_start_tag": "<a>"}, "reasoning_start_tag", "<think>"),
        ({"tool_parser": "mine"}, "tool_parser", "must be one of"),
        ({"virtualenv": {"packages": ["x"]}}, "virtualenv", "no Python environment"),
        ({"context_length": "many"}, "context_length", "whole number"),
        ({"colour": 1}, "colour", "unknown field"),
    ],
)
def test_x3_an_error_of_xinferences_names_the_field(change: dict[str, Any], field: str, words: str) -> None:
    error = refusal(XINFERENCE | change)
    assert error.param == field
    assert words in error.message
