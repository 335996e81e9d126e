"""The same weights through every format give the same logits; quantised ones those of what they stand for."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from funitel.model_server.convert.gguf_reader import read_gguf
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.files.gguf_refusal import refuse_described
from funitel.model_server.hub import resolve
from funitel.proto.errors import StartupError, UnsupportedModel
from funitel_testing import forward_worker
from funitel_testing.block_oracle import BLOCKS, random_blocks, values_of
from funitel_testing.executors import load_executor
from funitel_testing.tiny import VOCAB_SIZE, save_tiny
from funitel_testing.tiny_gguf import add_byte_tokenizer, finish, permuted
from funitel_testing.tiny_llama2c import write_llama2c, write_tokenizer

Array = npt.NDArray[np.float32]
HEADS, KV_HEADS, LAYERS, CONTEXT = 4, 2, 2, 128
SIZES = {
    "hidden_size": 256,  # a whole super-block of the K types
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
}
PROMPTS = [[5, 200, 17, 0, 42, 9, 101], list(range(40))]
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("source"), **SIZES)


@pytest.fixture
def tensors(source: Path) -> dict[str, Array]:
    return dict(load_file(source / "model.safetensors"))


def logits(folder: Path) -> list[torch.Tensor]:
    return forward_worker.run(folder, TensorParallel(), PROMPTS, 3)


def same_config(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text((source / name).read_text())
    return folder


def as_safetensors(source: Path, folder: Path, tensors: dict[str, Array]) -> Path:
    save_file(tensors, same_config(source, folder) / "model.safetensors", {"format": "pt"})
    return folder


def as_shards(source: Path, folder: Path, tensors: dict[str, Array], write: Callable[..., None], stem: str) -> Path:
    same_config(source, folder)
    names, suffix = sorted(tensors), stem.partition(".")[2]
    files = {f"{stem.partition('.')[0]}-{i + 1:05}-of-00003.{suffix}": names[i::3] for i in range(3)}
    for file, some in files.items():
        write({name: tensors[name] for name in some}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, some in files.items() for name in some}}
    (folder / f"{stem}.index.json").write_text(json.dumps(index))
    return folder


def save_pickle(tensors: dict[str, Array], path: Path, *, is_zip: bool = True) -> None:
    found = {name: torch.from_numpy(values) for name, values in tensors.items()}
    torch.save(found, path, _use_new_zipfile_serialization=is_zip)


def as_pickle(source: Path, folder: Path, tensors: dict[str, Array], *, is_zip: bool) -> Path:
    save_pickle(tensors, same_config(source, folder) / "pytorch_model.bin", is_zip=is_zip)
    return folder


def as_gguf(
    path: Path, tensors: dict[str, Array], kinds: dict[str, Kind], blocks: dict[str, npt.NDArray[np.uint8]]
) -> str:
    """Write the file llama.cpp's converter would; matrices in `blocks` as these, the others of the type in `kinds`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    add_byte_tokenizer(writer)
    for name, values in tensors.items():
        stem = name.removesuffix(".weight")
        parts = stem.split(".")
        place = f"blk.{parts[2]}.{GGUF_NAMES['.'.join(parts[3:])]}" if "layers" in parts else GGUF_NAMES[stem]
        kind = kinds.get(name, Kind.F32)
        data = blocks[name] if name in blocks else gguf.quantize(values, kind)
        if place.endswith(("attn_q", "attn_k")):
            data = permuted(data, HEADS if place.endswith("attn_q") else KV_HEADS)
        writer.add_tensor(f"{place}.weight", np.ascontiguousarray(data), raw_dtype=kind)
    finish(writer)
    return str(path)


def assert_same(folder: Path, expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(logits(folder), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_exact_formats_give_the_same_bits(source: Path, tensors: dict[str, Array], tmp_path: Path) -> None:
    expected = logits(source)
    gguf_path = as_gguf(tmp_path / "exact.gguf", tensors, {}, {})
    folders = [
        as_safetensors(source, tmp_path / "one", tensors),
        as_shards(source, tmp_path / "shards", tensors, save_file, "model.safetensors"),
        as_pickle(source, tmp_path / "zip", tensors, is_zip=True),
        as_pickle(source, tmp_path / "old", tensors, is_zip=False),
        as_shards(source, tmp_path / "pickles", tensors, save_pickle, "pytorch_model.bin"),
        resolve.resolve(gguf_path, cache_dir=tmp_path / "cache").folder,
    ]
    for version in (0, 1):
        path = tmp_path / f"v{version}" / "model.bin"
        path.parent.mkdir()
        write_tokenizer(path.with_name("tokenizer.bin"), VOCAB_SIZE)
        write_llama2c(path, tensors, version=version, **llama2c_sizes())
        folders.append(resolve.resolve(str(path), cache_dir=tmp_path / "cache").folder)
    for folder in folders:
        assert_same(folder, expected)


def llama2c_sizes() -> dict[str, int]:
    return {"num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "context": CONTEXT}


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_half_formats_are_what_the_halves_stand_for(
    source: Path, tensors: dict[str, Array], tmp_path: Path, kind: Kind
) -> None:
    dtype = torch.float16 if kind is Kind.F16 else torch.bfloat16
    halves = {name: torch.from_numpy(values).to(dtype) for name, values in tensors.items()}
    rounded = {name: half.float().numpy() for name, half in halves.items()}
    expected = logits(as_safetensors(source, tmp_path / "rounded", rounded))
    matrices = {name: kind for name, values in tensors.items()}
    path = as_gguf(tmp_path / "half.gguf", tensors, matrices, {})
    assert_same(resolve.resolve(path, cache_dir=tmp_path / "cache").folder, expected)
    torch.save(halves, same_config(source, tmp_path / "pickle") / "pytorch_model.bin")
    assert_same(tmp_path / "pickle", expected)


def test_every_quantised_type_is_what_its_blocks_stand_for(
    source: Path, tensors: dict[str, Array], tmp_path: Path
) -> None:
    """One file with a matrix of each type; the reference is read one number at a time."""
    matrices = [name for name, values in tensors.items() if values.ndim == 2 and "layers" in name]
    assert len(matrices) >= len(BLOCKS)
    kinds, blocks = {}, {}
    for seed, (name, kind) in enumerate(zip(matrices, BLOCKS, strict=False)):
        kinds[name] = Kind[kind]
        blocks[name] = random_blocks(kind, tensors[name].shape, seed)
        tensors[name] = values_of(kind, blocks[name])
    path = as_gguf(tmp_path / "blocks.gguf", tensors, kinds, blocks)
    expected = logits(as_safetensors(source, tmp_path / "stands for", tensors))
    assert_same(resolve.resolve(path, cache_dir=tmp_path / "cache").folder, expected)


def test_llama2c_int8_is_what_its_groups_stand_for(source: Path, tensors: dict[str, Array], tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    write_tokenizer(tmp_path / "tokenizer.bin", VOCAB_SIZE)
    kept = write_llama2c(path, tensors, version=2, **llama2c_sizes())
    expected = logits(as_safetensors(source, tmp_path / "kept", kept))
    assert_same(resolve.resolve(str(path), cache_dir=tmp_path / "cache").folder, expected)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_read_to_the_last_bit(tmp_path: Path, kind: str) -> None:
    count = BLOCKS[kind][0]
    rows = random_blocks(kind, (40, 2 * count), 3, scale=1.0)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("w", rows, raw_dtype=Kind[kind])
    finish(writer)
    file = read_gguf(tmp_path / "x.gguf")
    expected = values_of(kind, rows)
    assert file.shape("w") == expected.shape
    np.testing.assert_array_equal(file.dequantise("w"), expected)
    np.testing.assert_array_equal(file.dequantise("w", slice(3, 7)), expected[3:7])


def test_a_tied_llama2c_is_served_with_its_tokenizer(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "source", **SIZES, tie_word_embeddings=True)
    tensors = {
        name: values for name, values in load_file(folder / "model.safetensors").items() if "lm_head" not in name
    }
    write_tokenizer(tmp_path / "tokenizer.bin", VOCAB_SIZE)
    for version in (0, 1):
        path = tmp_path / f"stories{version}.bin"
        write_llama2c(path, tensors, version=version, **llama2c_sizes())
        found = resolve.resolve(str(path), cache_dir=tmp_path / "cache").folder
        assert_same(found, logits(folder))
    load_executor(found)
    tokenizer = Tokenizer.from_file(str(found / "tokenizer.json"))
    assert tokenizer.encode("hello a").tokens == ["<s>", "\u2581hello", "\u2581", "a"]
    assert tokenizer.decode(tokenizer.encode("hello\nX a").ids) == "hello\nX a"
    assert json.loads((found / "generation_config.json").read_text())["eos_token_id"] == [2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:200], "has 200 bytes, the file|truncated: its header has 256 bytes"),
        (lambda content: content[:-4], r"is truncated: its header says \d+ bytes, the file has \d+"),
        (lambda content: content + b"1234", "is too long: its header says"),
        (lambda content: content[:4] + b"\x09" + content[5:], "version 9 of llama2.c is not supported"),
        (lambda content: content[:20] + b"\x05" + content[21:], "with 5 and 2 heads"),
        (lambda content: content[:8] + b"\xff\xff\xff\xff" + content[12:], "hidden_size is -1"),
        (lambda content: b"x" * 500, "is no model of llama2.c"),
        (lambda content: b"", "it has 0 bytes"),
    ],
)
def test_a_damaged_llama2c_is_one_line(
    tensors: dict[str, Array], tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "model.bin"
    write_tokenizer(tmp_path / "tokenizer.bin", VOCAB_SIZE)
    write_llama2c(path, tensors, version=1, **llama2c_sizes())
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StartupError, match=message):
        resolve.resolve(str(path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-2], r"token \d+ (has \d+ bytes|of 288 cannot be read)"),
        (lambda content: content + b"1", r"tokens take \d+"),
        (lambda content: content[:8] + b"\xff\xff\xff\x7f" + content[12:], "token 0 has 2147483647 bytes"),
        (lambda content: content[:12] + b"\xff\xff" + content[14:], "token 0 of 288 cannot be read"),
    ],
)
def test_a_damaged_tokenizer_of_llama2c_is_one_line(
    tensors: dict[str, Array], tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    write_llama2c(tmp_path / "model.bin", tensors, version=1, **llama2c_sizes())
    with pytest.raises(StartupError, match=r"tokenizer\.bin: No such file"):
        resolve.resolve(str(tmp_path / "model.bin"), cache_dir=tmp_path / "cache")
    path = tmp_path / "tokenizer.bin"
    write_tokenizer(path, VOCAB_SIZE)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StartupError, match=message):
        resolve.resolve(str(tmp_path / "model.bin"), cache_dir=tmp_path / "cache")


def test_a_type_nobody_reads_is_named(tensors: dict[str, Array], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    path = as_gguf(
        tmp_path / "x.gguf",
        {**tensors, name: np.zeros((256, 256), np.int32)},
        {name: Kind.I32},
        {name: np.zeros((256, 256), np.int32)},
    )
    folder = resolve.resolve(path, cache_dir=tmp_path / "cache").folder
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_up\.weight has type I32, which cannot be read"):
        refuse_described(folder)
