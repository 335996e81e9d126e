"""Encoders beside transformers and sentence-transformers: every family, every head, texts of many lengths at once."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from funitel.model_server.cpu.build import cpu_flags
from funitel.model_server.executor.encoder import EncoderExecutor
from funitel.model_server.files.integrity import read_json
from funitel.model_server.loading.encoder import load_encoder
from funitel.model_server.registry.encoders import ENCODERS, encoder_spec_of, is_encoder
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import InvalidRequest, SettingsError, UnsupportedModel, WeightsError
from funitel.proto.step import EncoderInput, EncoderTask, ShardInfo
from funitel_testing.tiny_encoders import FAMILIES, save_tiny_encoder
from funitel_testing.words import VOCAB_SIZE

LENGTHS = (5, 1, 17, 5, 30, 2, 17)
TOLERANCE = 2e-5


def texts(first_id: int = 6) -> list[EncoderInput]:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(first_id, VOCAB_SIZE, (length,), generator=draw).tolist() for length in LENGTHS]
    return [EncoderInput(input_ids=tuple(each)) for each in ids]


def load(folder: Path, **settings: Any) -> tuple[EncoderExecutor, ShardInfo]:
    given = ModelServerSettings(model_id=str(folder), device="cpu", **{"num_threads": 1, **settings})
    return load_encoder(given, folder)


def rows(executor: EncoderExecutor, task: EncoderTask, inputs: list[EncoderInput]) -> torch.Tensor:
    result = executor.encode(task, inputs)
    assert result.broken == ()
    return torch.tensor(struct.unpack(f"<{len(result.values) // 4}f", result.values)).view(-1, result.width)


def alone(model: Any, inputs: list[EncoderInput]) -> list[Any]:
    """What transformers makes of each text by itself."""
    with torch.no_grad():
        return [
            model(
                input_ids=torch.tensor([text.input_ids]),
                **({"token_type_ids": torch.tensor([text.type_ids])} if text.type_ids else {}),
            )
            for text in inputs
        ]


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_equal_transformers(family: str, tmp_path: Path) -> None:
    executor, info = load(save_tiny_encoder(family, "Model", tmp_path))
    model = getattr(transformers, f"{family}Model").from_pretrained(tmp_path)
    inputs = texts()
    expected = torch.stack([out.last_hidden_state[0].mean(0) for out in alone(model, inputs)])
    assert info.encoder is not None
    assert info.encoder.tasks == {EncoderTask.EMBED, EncoderTask.EMBED_ALL}
    assert info.encoder.max_tokens == 40 - (2 if FAMILIES[family].get("pad_token_id") == 1 else 0)
    torch.testing.assert_close(rows(executor, EncoderTask.EMBED, inputs), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_b3_vectors_of_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    executor, info = load(save_tiny_encoder(family, "Model", tmp_path))
    model = getattr(transformers, f"{family}Model").from_pretrained(tmp_path)
    inputs = texts()
    expected = torch.cat([out.last_hidden_state[0] for out in alone(model, inputs)])
    assert info.encoder is not None
    assert info.encoder.token_width == 24
    torch.testing.assert_close(rows(executor, EncoderTask.EMBED_ALL, inputs), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.skipif("amx_bf16" not in cpu_flags(), reason="needs AMX")
@pytest.mark.parametrize(("activation", "num_threads"), [("gelu", 2), ("gelu_new", 1), ("relu", 2)])
def test_layers_on_tiles_are_those_of_transformers(
    activation: str, num_threads: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 160, "hidden_act": activation, "num_hidden_layers": 3}
    save_tiny_encoder("Bert", "Model", tmp_path, **sizes)
    with caplog.at_level("INFO"):
        executor, _ = load(tmp_path, num_threads=num_threads)
    assert "layers=amx" in caplog.text
    model = transformers.BertModel.from_pretrained(tmp_path)
    for inputs in (texts(), texts()[:1], [EncoderInput(input_ids=(7,))], texts() * 9):  # also several shares of rows
        expected = torch.stack([out.last_hidden_state[0].mean(0) for out in alone(model, inputs)])
        found = rows(executor, EncoderTask.EMBED, inputs)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert (1 - torch.cosine_similarity(found.double(), expected.double())).max() < 1e-8


def test_layers_of_sizes_that_are_not_for_tiles_run_in_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        load(save_tiny_encoder("Bert", "Model", tmp_path))
    assert "the encoder's layers run in torch: " in caplog.text
    assert "layers=torch" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classes_equal_transformers(family: str, num_labels: int, tmp_path: Path) -> None:
    save_tiny_encoder(family, "ForSequenceClassification", tmp_path, num_labels=num_labels)
    executor, info = load(tmp_path)
    model = getattr(transformers, f"{family}ForSequenceClassification").from_pretrained(tmp_path)
    inputs = texts()
    expected = torch.cat([out.logits for out in alone(model, inputs)])
    assert info.encoder is not None
    assert info.encoder.labels == tuple(f"LABEL_{i}" for i in range(num_labels))
    assert info.encoder.tasks == {EncoderTask.CLASSIFY}
    torch.testing.assert_close(rows(executor, EncoderTask.CLASSIFY, inputs), expected, atol=TOLERANCE, rtol=0)


def test_pairs_have_types(tmp_path: Path) -> None:
    executor, _ = load(save_tiny_encoder("Bert", "ForSequenceClassification", tmp_path))
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    pair = EncoderInput(input_ids=(2, 5, 6, 3, 7, 3), type_ids=(0, 0, 0, 0, 1, 1))
    plain = EncoderInput(input_ids=pair.input_ids)
    expected = torch.cat([out.logits for out in alone(model, [plain, pair])])
    found = rows(executor, EncoderTask.CLASSIFY, [plain, pair])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    assert not torch.allclose(found[0], found[1], atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_behind_a_mask_equals_transformers(family: str, tmp_path: Path) -> None:
    executor, info = load(save_tiny_encoder(family, "ForMaskedLM", tmp_path))
    model = getattr(transformers, f"{family}ForMaskedLM").from_pretrained(tmp_path)
    inputs = [
        EncoderInput(input_ids=text.input_ids, mask_place=len(text.input_ids) // 2, top_n=1 + place)
        for place, text in enumerate(texts())
    ]
    assert info.encoder is not None
    assert info.encoder.tasks == {EncoderTask.EMBED, EncoderTask.EMBED_ALL, EncoderTask.FILL}
    result = executor.encode(EncoderTask.FILL, inputs)
    assert result.width == len(inputs)
    found = rows(executor, EncoderTask.FILL, inputs)
    for place, (text, out) in enumerate(zip(inputs, alone(model, inputs), strict=True)):
        best = out.logits[0, text.mask_place].softmax(-1).topk(result.width)
        torch.testing.assert_close(found[place], best.values, atol=TOLERANCE, rtol=0)
        assert result.ids[place * result.width : (place + 1) * result.width] == tuple(best.indices.tolist())


def test_padding_tokens_inside_a_text_take_no_position(tmp_path: Path) -> None:
    executor, _ = load(save_tiny_encoder("Roberta", "Model", tmp_path))
    model = transformers.RobertaModel.from_pretrained(tmp_path)
    inputs = [EncoderInput(input_ids=(6, 1, 7, 1, 8)), EncoderInput(input_ids=(9, 10)), EncoderInput(input_ids=(1, 6))]
    with torch.no_grad():
        expected = [
            model(torch.tensor([text.input_ids]), torch.ones(1, len(text.input_ids))).last_hidden_state[0].mean(0)
            for text in inputs
        ]
    found = rows(executor, EncoderTask.EMBED, inputs)
    torch.testing.assert_close(found, torch.stack(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("pools", [("mean",), ("cls",), ("cls", "max", "mean", "mean_sqrt_len_tokens"), ("lasttoken",)])
def test_pooling_and_dense_modules_equal_sentence_transformers(pools: tuple[str, ...], tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer import modules  # seconds to import

    save_tiny_encoder("Bert", "Model", tmp_path)
    pooling = modules.Pooling(24, pooling_mode=pools)
    dense = modules.Dense(24 * len(pools), 10, activation_function=torch.nn.Tanh())
    saved = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for place, (name, module) in enumerate((("1_Pooling", pooling), ("2_Dense", dense)), start=1):
        (tmp_path / name).mkdir()
        module.save(str(tmp_path / name))
        kind = f"sentence_transformers.models.{type(module).__name__}"
        saved.append({"idx": place, "name": str(place), "path": name, "type": kind})
    (tmp_path / "modules.json").write_text(json.dumps(saved))
    executor, info = load(tmp_path)
    model, inputs = transformers.BertModel.from_pretrained(tmp_path), texts()
    expected = []
    for text, out in zip(inputs, alone(model, inputs), strict=True):
        features = {"token_embeddings": out.last_hidden_state, "attention_mask": torch.ones(1, len(text.input_ids))}
        with torch.no_grad():
            expected.append(dense(pooling(features))["sentence_embedding"][0])
    assert info.encoder is not None
    assert (info.encoder.width, info.encoder.pooling) == (10, ",".join(pools))
    torch.testing.assert_close(rows(executor, EncoderTask.EMBED, inputs), torch.stack(expected), atol=TOLERANCE, rtol=0)


def test_vectors_are_cut_before_they_are_normalised(tmp_path: Path) -> None:
    executor, _ = load(save_tiny_encoder("Bert", "Model", tmp_path))
    ids = (6, 7, 8)
    plain = rows(executor, EncoderTask.EMBED, [EncoderInput(input_ids=ids)])[0]
    wishes = [
        EncoderInput(input_ids=ids, is_normalized=True),
        EncoderInput(input_ids=ids, dimensions=5, is_normalized=True),
        EncoderInput(input_ids=ids, dimensions=5),
    ]
    whole, cut, raw = rows(executor, EncoderTask.EMBED, wishes)
    torch.testing.assert_close(whole, plain / plain.norm())
    torch.testing.assert_close(cut[:5], plain[:5] / plain[:5].norm())
    torch.testing.assert_close(raw[:5], plain[:5])
    assert not cut[5:].any()


def test_rows_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder = save_tiny_encoder("Bert", "Model", tmp_path)
    executor, _ = load(folder)
    executor._encoder.tokens[9] = float("nan")
    inputs = [EncoderInput(input_ids=(6, 7)), EncoderInput(input_ids=(8, 9, 6)), EncoderInput(input_ids=(7,))]
    assert executor.encode(EncoderTask.EMBED, inputs).broken == (1,)
    assert executor.encode(EncoderTask.EMBED_ALL, inputs).broken == (1,)


@pytest.mark.parametrize(
    ("task", "inputs", "words"),
    [
        (EncoderTask.CLASSIFY, [EncoderInput(input_ids=(6,))], "does not classify"),
        (EncoderTask.EMBED, [], "one text or more"),
        (EncoderTask.EMBED, [EncoderInput(input_ids=())], "1..40 tokens, given 0"),
        (EncoderTask.EMBED, [EncoderInput(input_ids=(6,) * 41)], "1..40 tokens, given 41"),
        (EncoderTask.EMBED, [EncoderInput(input_ids=(VOCAB_SIZE,))], f"must be < {VOCAB_SIZE}"),
        (EncoderTask.EMBED, [EncoderInput(input_ids=(6, 7), type_ids=(1,))], "type ids"),
    ],
)
def test_bad_calls_are_refused(task: EncoderTask, inputs: list[EncoderInput], words: str, tmp_path: Path) -> None:
    executor, _ = load(save_tiny_encoder("Bert", "Model", tmp_path))
    with pytest.raises(InvalidRequest, match=words):
        executor.encode(task, inputs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"world_size": 2, "sharded": True}, "--num-shard 2: an encoder is not split"),
        ({"quantize": "int8"}, "--quantize int8 is not for encoders"),
        ({"rope_factor": 2.0}, "--rope-factor 2.0 is not for encoders"),
    ],
)
def test_settings_for_other_models_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=words):
        load(tmp_path, **settings)


def test_a_checkpoint_of_the_bare_encoder_fills_no_masks(tmp_path: Path) -> None:
    save_tiny_encoder("MPNet", "Model", tmp_path)
    config = read_json(tmp_path / "config.json") | {"architectures": ["MPNetForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, info = load(tmp_path)
    assert info.encoder is not None
    assert info.encoder.tasks == {EncoderTask.EMBED, EncoderTask.EMBED_ALL}


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save_tiny_encoder("Bert", "Model", tmp_path)
    config = read_json(tmp_path / "config.json") | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"lacks tensor encoder\.layer\.2"):
        load(tmp_path)


def test_the_table_tells_encoders_from_others() -> None:
    assert len(ENCODERS) == 18
    assert is_encoder({"architectures": ["BertModel"]})
    assert not is_encoder({"architectures": ["LlamaForCausalLM"]})
    assert not is_encoder({})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "mish"}, "activation 'mish' is not supported"),
        ({"num_attention_heads": 5}, "hidden size 24 does not divide into 5 heads"),
        ({"vocab_size": 0}, "vocab_size must be an integer > 0"),
        ({"hidden_size": None}, "lacks|must be an integer > 0|wrong kind"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "is_decoder"),
        ({"id2label": {"x": "a"}}, "wrong kind"),
    ],
)
def test_odd_configs_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_tiny_encoder("Bert", "Model", tmp_path)
    with pytest.raises(UnsupportedModel, match=words):
        encoder_spec_of(read_json(tmp_path / "config.json") | change)


def test_a_flag_for_threads_of_the_fused_step_is_said_to_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(save_tiny_encoder("Bert", "Model", tmp_path), thread_spin_us=7)
    assert caplog.text.count("--thread-spin-us 7 changes nothing: the fused CPU step") == 1
