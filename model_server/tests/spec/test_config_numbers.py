"""Numbers of a model folder's files that no model can have: one line with file, field, value and limit."""

import json
from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.hub.resolve import resolve
from funitel.model_server.loading.decoder import load
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.spec.config_numbers import check_numbers
from funitel.proto.errors import NoRow, UnsupportedModel
from funitel.proto.step import WarmupLimits
from funitel_testing.executors import start
from funitel_testing.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"))


CASES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("config.json", {"max_position_embeddings": 10**12}, "max_position_embeddings must be an integer within 1..2"),
    ("config.json", {"max_position_embeddings": -5}, r"max_position_embeddings must be .*, given -5$"),
    (
        "config.json",
        {"max_position_embeddings": 10**400},
        r"max_position_embeddings .* given 2\^1328 and beyond$",
    ),
    (
        "config.json",
        {"eos_token_id": [10**12, -1]},
        r"eos_token_id\[0\] must be an integer within 0..2147483647, gi",
    ),
    ("config.json", {"eos_token_id": [2, -1]}, r"eos_token_id\[1\] must be an integer within 0..2147483647, given -1$"),
    ("config.json", {"eos_token_id": "2"}, r'eos_token_id must be an integer within .*, given "2"$'),
    ("config.json", {"eos_token_id": True}, r"eos_token_id must be an integer within .*, given true$"),
    ("config.json", {"pad_token_id": [[3]]}, r"pad_token_id\[0\] must be an integer within .*, given \[3\]$"),
    ("config.json", {"num_hidden_layers": 2.5}, r"num_hidden_layers must be an integer within 1..4096, given 2\.5$"),
    ("config.json", {"num_attention_heads": 0}, r"num_attention_heads must be an integer within 1..4096, given 0$"),
    ("config.json", {"vocab_size": {"size": 7}}, r"vocab_size must be an integer within .*, given {\"size\": 7}$"),
    ("config.json", {"rms_norm_eps": float("nan")}, r"rms_norm_eps must be a number within 0..1, given NaN$"),
    ("config.json", {"rope_theta": float("inf")}, r"rope_theta must be a number within .*, given Infinity$"),
    (
        "config.json",
        {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}},
        r"rope_scaling\.factor must",
    ),
    ("config.json", {"rope_scaling": 7}, r"rope_scaling must be an object, given 7$"),
    ("config.json", {"text_config": {"num_hidden_layers": -1}}, r"text_config\.num_hidden_layers must be an integer"),
    ("config.json", {"anything": [1, {"deep": float("nan")}]}, r"anything\[1\]\.deep is not a number$"),
    (
        "config.json",
        {"anything": -(10**30)},
        r"anything must be within \+-9223372036854775807, given -2\^99 and beyond$",
    ),
    (
        "generation_config.json",
        {"temperature": 10**12},
        r"temperature must be a number within 0..100, given 1000",
    ),
    ("generation_config.json", {"top_p": "0.9"}, r"top_p must be a number within 0..1, given \"0\.9\"$"),
    ("generation_config.json", {"top_k": 1.5}, r"top_k must be an integer within -1..2147483647, given 1\.5$"),
    (
        "generation_config.json",
        {"eos_token_id": -1},
        r"eos_token_id must be an integer within 0..2147483647, given -1$",
    ),
    (
        "tokenizer_config.json",
        {"model_max_length": -1},
        r"model_max_length must be a number within .*, given -1$",
    ),
    ("tokenizer_config.json", {"model_max_length": float("nan")}, r"model_max_length must be a number .*, given NaN$"),
    ("tokenizer_config.json", {"model_max_length": "512"}, r"model_max_length must be a number .*, given \"512\"$"),
    ("sentence_bert_config.json", {"max_seq_length": 0}, r"max_seq_length must be an integer within .*, given 0$"),
)


@pytest.mark.parametrize(("name", "changes", "message"), CASES, ids=lambda value: str(value)[:50])
def test_a9_a_number_that_cannot_be_is_one_line_with_file_and_field(
    name: str, changes: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / name
    given = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(given | changes))
    with pytest.raises(UnsupportedModel, match=f"^{path}: {message}"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("config.json", {"pad_token_id": -1, "eos_token_id": None, "bos_token_id": [1, 2], "sliding_window": None}),
        ("config.json", {"time_step_limit": [0.0, float("inf")], "num_key_value_heads": [2, 4], "head_dim": None}),
        ("config.json", {"vision_config": {"hidden_size": 1152}, "max_position_embeddings": 10485760}),
        ("generation_config.json", {"temperature": 0.6, "top_k": 20, "top_p": 1, "max_length": 2048}),
        ("tokenizer_config.json", {"model_max_length": 1000000000000000019884624838656}),
        ("tokenizer_config.json", {"model_max_length": 1e30, "added_tokens_decoder": {"0": {"lstrip": False}}}),
    ],
    ids=str,
)
def test_a9_what_checkpoints_do_have_is_taken(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(values))
    check_numbers(tmp_path)


def test_a9_a_context_without_end_takes_no_memory(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**31 - 1}))
    executor, _ = load(ModelServerSettings(model_id=str(tmp_path), device="cpu", num_threads=1), tmp_path)
    limits = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=3200)
    assert executor.warmup([start(0, range(20))], limits).pool_tokens == 3200
    assert executor.batches.table.max_blocks == 3200 // 16 + 1


def test_a9_what_a_row_refuses_is_named_as_the_file_has_it(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=r"num_attention_heads: num_heads must be an integer, given \[3, 4\]$"):
        spec_of(config | {"num_attention_heads": [3, 4], "head_dim": 8})
    with pytest.raises((UnsupportedModel, NoRow), match=r"wrong kind: head_dim: int\(\) argument"):
        spec_of(config | {"head_dim": [3, 4]})
