"""Models of blocks, written or made on loading: as the same weights in floating point, in kernels and in torch."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.loading.parts import open_weights
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.footprint import torch_weight_bytes
from funitel.model_server.quantized.block_formats import FORMATS
from funitel.model_server.quantized.matmul import INT8
from funitel.model_server.quantized.select import MADE, choose_products
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import ModelServerSettings, QuantizeSettings
from funitel.model_server.settings.block_names import ALIASES, BLOCK_FORMATS
from funitel.model_server.tools.quantize.command import quantize
from funitel.proto.errors import FunitelError, SettingsError
from funitel_testing import forward_worker
from funitel_testing.executors import ids_of, load_executor, run_alone, start
from funitel_testing.threads import on_ranks, one_at_a_time
from funitel_testing.tiny import save_tiny
from funitel_testing.zoo import ZOO

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NUM_DECODE = 2
PROMPTS = [list(range(40, 60)), [7, 8, 9]]
# Two ranks cut 192 hidden units at 96: inside blocks of 64.
LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES = {"llama": LLAMA | {"intermediate_size": 192}, "gpt2": {"n_embd": 64, "n_head": 4, "n_inner": 192}}
TABLES = ("embed_tokens", "lm_head", "wte")


def save(family: str, folder: Path) -> Path:
    return save_tiny(family, folder, **SIZES[family], num_hidden_layers=1)


def written(folder: Path, to: str, tensor: str | None = None) -> Path:
    """The model with its matrices as blocks."""
    target = folder.with_name("blocks")
    settings = QuantizeSettings(
        model_id=str(folder), output_dir=str(target), to=to, tensor=tensor, device="cpu", num_threads=1
    )
    quantize(settings, folder)
    return target


def decoded(folder: Path, blocks: Path, *, has_plain_tables: bool = False) -> Path:
    """The model in floating point with the weights that blocks stand for; of tables as they were where that is said."""
    tensors, found = load_file(folder / "model.safetensors"), load_file(blocks / "model.safetensors")
    described = read_json(blocks / "config.json")["quantization_config"]
    is_transposed = any(".c_attn." in name for name in tensors)
    count = 0
    for stem in (name.removesuffix(".weight_blocks") for name in found if name.endswith(".weight_blocks")):
        is_table = any(table in stem for table in TABLES)
        if is_table and has_plain_tables:
            continue
        chosen = FORMATS[described["tensors"].get(stem, described["format"])]
        weights = chosen.decode(found[f"{stem}.weight_blocks"], int(found[f"{stem}.weight_inputs"]))
        tensors[f"{stem}.weight"] = weights.t().contiguous() if is_transposed and not is_table else weights
        count += 1
    assert count > 3
    target = folder.with_name("decoded")
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    save_file(tensors, target / "model.safetensors")
    return target


def in_torch(folder: Path, parallel: TensorParallel) -> list[torch.Tensor]:
    return forward_worker.run(folder, parallel, PROMPTS, NUM_DECODE)


def in_kernels(folder: Path, parallel: TensorParallel, asked: str | None = None) -> list[torch.Tensor]:
    """Logits with every layer of blocks in the Triton kernels; the footprint is as it was predicted."""
    from funitel.model_server.quantized.matmul_kernels import PackedProduct, TritonProducts

    spec = spec_of(read_json(folder / "config.json"))
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    weights = Weights(folder, torch.float32, CPU, spec.names.prefix, is_shown=False)
    weights.round_as(asked, None, spec.names)
    weights.products = TritonProducts(16)
    predicted = torch_weight_bytes(spec, parallel.rank, parallel.size, torch.float32, CPU, checkpoint=weights)
    decoder = Decoder(spec, weights, parallel, TorchAttention(4, CPU))
    layer: Any = decoder.layers[0]
    for product in (layer.mlp.up.matmul, layer.mlp.down.matmul, layer.attention.out.matmul):
        assert isinstance(product, PackedProduct)
    assert weights.held_bytes == predicted
    return forward_worker.step_through(decoder, KVCache(spec, heads, 200, 4, torch.float32, CPU), PROMPTS, NUM_DECODE)


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-4


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from funitel.model_server.quantized import matmul_kernels

    monkeypatch.setattr(matmul_kernels, "multiply", one_at_a_time(matmul_kernels.multiply))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("family", "to", "tensor", "size"),
    [
        ("llama", "q3h", "down_proj=q6,v_proj=q8,gate=q5_b32t1", 2),
        ("llama", "a16w4", None, 1),
        ("gpt2", "q4", "c_fc=a16w8", 2),
    ],
)
def test_kernels_compute_on_written_blocks(tmp_path: Path, family: str, to: str, tensor: str | None, size: int) -> None:
    folder = save(family, tmp_path / "model")
    blocks = written(folder, to, tensor)
    expected = in_torch(decoded(folder, blocks), TensorParallel())
    assert_close(on_ranks(size, lambda parallel: in_kernels(blocks, parallel)), expected)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("family", "to", "size"), [("llama", "q3h", 2), ("gpt2", "a16w8", 1), ("gpt2", "q6", 2)])
def test_kernels_compute_on_blocks_that_are_made_on_loading(tmp_path: Path, family: str, to: str, size: int) -> None:
    folder = save(family, tmp_path / "model")
    expected = in_torch(decoded(folder, written(folder, to), has_plain_tables=True), TensorParallel())
    assert_close(on_ranks(size, lambda parallel: in_kernels(folder, parallel, to)), expected)


@pytest.mark.parametrize(("family", "size"), [("llama", 1), ("llama", 2), ("gpt2", 2)])
def test_torch_computes_on_the_weights_that_blocks_stand_for(tmp_path: Path, family: str, size: int) -> None:
    folder = save(family, tmp_path / "model")
    blocks = written(folder, "q3h", "mlp=a16w4_g64")
    expected = in_torch(decoded(folder, blocks), TensorParallel())
    assert_close(on_ranks(size, lambda parallel: in_torch(blocks, parallel)), expected)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mamba"])
def test_models_with_states_are_computed_in_torch(tmp_path: Path, name: str) -> None:
    tiny, folder = ZOO[name], tmp_path / "model"
    replace(tiny, config={**tiny.config, "hidden_size": 64}).save(folder)
    blocks = written(folder, "q4")
    expected = in_torch(decoded(folder, blocks), TensorParallel())
    assert_close(in_torch(blocks, TensorParallel()), expected)
    assert_close(on_ranks(2, lambda parallel: in_torch(blocks, parallel)), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_fused_step_makes_the_blocks_that_the_tool_writes(tmp_path: Path, family: str) -> None:
    """Also of a family that stores its layers the other way round."""
    folder = save(family, tmp_path / "model")
    answers = []
    for chosen, asked in ((folder, "q5"), (written(folder, "q5"), None)):
        executor = load_executor(chosen, dtype=None, quantize=asked)
        answers.append(ids_of(run_alone(executor, start(1, PROMPTS[0], 8))))
    assert answers[0] == answers[1]


# On a GPU ------------------------------------------------------------------------------------------------------------


def test_every_name_of_blocks_makes_them_on_a_gpu_and_a8w8_is_int8() -> None:
    assert all(MADE[name] is None for name in (*ALIASES, *BLOCK_FORMATS))
    assert MADE["a8w8"] == MADE["int8"] == INT8


@pytest.mark.parametrize("asked", ["q3h", "a16w4_g32", "a8w8"])
def test_without_kernels_blocks_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    def missing(_: object) -> None:
        raise RuntimeError("no such card")

    monkeypatch.setattr(torch.cuda, "get_device_properties", missing)
    with pytest.raises(SettingsError, match=f"^--quantize {asked} needs the Triton kernels: "):
        choose_products(asked, None, CUDA, torch.bfloat16)


def test_weights_for_a_gpu_become_blocks_there(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "model")
    spec = spec_of(read_json(folder / "config.json"))

    def opened(device: torch.device, chosen: Path = folder, **given: Any) -> Weights:
        return open_weights(ModelServerSettings(model_id=str(chosen), **given), chosen, spec, device)[0]

    stem = "model.layers.0.mlp.down_proj"
    weights = opened(CUDA, quantize="q3h", quantize_tensors="down=q6")
    assert weights.is_quantised(stem)
    assert not opened(CUDA, quantize="a8w8").is_quantised(stem)
    assert not opened(CUDA, quantize="int8").is_quantised(stem)
    with pytest.raises(SettingsError, match="--quantize-tensors down=q6 is for --quantize with blocks"):
        opened(CUDA, quantize="int8", quantize_tensors="down=q6")
    with pytest.raises(SettingsError, match="--quantize q4: this checkpoint is quantised as q3h_b64t1"):
        opened(CUDA, written(folder, "q3h"), quantize="q4")


# Damage --------------------------------------------------------------------------------------------------------------

STEM = "model.layers.0.mlp.down_proj"
Tensors = dict[str, torch.Tensor]


def _cut(tensors: Tensors, _: Any) -> None:
    tensors[f"{STEM}.weight_blocks"] = tensors[f"{STEM}.weight_blocks"][:, :-1].contiguous()


def _more_inputs(tensors: Tensors, _: Any) -> None:
    tensors[f"{STEM}.weight_inputs"] += 64


def _no_inputs(tensors: Tensors, _: Any) -> None:
    del tensors[f"{STEM}.weight_inputs"]


def _two_sizes(tensors: Tensors, _: Any) -> None:
    tensors[f"{STEM}.weight_inputs"] = torch.tensor([192, 192], dtype=torch.int32)


def _signed(tensors: Tensors, _: Any) -> None:
    tensors[f"{STEM}.weight_blocks"] = tensors[f"{STEM}.weight_blocks"].view(torch.int8)


def _nan(tensors: Tensors, _: Any) -> None:
    tensors[f"{STEM}.weight_blocks"][3, 2:4] = torch.tensor([0, 0x7E], dtype=torch.uint8)


def _unknown(_: Tensors, config: Any) -> None:
    config["tensors"][STEM] = "q9"


def _nameless(_: Tensors, config: Any) -> None:
    del config["format"]


def _listed(_: Tensors, config: Any) -> None:
    config["tensors"] = ["q8"]


def _other_format(_: Tensors, config: Any) -> None:
    config["format"] = "q8_b32t1"


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (_cut, f"tensor {STEM}.weight_blocks is U8 with 95 bytes an output, expected 96 of q3h_b64t1 for 192 inputs"),
        (_more_inputs, f"tensor {STEM}.weight_blocks is U8 with 96 bytes an output, expected 128 of q3h_b64t1"),
        (_no_inputs, f"the checkpoint lacks tensor {STEM}.weight_inputs"),
        (_two_sizes, f"tensor {STEM}.weight_inputs has shape [2], expected [1]"),
        (_signed, f"tensor {STEM}.weight_blocks is I8 with 96 bytes an output"),
        (_nan, f"tensor {STEM}.weight_blocks holds the scale nan; scales must be finite"),
        (_unknown, "format 'q9' is not supported with funitel-blocks; supported: q8_b32t1, "),
        (_nameless, "format None is not supported with funitel-blocks"),
        (_listed, "tensors must be an object, found ['q8']"),
        (_other_format, "bytes an output, expected 216 of q8_b32t1 for 192 inputs"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("dtype", ["float32", None], ids=["torch", "fused"])
def test_a_damaged_folder_is_refused_in_one_line(
    tmp_path: Path, damage: Callable[[Tensors, Any], None], line: str, dtype: str | None
) -> None:
    blocks = written(save("llama", tmp_path / "model"), "q3h")
    tensors, config = load_file(blocks / "model.safetensors"), read_json(blocks / "config.json")
    damage(tensors, config["quantization_config"])
    save_file(tensors, blocks / "model.safetensors")
    (blocks / "config.json").write_text(json.dumps(config))
    with pytest.raises(FunitelError) as refused:
        load_executor(blocks, dtype=dtype)
    assert line in refused.value.message
    assert "\n" not in refused.value.message
