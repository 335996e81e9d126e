"""GGUF in, Hugging Face folder out: same logits, same token ids, one line for each way to be wrong."""

import json
import math
import re
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from funitel.model_server.checkpoint.gguf_file import GgufTensorFile
from funitel.model_server.convert.gguf import point_to_gguf
from funitel.model_server.convert.gguf_reader import read_gguf
from funitel.model_server.convert.gguf_tokenizer import PRE_TOKENIZERS, PreTokenizer, build_tokenizer
from funitel.model_server.files.gguf_pointer import POINTER, read_pointer
from funitel.model_server.files.integrity import check_folder
from funitel.model_server.settings import QuantizeSettings
from funitel.model_server.tools.quantize.command import quantize
from funitel.proto.errors import StartupError, UnsupportedModel, WeightsError
from funitel_testing.cache import as_floats
from funitel_testing.tiny_gguf import TINY_GGUFS

MakeGguf = Callable[..., PreTrainedModel]

PAIRS = json.loads((Path(__file__).parents[1] / "data" / "smollm2-tokenization.json").read_text())["pairs"]


def converted(path: Path) -> Path:
    folder = path.parent / "converted"
    folder.mkdir(exist_ok=True)
    point_to_gguf(path, folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    floats = folder.parent / "floats"
    quantize(QuantizeSettings(model_id="", output_dir=str(floats), method="none"), folder)
    return load_floats(floats)


def load_floats(folder: Path) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    model, loading = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    assert isinstance(model, PreTrainedModel)
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    token_ids = torch.tensor([[5, 300, 17, 0, 42, 9]])
    with torch.no_grad():
        return torch.as_tensor(model(token_ids).logits)


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


# the demo model


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model / "tokenizer.json"))


def test_demo_tokenizer_gives_the_models_own_ids(demo_tokenizer: Tokenizer) -> None:
    assert len(PAIRS) == 251
    assert [demo_tokenizer.encode(text).ids for text, _ in PAIRS] == [ids for _, ids in PAIRS]


def test_demo_tokenizer_decodes_what_it_encoded(demo_tokenizer: Tokenizer) -> None:
    assert [demo_tokenizer.decode(ids, skip_special_tokens=False) for _, ids in PAIRS] == [text for text, _ in PAIRS]


def test_transformers_reads_the_demo_tokenizer_alike(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    assert [tokenizer.encode(text) for text, _ in PAIRS] == [ids for _, ids in PAIRS]


def test_demo_model_knows_a_capital(demo_model: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model: Any = load_floats(as_floats(demo_model))
    token_ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    assert tokenizer.decode(token_ids[prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


# weights


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gpt2"])
def test_converted_model_gives_the_source_models_logits(make_gguf: MakeGguf, tmp_path: Path, architecture: str) -> None:
    source = make_gguf(tmp_path / "tiny.gguf", architecture)
    folder = converted(tmp_path / "tiny.gguf")
    check_folder(folder)
    torch.testing.assert_close(logits(load(folder)), logits(source), rtol=0, atol=0)


def test_quantised_tensors_get_their_exact_values(make_gguf: MakeGguf, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((384, 32), dtype=np.float32)
    blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)

    make_gguf(tmp_path / "tiny.gguf", tensors={"token_embd.weight": blocks})
    embeddings = load(converted(tmp_path / "tiny.gguf")).get_input_embeddings().weight
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(torch.as_tensor(embeddings).detach().numpy(), expected)
    assert np.abs(expected - values).max() > 0


@pytest.mark.parametrize(
    ("architecture", "types"),
    [
        ("llama", {"attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q4_1"}),  # rows of heads are put in another order
        ("gpt2", {"attn_qkv": "Q4_0", "ffn_up": "Q4_1"}),  # the float32 weights lie the other way round
    ],
)
def test_blocks_are_read_in_the_checkpoints_order(
    make_gguf: MakeGguf, tmp_path: Path, architecture: str, types: dict[str, str]
) -> None:
    numbers = {f"blk.1.{name}.weight": gguf.GGMLQuantizationType[kind] for name, kind in types.items()}
    others = {"token_embd.weight": gguf.GGMLQuantizationType.F16}
    make_gguf(tmp_path / "tiny.gguf", architecture, types=numbers | others)
    file = GgufTensorFile(converted(tmp_path / "tiny.gguf") / POINTER)
    found = {name: kind for name in file.keys() if (kind := file.type_of(name)) is not None}
    assert sorted(kind.name for kind in found.values()) == sorted([*types.values(), "F16"])
    for name, kind in found.items():
        values = file.get_tensor(name).float()
        expected = values.t() if architecture == "gpt2" and ".h." in name else values
        rows = file.read_blocks(name, (expected.shape[0], expected.shape[1])).numpy()
        if kind.num_inputs > 1:
            stand_for = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind.name])
            np.testing.assert_array_equal(stand_for, expected.numpy())
        part = file.read_blocks(name, (expected.shape[0], expected.shape[1]), (2, 5), (0, 32)).numpy()
        np.testing.assert_array_equal(part, rows[2:5, : kind.row_bytes(32)])


def test_no_weight_is_written(make_gguf: MakeGguf, tmp_path: Path) -> None:
    make_gguf(tmp_path / "tiny.gguf")
    names = {path.name for path in converted(tmp_path / "tiny.gguf").rglob("*")}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", POINTER}


def test_a_model_split_over_files_is_read_from_all_of_them(make_gguf: MakeGguf, tmp_path: Path) -> None:
    source = make_gguf(tmp_path / "tiny.gguf", tensors_a_file=8)
    first, second, third = sorted(tmp_path.glob("tiny-*.gguf"))
    assert first.name == "tiny-00001-of-00003.gguf"
    torch.testing.assert_close(logits(load(converted(first))), logits(source), rtol=0, atol=0)
    second.rename(tmp_path / "elsewhere")
    line = "is one of 3 parts, and tiny-00002-of-00003.gguf is not beside it"
    with pytest.raises(WeightsError, match=line):
        read_gguf(first)
    second.write_bytes(third.read_bytes())
    with pytest.raises(WeightsError, match="tiny-00002-of-00003.gguf is not part 2 of 3, as its name says"):
        read_gguf(first)
    third.rename(tmp_path / "other.gguf")
    with pytest.raises(WeightsError, match="other.gguf is one of 3 parts: their names must end in -00001-of-00003"):
        read_gguf(tmp_path / "other.gguf")


def test_an_untied_gpt2_keeps_its_output_weights(make_gguf: MakeGguf, tmp_path: Path) -> None:
    source = make_gguf(tmp_path / "tiny.gguf", "gpt2", settings={"tie_word_embeddings": False})
    folder = converted(tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(load(folder)), logits(source), rtol=0, atol=0)


def test_llama3_scaling_is_found_again(make_gguf: MakeGguf, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    settings = {"rope_parameters": rope, "rope_theta": 500000.0, "max_position_embeddings": 16384}
    source: Any = make_gguf(tmp_path / "source.gguf", settings=settings)
    plain = 500000.0 ** -(np.arange(4) / 4)
    divisors = (plain / source.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() > 1

    def stretch(writer: GGUFWriter) -> None:
        writer.add_context_length(16384)
        writer.add_rope_freq_base(500000.0)

    tensors = {"rope_freqs.weight": divisors}
    make_gguf(tmp_path / "tiny.gguf", settings=settings, metadata=stretch, tensors=tensors)
    folder = converted(tmp_path / "tiny.gguf")
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_scaling"] == {name: value for name, value in rope.items() if name != "rope_theta"}
    torch.testing.assert_close(logits(load(folder)), logits(source), rtol=0, atol=0)


def test_other_rope_factors_are_refused(make_gguf: MakeGguf, tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.array([1, 2, 3, 4], dtype=np.float32)}
    make_gguf(tmp_path / "tiny.gguf", tensors=factors)
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        converted(tmp_path / "tiny.gguf")


def test_settings_are_written_as_published(make_gguf: MakeGguf, tmp_path: Path) -> None:
    def ends(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(1)
        writer.add_chat_template("{{ messages }}")

    make_gguf(tmp_path / "tiny.gguf", metadata=ends)
    folder = converted(tmp_path / "tiny.gguf")
    config = json.loads((folder / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-05, 5000.0, 8)
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (384, False)
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [2, 1],
    }
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert tokenizer["chat_template"] == "{{ messages }}"
    assert (tokenizer["bos_token"], tokenizer["eos_token"], tokenizer["unk_token"]) == (
        "<s>",
        "</s>",
        "<unk>",
    )
    assert (tokenizer["add_bos_token"], tokenizer["model_max_length"]) == (True, 64)


# tokenizers


def naive_sentencepiece(text: str, vocabulary: dict[str, tuple[int, float]]) -> list[int]:
    """Join the best-scoring neighbours until none joins; a letter without a token becomes its bytes."""
    symbols = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        joined = [symbols[i] + symbols[i + 1] for i in range(len(symbols) - 1)]
        known = [(-vocabulary[piece][1], i) for i, piece in enumerate(joined) if piece in vocabulary]
        if not known:
            break
        _, best = min(known)
        symbols[best : best + 2] = [joined[best]]
    return [
        token_id
        for symbol in symbols
        for token_id in ([vocabulary[symbol][0]] if symbol in vocabulary else [3 + byte for byte in symbol.encode()])
    ]


@pytest.mark.parametrize(
    "text",
    ["hello world", "hello  worldhell", "helloworld", "  hell", "Ünï hello", "a\nb", "wworldld", "日本 or"],
)
def test_sentencepiece_merges_by_score(make_gguf: MakeGguf, tmp_path: Path, text: str) -> None:
    make_gguf(tmp_path / "tiny.gguf")
    file = read_gguf(tmp_path / "tiny.gguf")
    columns = (file.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    rows = enumerate(zip(*columns, strict=True))
    vocabulary = {token: (token_id, score) for token_id, (token, score, kind) in rows if kind == 1}
    tokenizer = build_tokenizer(file).tokenizer
    ids = tokenizer.encode(text).ids
    assert ids == [1, *naive_sentencepiece(text, vocabulary)]
    assert tokenizer.decode(ids) == text


def test_special_and_user_defined_tokens_are_parsed_in_text(make_gguf: MakeGguf, tmp_path: Path) -> None:
    make_gguf(tmp_path / "tiny.gguf")
    tokenizer = build_tokenizer(read_gguf(tmp_path / "tiny.gguf")).tokenizer
    user = tokenizer.token_to_id("<|user|>")
    ids = tokenizer.encode("<|user|>hello</s>", add_special_tokens=False).ids
    assert user is not None
    assert ids == [user, tokenizer.token_to_id("\u2581hello"), 2]
    assert tokenizer.decode([user, 2]) == "<|user|>"


def test_byte_level_adds_no_bos_unless_told(make_gguf: MakeGguf, tmp_path: Path) -> None:
    def tell(writer: GGUFWriter) -> None:
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(True)

    make_gguf(tmp_path / "silent.gguf", "gpt2")
    make_gguf(tmp_path / "told.gguf", "gpt2", metadata=tell)
    silent = build_tokenizer(read_gguf(tmp_path / "silent.gguf")).tokenizer
    told = build_tokenizer(read_gguf(tmp_path / "told.gguf")).tokenizer
    assert silent.encode("hello hello<|end|>").tokens == ["hello", "\u0120hello", "<|end|>"]
    assert told.encode("hello hello<|end|>").tokens == ["<|end|>", "hello", "\u0120hello", "<|end|>"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["I", "'m", "Ġ12345", "!!", "ĊĊ", "Ġok"]),
        ("smollm", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "!!", "ĊĊ", "Ġok"]),
        ("llama-bpe", ["I", "'m", "Ġ", "123", "45", "!!ĊĊ", "Ġok"]),
        ("qwen2", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "!!ĊĊ", "Ġok"]),
        ("command-r", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "!!", "ĊĊ", "Ġok"]),
        ("bloom", ["I'm", "Ġ12345", "!!ĊĊ", "Ġok"]),
        ("phi-2", ["I", "'m", "Ġ12345", "!!", "ĊĊ", "Ġok"]),
        ("mpt", ["I", "'m", "Ġ12345", "!!", "ĊĊ", "Ġok"]),
        ("olmo", ["I", "'m", "Ġ12345", "!!", "ĊĊ", "Ġok"]),
        ("stablelm2", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "!!ĊĊ", "Ġok"]),
        ("dbrx", ["I", "'m", "Ġ", "123", "45", "!!ĊĊ", "Ġok"]),
        ("chatglm-bpe", ["I", "'m", "Ġ", "123", "45", "!!ĊĊ", "Ġok"]),
        ("glm4", ["I", "'m", "Ġ", "123", "45", "!!ĊĊ", "Ġok"]),
        ("gpt-4o", ["I'm", "Ġ", "123", "45", "!!ĊĊ", "Ġok"]),
        ("deepseek-llm", ["I", "'", "m", "Ġ", "12345", "!!", "Ċ", "Ċ", "Ġok"]),
        ("deepseek-coder", ["I", "'", "m", "Ġ", "1", "2", "3", "4", "5", "!!", "Ċ", "Ċ", "Ġok"]),
        ("deepseek-v3", ["I", "'m", "Ġ", "123", "45", "!!ĊĊ", "Ġok"]),
        ("falcon", ["I", "'", "m", "Ġ", "123", "45", "!!", "ĊĊ", "Ġok"]),
        ("smaug-bpe", ["I", "'m", "Ġ", "123", "45", "!!ĊĊ", "Ġok"]),
        ("viking", ["I'm", "Ġ", "1", "2", "3", "4", "5", "!!ĊĊ", "Ġok"]),
        ("poro-chat", ["I'm", "Ġ12345", "!!ĊĊ", "Ġok"]),
        ("kimi-k2", ["I'm", "Ġ", "123", "45", "!!ĊĊ", "Ġok"]),
        ("seed-coder", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "!!", "ĊĊ", "Ġok"]),
        ("superbpe", ["I'mĠ", "12", "345", "!!ĊĊĠok"]),
        ("tekken", ["I", "'m", "Ġ", "1", "2", "3", "4", "5", "!!ĊĊ", "Ġok"]),
    ],
)
def test_pre_tokenizers_cut_as_their_models_do(
    make_gguf: MakeGguf, tmp_path: Path, name: str, words: list[str]
) -> None:
    def rename(writer: GGUFWriter) -> None:
        writer.add_tokenizer_pre(name)
        writer.add_bos_token_id(0)

    make_gguf(tmp_path / "tiny.gguf", "gpt2", metadata=rename)
    built = build_tokenizer(read_gguf(tmp_path / "tiny.gguf"))
    assert built.tokenizer.pre_tokenizer is not None
    assert [word for word, _ in built.tokenizer.pre_tokenizer.pre_tokenize_str("I'm 12345!!\n\n ok")] == words
    assert built.settings["add_bos_token"] is PRE_TOKENIZERS[name].add_bos_token


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("command-r", "Cohere"),
        ("gpt-2", "GPT2"),
        ("mpt", "GPTNeoX"),
        ("olmo", "GPTNeoX"),
        ("phi-2", "CodeGen"),
        ("qwen2", "Qwen2"),
        ("stablelm2", "Qwen2"),
    ],
)
def test_pre_tokenizers_are_those_of_transformers(make_gguf: MakeGguf, tmp_path: Path, name: str, family: str) -> None:
    make_gguf(tmp_path / "tiny.gguf", "gpt2", metadata=lambda writer: writer.add_tokenizer_pre(name))
    ours = build_tokenizer(read_gguf(tmp_path / "tiny.gguf")).tokenizer
    theirs = getattr(transformers, f"{family}TokenizerFast")().backend_tokenizer
    assert repr(ours.normalizer) == repr(theirs.normalizer)
    text = "I'm 12345!! it'S \u00e9t\u00e9 e\u0301  \n\n\tok, \u0967\u0968 naiveTE'LL x(y)|z...\r\n  \u6f22\u5b57"
    assert ours.pre_tokenizer is not None
    assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


@pytest.mark.parametrize("rule", PRE_TOKENIZERS.values(), ids=PRE_TOKENIZERS)
def test_no_pre_tokenizer_loses_a_letter(rule: PreTokenizer) -> None:
    text = "I'LL x1234567 \u6f22\u5b57\u3042 \u0434\u0430, \u0967\u0968\t\r\n\n  e\u0301(y)|z...  "
    words = [(text, (0, len(text)))]
    for pattern in rule.patterns:
        split = Split(Regex(pattern), behavior="isolated")
        words = [(piece, place) for word, _ in words for piece, place in split.pre_tokenize_str(word)]
    assert "".join(word for word, _ in words) == text


def test_the_docs_list_the_pre_tokenizers() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    known, refused = text.split("`tokenizer.ggml.pre`: ")[1].split("\n\n")[0].split("A file that names another")
    assert re.findall(r"`([^`]+)`", known) == list(PRE_TOKENIZERS)
    assert "is refused" in refused


def test_unknown_pre_tokenizer_is_named(make_gguf: MakeGguf, tmp_path: Path) -> None:
    make_gguf(tmp_path / "tiny.gguf", "gpt2", metadata=lambda writer: writer.add_tokenizer_pre("klingon"))
    with pytest.raises(UnsupportedModel, match="pre-tokenizer klingon is not supported; supported: .*smollm"):
        converted(tmp_path / "tiny.gguf")


def test_unknown_tokenizer_is_named(make_gguf: MakeGguf, tmp_path: Path) -> None:
    make_gguf(tmp_path / "tiny.gguf", metadata=lambda writer: writer.add_tokenizer_model("bert"))
    with pytest.raises(UnsupportedModel, match="tokenizer bert is not supported; supported: gpt2, llama"):
        converted(tmp_path / "tiny.gguf")


# files that are wrong


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "tiny.gguf", "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="rwkv6 is not supported; supported: llama, qwen2, qwen3, gemma"):
        converted(tmp_path / "tiny.gguf")


def test_experts_of_an_architecture_without_any_are_refused(make_gguf: MakeGguf, tmp_path: Path) -> None:
    make_gguf(tmp_path / "tiny.gguf", "qwen2", metadata=lambda writer: writer.add_expert_count(8))
    with pytest.raises(UnsupportedModel, match="qwen2 with 8 experts"):
        converted(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("count", "line"),
    [
        (4, r"tensor blk.0.ffn_gate_exps.weight has shape \[5, 100, 48\], expected 4 matrices"),
        (0, "tensor blk.0.ffn_down.weight is missing"),
        (2**31, "num_experts"),
    ],
)
def test_experts_that_contradict_the_metadata_are_refused(count: int, line: str, tmp_path: Path) -> None:
    tiny = TINY_GGUFS["mixtral"]
    replace(tiny, metadata={**tiny.metadata, "expert_count": count}).write(tmp_path / "tiny.gguf", "llama")
    with pytest.raises(StartupError, match=line):
        converted(tmp_path / "tiny.gguf")


def written(key: str, path: Path, architecture: str, *, extra: tuple[str, ...] = (), **metadata: object) -> Path:
    """A file of `TINY_GGUFS` with other metadata and small tensors more."""
    tiny = TINY_GGUFS[key]
    factors = {name: [1.0] * 4 for name in extra}
    if architecture not in gguf.MODEL_ARCH_NAMES.values():
        pytest.skip(f"this release of gguf cannot write {architecture}")
    replace(tiny, metadata={**tiny.metadata, **metadata}, factors=factors).write(path, architecture)
    return path


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    further = ("blk.2.attn_norm.weight", "blk.2.nextn.eh_proj.weight")
    metadata: dict[str, object] = {"nextn_predict_layers": 1, "block_count": 3}
    path = written("glm4moe", tmp_path / "tiny.gguf", "glm4moe", extra=further, **metadata)
    folder = converted(path)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    assert not any("layers.2." in name for name in read_pointer(folder / POINTER).tensors)
    path = written("glm4moe", tmp_path / "other.gguf", "glm4moe", extra=("blk.3.attn_norm.weight",), **metadata)
    with pytest.raises(UnsupportedModel, match=r"tensor blk\.3\.attn_norm\.weight is not part of glm4moe"):
        converted(path)


def test_forms_of_mixtures_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    path = written("glm4moe", tmp_path / "a.gguf", "glm4moe", expert_gating_func=3)
    with pytest.raises(UnsupportedModel, match="expert_gating_func 3 is not supported; supported: 2"):
        converted(path)
    path = written("granitemoe", tmp_path / "b.gguf", "granitemoe", extra=("blk.0.ffn_up_shexp.weight",))
    with pytest.raises(UnsupportedModel, match=r"tensor blk\.0\.ffn_up_shexp\.weight is not part of granitemoe"):
        converted(path)
    with closing(GGUFWriter(tmp_path / "c.gguf", "deepseek2")) as writer:
        for name in ("attn_k_b", "attn_v_b"):
            writer.add_tensor(f"blk.0.{name}.weight", np.zeros((2, 4, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    with pytest.raises(UnsupportedModel, match="has attn_k_b and attn_v_b, which are not supported"):
        converted(tmp_path / "c.gguf")


@pytest.mark.parametrize("num_heads", [0, 3])
def test_impossible_head_count_is_refused(make_gguf: MakeGguf, tmp_path: Path, num_heads: int) -> None:
    make_gguf(tmp_path / "tiny.gguf", metadata=lambda writer: writer.add_head_count_kv(num_heads))
    with pytest.raises(WeightsError, match=f"attention.head_count_kv {num_heads} does not divide 4 query heads"):
        converted(tmp_path / "tiny.gguf")


def test_unknown_tensor_is_named(make_gguf: MakeGguf, tmp_path: Path) -> None:
    make_gguf(tmp_path / "tiny.gguf", tensors={"blk.0.attn_sinks.weight": np.zeros(32, dtype=np.float32)})
    with pytest.raises(UnsupportedModel, match=r"tensor blk\.0\.attn_sinks\.weight is not part of llama"):
        converted(tmp_path / "tiny.gguf")


def test_missing_tensor_is_named(make_gguf: MakeGguf, tmp_path: Path) -> None:
    make_gguf(tmp_path / "tiny.gguf", metadata=lambda writer: writer.add_block_count(3))
    with pytest.raises(WeightsError, match=r"tensor blk\.2\.attn_k\.weight is missing \(9 missing in all\)"):
        converted(tmp_path / "tiny.gguf")


def test_other_files_are_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    for content in (b"", b"GG", b"PK\x03\x04 a zip file"):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match="is not a GGUF file"):
            read_gguf(path)


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 0.9, 0.999])
def test_truncated_file_is_refused(make_gguf: MakeGguf, tmp_path: Path, fraction: float) -> None:
    path = tmp_path / "tiny.gguf"
    make_gguf(path)
    content = path.read_bytes()
    path.write_bytes(content[: 5 + math.floor((len(content) - 5) * fraction)])
    with pytest.raises(WeightsError, match=r"truncated, its (header|tensor data) reaches byte \d+ but the file has"):
        read_gguf(path)


def test_one_missing_byte_is_noticed(make_gguf: MakeGguf, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    make_gguf(path)
    last = max(read_gguf(path).tensors.values(), key=lambda tensor: tensor.offset)
    path.write_bytes(path.read_bytes()[: last.offset + last.data.nbytes - 1])
    with pytest.raises(WeightsError, match="tensor data reaches byte"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        pytest.param(4, struct.pack("<I", 99), id="version"),
        pytest.param(8, struct.pack("<Q", 1 << 60), id="tensor count"),
        pytest.param(16, struct.pack("<Q", 1 << 60), id="key count"),
        pytest.param(24, struct.pack("<Q", 1 << 60), id="key length"),
        pytest.param(32, b"\xff\xfe", id="key text"),
    ],
)
def test_damaged_header_is_refused(make_gguf: MakeGguf, tmp_path: Path, offset: int, content: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    make_gguf(path)
    edit(path, lambda whole: whole.__setitem__(slice(offset, offset + len(content)), content))
    with pytest.raises(WeightsError, match=r"damaged GGUF file: [^\n]+$"):
        read_gguf(path)
