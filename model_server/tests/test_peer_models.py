"""Models with random weights for `benchmarks/peers.py`: the types of their tensors, their values, and their tokens."""

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from funitel_testing.tiny_gguf import add_byte_tokenizer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # last: scripts there have names that packages have too

shapes = import_module("peer_grid.shapes")
random_models = import_module("peer_grid.random_models")

TINY = shapes.Shape("tiny", 256, 512, 8, 4, 2, 64, 300, is_tied=True)
MIXTURE = replace(TINY, name="mixture", is_tied=False, num_experts=4, experts_per_token=2)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF with a tokenizer of 260 tokens, and one tensor."""
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    add_byte_tokenizer(writer)
    writer.add_tensor("token_embd.weight", np.zeros((260, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def counts(shape: object, form: str) -> dict[str, dict[str, int]]:
    """For each kind of tensor: how many layers have which type."""
    found: dict[str, dict[str, int]] = {}
    for tensor in shapes.tensors_of(shape):
        name = tensor.gguf_name.removeprefix(f"blk.{tensor.layer}.").removesuffix(".weight")
        kinds = found.setdefault(name, {})
        kind = shapes.type_of(tensor, shape, form).name
        kinds[kind] = kinds.get(kind, 0) + 1
    return found


def test_the_mixture_of_the_demo_models_shape_is_that_of_llama_quantize() -> None:
    """What `llama-quantize --allow-requantize` of llama-cpp-python 0.3.36 wrote of the demo model, tensor by tensor."""
    found = counts(shapes.DEMO_SHAPE, "q4_k_m")
    assert found["token_embd"] == {"Q8_0": 1}
    assert found["attn_v"] == {"Q8_0": 14, "Q5_0": 16}
    assert found["ffn_down"] == {"Q6_K": 14, "Q4_K": 16}
    assert found["attn_q"] == found["ffn_up"] == {"Q5_0": 30}
    assert counts(shapes.DEMO_SHAPE, "q4_0")["token_embd"] == {"Q8_0": 1}
    assert counts(shapes.SHAPES["1b"], "q4_0")["token_embd"] == {"Q6_K": 1}
    mixture = counts(shapes.SHAPES["moe"], "q4_k_m")
    assert (mixture["output"], mixture["token_embd"]) == ({"Q6_K": 1}, {"Q4_K": 1})
    assert mixture["ffn_gate_inp"] == mixture["attn_q_norm"] == {"F32": 14}


def test_sizes_are_those_of_the_models_they_are_named_for() -> None:
    billions = {
        name: sum(tensor.num_elements for tensor in shapes.tensors_of(shape)) / 1e9
        for name, shape in shapes.SHAPES.items()
    }
    assert {name: round(value, 2) for name, value in billions.items()} == {
        "0.5b": 0.49,
        "1b": 1.24,
        "3b": 3.21,
        "8b": 8.03,
        "moe": 9.35,
    }
    assert shapes.num_bytes(shapes.SHAPES["moe"], "q4_k_m") < 8e9
    assert shapes.num_active(shapes.SHAPES["moe"]) < shapes.num_active(shapes.SHAPES["1b"])


@pytest.mark.parametrize("form", ["q4_k_m", "q4_0", "q8_0"])
@pytest.mark.parametrize("shape", [TINY, MIXTURE], ids=lambda shape: str(shape.name))
def test_a_file_has_weights_that_keep_the_size_of_activations(
    shape: object, form: str, demo: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    random_models.write_gguf(path, shape, form, demo)
    reader = gguf.GGUFReader(path)
    expected = {tensor.gguf_name: tensor for tensor in shapes.tensors_of(shape)}
    assert [tensor.name for tensor in reader.tensors] == list(expected)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        sizes = expected[tensor.name].sizes
        assert tensor.tensor_type == shapes.type_of(expected[tensor.name], shape, form)
        assert values.size == expected[tensor.name].num_elements
        if len(sizes) == 1:
            assert (values == 1).all()
            continue
        values = values.reshape(-1, sizes[-1])
        if sizes[0] == TINY.vocab:
            silent = [0, *range(95, 189), *range(223, 257), *range(260, 300)]  # the end, parts of characters, padding
            assert not values[silent].any()
            assert values[[1, 50, 259]].any(axis=1).all()
            values = values[1:95]
        assert values.std() == pytest.approx(sizes[-1] ** -0.5, rel=0.1)
        assert abs(values.mean()) < 0.1 * values.std()
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert (len(tokens), tokens[1], tokens[-1]) == (300, "!", "[PAD299]")


def test_a_checkpoint_has_every_tensor_in_bfloat16(demo: Path, tmp_path: Path) -> None:
    random_models.write_checkpoint(tmp_path, TINY, demo)
    import torch
    from safetensors.torch import load_file as load

    found = load(tmp_path / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        tensor.hf_name: tensor.sizes for tensor in shapes.tensors_of(TINY)
    }
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    weights = found["model.layers.3.mlp.down_proj.weight"].float()
    assert weights.std().item() == pytest.approx(512**-0.5, rel=0.05)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("hell").ids == [259]
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 300
