"""GGUF blocks as they are: products as exact as float32's, the same bits in any company, memory of the file's size."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.cpu import build as building
from funitel.model_server.cpu import compiler
from funitel.model_server.cpu.compiler import INSTRUCTION_SETS
from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.cpu.footprint import matrix_bytes
from funitel.model_server.cpu.precision import ActivationDtype, MatrixKind, Tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.gguf_pointer import POINTER, part_of, read_pointer, write_pointer
from funitel.model_server.files.integrity import read_json
from funitel.model_server.hub.resolve import CONVERSION
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.loading.decoder import load
from funitel.model_server.quantized.block_types import BlockType
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import SettingsError, WeightsError
from funitel_testing import forward_worker
from funitel_testing.forward_worker import CPU, fused_decoder, fused_library, run, step_through
from funitel_testing.products import kept, product
from funitel_testing.ranks import run_ranks
from funitel_testing.servers import free_port
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_blocks import GPT2_SIZES, SIZES, add_blocks, values_of

Prompts = list[list[int]]
TYPES = ("Q4_0", "Q4_1", "Q8_0")


def make_prompts(*lengths: int) -> Prompts:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 288, (length,), generator=generator).tolist() for length in lengths]


def save_blocks(family: str, folder: Path, kind: str, **sizes: int) -> Path:
    sizes = (GPT2_SIZES if family == "gpt2" else SIZES) | sizes
    return add_blocks(save_tiny(family, folder, **sizes), lambda name: kind)


def logits_of(folder: Path, decoder: FusedDecoder, prompts: Prompts, chunk: int = 11) -> list[torch.Tensor]:
    spec = spec_of(read_json(folder / "config.json"))
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    cache = KVCache(spec, heads, 400, decoder.block_size, decoder.kv_dtype, CPU)
    return step_through(decoder, cache, prompts, 6, chunk)


def error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    ours, theirs = torch.cat(found), torch.cat(expected)
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.fixture
def exact_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values in float32, so that nothing but the products is left to differ from torch."""
    monkeypatch.setattr(Tier, "kv_kind", lambda *arguments: MatrixKind.FLOAT32)


# Products -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_a_product_is_that_of_the_values_whatever_the_rows_beside_it(kind: str) -> None:
    """Rows of very different size, and blocks; outputs that fill no panel; every number of rows up to two tiles."""
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(85, 192, generator=generator), torch.randn(25, 192, generator=generator)
    weight *= torch.logspace(-3, 3, 85)[:, None]
    x *= torch.logspace(-6, 6, 25)[:, None] * torch.logspace(-1, 1, 6).repeat_interleave(32)
    given, made = kept(MatrixKind[kind], weight)
    for name, needs, _ in INSTRUCTION_SETS:
        if needs <= building.cpu_flags():
            library = fused_library(name)
            found = product(library, MatrixKind[kind], given, x)
            sizes = x.double().norm(dim=1)[:, None] * made.norm(dim=1)  # [rows, outputs]
            assert ((found - x.double() @ made.T).abs() / sizes).max() < 2e-5
            for num_rows in range(1, 25):
                assert torch.equal(
                    product(library, MatrixKind[kind], given, x[:num_rows].contiguous()), found[:num_rows]
                )


@pytest.mark.parametrize("kind", TYPES)
def test_next_to_nothing_is_multiplied_as_nothing(kind: str) -> None:
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))
    found = product(fused_library(), MatrixKind[kind], kept(MatrixKind[kind], weight)[0], torch.full((1, 32), 5e-35))
    assert found.abs().max() == 0


@pytest.mark.usefixtures("exact_kv")
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", ["llama_bias", "smollm", "gpt2"])
def test_blocks_lose_next_to_nothing_against_the_weights_they_stand_for(family: str, kind: str, tmp_path: Path) -> None:
    folder = save_blocks(family, tmp_path, kind)
    prompts = make_prompts(43, 11, 20)
    decoder = fused_decoder(folder, Tier.GGUF, TensorParallel(), activations=ActivationDtype.INT16)
    assert set(decoder.program.kinds.values()) == {MatrixKind[kind]}
    assert error(logits_of(folder, decoder, prompts), run(folder, TensorParallel(), prompts, 6)) < 1e-3


@pytest.mark.parametrize("kind", TYPES)
def test_a_row_has_the_same_bits_in_any_company_threads_and_instruction_set(kind: str, tmp_path: Path) -> None:
    folder = save_blocks("llama", tmp_path, kind)
    prompts = make_prompts(43, 11, 76, 7)
    decoder = fused_decoder(folder, Tier.GGUF, TensorParallel())
    expected = logits_of(folder, decoder, prompts)
    others = [[logits_of(folder, decoder, [prompt])[0] for prompt in prompts]]
    others += [logits_of(folder, decoder, prompts, chunk) for chunk in (1, 2, 5, 13, 100)]
    others.append(logits_of(folder, fused_decoder(folder, Tier.GGUF, TensorParallel(), num_threads=1), prompts))
    for name, needs, _ in INSTRUCTION_SETS:
        if needs <= building.cpu_flags():
            other = fused_decoder(folder, Tier.GGUF, TensorParallel(), instruction_set=name)
            others.append(logits_of(folder, other, prompts))
    for found in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.usefixtures("exact_kv")
def test_sums_of_the_largest_codes_stay_exact(tmp_path: Path) -> None:
    """The lowest byte and the highest nibbles, all of one sign beside activations of one sign."""
    folder = save_blocks("llama", tmp_path, "Q8_0", num_hidden_layers=1)
    pointer = read_pointer(folder / POINTER)
    content = bytearray((folder / "blocks.gguf").read_bytes())
    for name, entry in pointer.tensors.items():
        if "mlp" in name:
            num_bytes = BlockType.Q8_0.row_bytes(entry.shape[0] * entry.shape[1])
            blocks = np.frombuffer(content, np.uint8, num_bytes, entry.offset).reshape(-1, 34)
            blocks[:, 2:] = 128  # as signed: -128
    (folder / "blocks.gguf").write_bytes(content)
    write_pointer(folder, replace(pointer, parts=(part_of(folder, folder / "blocks.gguf", 32),)))
    prompts = make_prompts(12)
    decoder = fused_decoder(folder, Tier.GGUF, TensorParallel(), activations=ActivationDtype.INT16)
    found = logits_of(folder, decoder, prompts)
    assert error(found, run(folder, TensorParallel(), prompts, 6)) < 1e-3


def test_what_is_no_block_is_kept_as_int8_beside_them(tmp_path: Path) -> None:
    """Another type, none; of two types side by side each is a matrix."""
    types = {"embed_tokens": None, "lm_head": "Q8_0", "v_proj": "Q4_1", "down_proj": None}
    folder = add_blocks(save_tiny("llama", tmp_path, **SIZES), lambda name: types.get(name.split(".")[-2], "Q4_0"))
    decoder = fused_decoder(folder, Tier.GGUF, TensorParallel())
    kinds = {layers[0].rpartition(".")[2]: kind for layers, kind in decoder.program.kinds.items()}
    assert kinds == {
        "embed_tokens": MatrixKind.INT8,
        "q_proj": MatrixKind.Q4_0,
        "v_proj": MatrixKind.Q4_1,
        "o_proj": MatrixKind.Q4_0,
        "gate_proj": MatrixKind.Q4_0,
        "down_proj": MatrixKind.INT8,
        "lm_head": MatrixKind.Q8_0,
    }
    prompts = make_prompts(30, 9)
    assert error(logits_of(folder, decoder, prompts), run(folder, TensorParallel(), prompts, 6)) < 0.15


def test_memory_is_that_of_the_blocks(tmp_path: Path) -> None:
    folder = save_blocks("smollm", tmp_path, "Q4_1")
    program = fused_decoder(folder, Tier.GGUF, TensorParallel()).program
    num_bytes = sum(values.numel() // 32 * 20 for values in values_of(folder).values() if values.dim() == 2)
    assert program.sharded_bytes == program.total_sharded_bytes == num_bytes
    assert program.held_bytes == num_bytes + 7 * 96 * 4  # norms
    assert matrix_bytes(MatrixKind.Q4_0, 17, 64) == 32 * 2 * 18


def test_a_file_does_not_stay_mapped_once_it_was_read(tmp_path: Path) -> None:
    """Its pages would count as memory of the process, as much again as the weights."""
    decoder = fused_decoder(save_blocks("smollm", tmp_path, "Q4_1"), Tier.GGUF, TensorParallel())
    assert decoder.has_blocks
    assert str(tmp_path / "blocks.gguf") not in Path("/proc/self/maps").read_text()


# Ranks ----------------------------------------------------------------------------------------------------------------


def test_two_ranks_compute_on_blocks_and_the_shares_fit_together(tmp_path: Path) -> None:
    folder = save_blocks("llama_bias", tmp_path / "model", "Q4_1")
    prompts = make_prompts(20, 7)
    job = {
        "folder": str(folder),
        "size": 2,
        "port": free_port(),
        "prompts": prompts,
        "num_decode": 6,
        "tiers": ["GGUF"],
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_ranks(forward_worker.serve_rank, tmp_path, 2)
    through_gloo, in_shared_memory = torch.load(tmp_path / "logits.pt")
    alone = run(folder, TensorParallel(), prompts, 6, Tier.GGUF)
    assert error(through_gloo, alone) < 2e-3
    assert error(in_shared_memory, alone) < 2e-3


def test_a_cut_through_a_block_makes_int8_of_that_matrix_alone(tmp_path: Path) -> None:
    folder = save_blocks("llama", tmp_path, "Q4_0", intermediate_size=160)
    shares = [fused_decoder(folder, Tier.GGUF, TensorParallel(rank, 2)).program for rank in range(2)]
    for program in shares:
        others = {layers[0].rpartition(".")[2] for layers, kind in program.kinds.items() if kind is MatrixKind.INT8}
        assert others == {"down_proj"}


# Loading --------------------------------------------------------------------------------------------------------------


def test_blocks_are_the_default_where_there_are_any(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = add_blocks(save_tiny("llama", tmp_path, **SIZES), lambda name: None if "down_proj" in name else "Q4_1")
    settings = ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1)
    executor, info = load(settings, folder)
    assert (info.dtype, executor.options.dtype) == ("gguf", torch.bfloat16)
    said = "weights are kept as stored (Q4_1), the default on a CPU; --dtype float32 keeps them exact"
    assert said in caplog.messages
    assert any("of 14 matrices 3 are kept as int8" in text and "down_proj" in text for text in caplog.messages)
    assert load(replace(settings, quantize="gguf"), folder)[1].dtype == "gguf"
    assert load(replace(settings, quantize="int8"), folder)[1].dtype == "int8"
    assert load(replace(settings, dtype="float32"), folder)[1].dtype == "torch.float32"


def test_blocks_that_are_not_there_cannot_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = save_tiny("llama", tmp_path / "plain")
    settings = ModelServerSettings(model_id=str(plain), device="cpu", num_threads=1, quantize="gguf")
    with pytest.raises(SettingsError, match="--quantize gguf: this model is no GGUF file"):
        load(settings, plain)
    folder = save_blocks("llama", tmp_path / "blocks", "Q4_0")
    with pytest.raises(SettingsError, match="--quantize gguf keeps blocks, --dtype float32 keeps float32"):
        load(replace(settings, dtype="float32"), folder)
    monkeypatch.setattr(compiler, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(SettingsError, match="--quantize gguf needs the fused CPU step: there is no C"):
        load(replace(settings, cache_dir=str(tmp_path / "nothing built")), folder)


def test_a_folder_converted_to_float32_still_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_tiny("llama", tmp_path)
    (folder / "source.json").write_text(json.dumps({"gguf": "/gone/model.gguf", "conversion": CONVERSION - 1}))
    settings = ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1)
    assert load(settings, folder)[1].dtype == "int8"
    said = f"{folder} was converted by an older version, to float32: name the GGUF as --model-id"
    assert said in caplog.messages


@pytest.mark.parametrize("note", ['{"dataset": "x"}', "[1]", "not JSON"])
def test_a_note_of_somebody_elses_says_nothing_of_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, note: str
) -> None:
    folder = save_tiny("llama", tmp_path)
    (folder / "source.json").write_text(note)
    settings = ModelServerSettings(model_id=str(folder), device="cpu", num_threads=1)
    assert load(settings, folder)[1].dtype == "int8"
    assert "older version" not in caplog.text


def test_where_no_block_can_be_used_the_tier_is_int8_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MatrixKind, "of_blocks", lambda block_type: None)  # a type the engine does not have
    only_v = add_blocks(save_tiny("llama", tmp_path, **SIZES), lambda name: "Q8_0" if "v_proj" in name else None)
    settings = ModelServerSettings(model_id=str(only_v), device="cpu", num_threads=1, quantize="gguf")
    assert load(settings, only_v)[1].dtype == "int8"
    assert "no matrix of the GGUF can be used as it is; weights are kept as int8" in caplog.text


def test_blocks_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = save_blocks("llama", tmp_path, "Q4_0")
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(WeightsError, match=r"gate_proj.weight has shape \[192, 96\], expected \[96, 96\]"):
        fused_decoder(folder, Tier.GGUF, TensorParallel())


def test_weights_saved_beside_a_pointer_count(tmp_path: Path) -> None:
    folder = save_blocks("llama", tmp_path / "model", "Q4_0")
    save_file({name: values * 1.01 for name, values in values_of(folder).items()}, folder / "model.safetensors")
    settings = ModelServerSettings(model_id="", device="cpu", num_threads=1)
    assert load(settings, folder)[1].dtype == "int8"


class Counted:
    """In place of a progress bar."""

    shown: "list[Counted]" = []

    def __init__(self, label: str, total_bytes: int) -> None:
        self.total_bytes, self.done_bytes = total_bytes, 0
        self.shown.append(self)

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("left_out", ["none", "down_proj"])
def test_progress_is_of_what_a_tier_reads(left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("llama", tmp_path, **SIZES)
    floats = sum(tensor.numel() * 4 for tensor in load_file(folder / "model.safetensors").values())
    add_blocks(folder, lambda name: "F16" if left_out in name else "Q4_1")
    blocks = {
        name: values.numel() for name, values in values_of(folder).items() if values.dim() == 2 and left_out not in name
    }
    kept = floats - 4 * sum(blocks.values()) + sum(blocks.values()) // 32 * 20
    monkeypatch.setattr(Counted, "shown", [])
    monkeypatch.setattr("funitel.model_server.checkpoint.weights.Progress", Counted)
    for tier, total in ((Tier.GGUF, kept), (Tier.INT8, floats)):
        fused_decoder(folder, tier, TensorParallel())
        (progress,) = Counted.shown
        assert progress.done_bytes == progress.total_bytes == total
        Counted.shown.clear()
