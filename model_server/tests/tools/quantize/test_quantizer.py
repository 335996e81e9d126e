"""`funitel-server quantize` on tiny models: what it writes, that shards and others read it, and what it refuses."""

import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.files.texts import BUILT_IN
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import QUANTIZE_METHODS, QuantizeSettings
from funitel.model_server.tools.quantize import folder as output
from funitel.model_server.tools.quantize.calibration import calibration_texts, tokenize
from funitel.model_server.tools.quantize.command import quantize
from funitel.model_server.tools.quantize.job import Report
from funitel.proto.errors import SettingsError, StartupError, UnsupportedModel, WeightsError
from funitel_testing import forward_worker
from funitel_testing.executors import ids_of, load_executor, run_alone, start
from funitel_testing.published import MODELS, save_published
from funitel_testing.tiny import save_tiny

PROMPTS = [[72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100], list(range(30, 80))]
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
GPT2_SIZES = {"n_embd": 64, "n_head": 4, "n_inner": 96}


def save(folder: Path, family: str = "llama", **changes: Any) -> Path:
    return save_tiny(family, folder, **((GPT2_SIZES if family == "gpt2" else SIZES) | changes))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "model")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text(BUILT_IN.read_text()[:4000])
    return path


def run(model: Path, target: Path, method: str = "gptq", **fields: Any) -> Report:
    if method == "gptq":
        fields = {"groupsize": 32, "sequence_length": 200, "num_samples": 8} | fields
    settings = QuantizeSettings(
        model_id=str(model), output_dir=str(target), method=method, device="cpu", num_threads=1, **fields
    )
    return quantize(settings, model)


def logits(folder: Path) -> torch.Tensor:
    return torch.cat(forward_worker.run(folder, TensorParallel(), PROMPTS, 2))


def weight_errors(model: Path, quantised: Path) -> dict[str, float]:
    """Relative error of every quantised layer's weights, by name, as a shard reads them."""
    source = load_file(model / "model.safetensors")
    found = Weights(quantised, torch.float32, torch.device("cpu"))
    held = load_file(quantised / "model.safetensors")
    errors = {}
    for stem in (name.removesuffix(".weight") for name in source if name not in held):
        expected = source[f"{stem}.weight"].t() if ".c_" in stem else source[f"{stem}.weight"]
        weight = found.read_linear(stem, *expected.shape)
        errors[stem] = float((weight - expected).norm() / expected.norm())
    return errors


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("family", ["llama", "llama_bias", "smollm", "mistral", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize(("method", "most"), [("gptq", 0.4), ("int8", 0.01), ("q4", 0.11)])
def test_every_family_is_written_and_read_again(
    tmp_path: Path, texts: Path, family: str, method: str, most: float
) -> None:
    model = save(tmp_path / "model", family)
    fields = {"calibration_file": str(texts)} if method == "gptq" else {}
    report = run(model, tmp_path / "out", method, **fields)
    assert report.kept == []
    assert len(weight_errors(model, tmp_path / "out")) == report.num_quantised == (12 if family == "gpt2" else 21)
    assert max(weight_errors(model, tmp_path / "out").values()) < most
    if method == "int8":  # four bits are too few for a model of random weights to remain the same
        expected, found = logits(model), logits(tmp_path / "out")
        assert 0 < (found - expected).norm() / expected.norm() < 0.15
    assert left_in(tmp_path) == ["model", "out", "texts.txt"]


def test_a_shard_serves_what_was_written_and_checks_the_flag(tmp_path: Path, model: Path) -> None:
    for method in set(QUANTIZE_METHODS) - {"none"}:
        run(model, tmp_path / method, method)
        executor = load_executor(tmp_path / method, quantize=method)
        found = ids_of(run_alone(executor, start(1, PROMPTS[0])))
        assert len(found) == 8
        named_by_kernel = load_executor(tmp_path / method, quantize="marlin")
        assert ids_of(run_alone(named_by_kernel, start(1, PROMPTS[0]))) == found
        with pytest.raises(SettingsError, match=f"this checkpoint is quantised as {method}"):
            load_executor(tmp_path / method, quantize="int8" if method != "int8" else "q4")
    with pytest.raises(SettingsError, match="--quantize marlin: it names kernels"):
        load_executor(model, quantize="marlin")


def test_the_folder_is_complete(tmp_path: Path, model: Path) -> None:
    (model / "source.json").write_text("{}")
    (model / "funitel.json").write_text('{"sampling": {}}')
    (model / "LICENSE").write_text("terms")
    (model / "training.bin").write_text("weights of something")
    run(model, tmp_path / "out" / "deep")
    assert left_in(tmp_path / "out" / "deep") == [
        "LICENSE",
        "config.json",
        "funitel-manifest.json",
        "funitel-verified.json",
        "funitel.json",
        "generation_config.json",
        "model.safetensors",
        "quantize_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((tmp_path / "out/deep/config.json").read_text())
    before = json.loads((model / "config.json").read_text())
    found = config.pop("quantization_config")
    assert config == before
    expected = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    assert found.items() >= expected.items()
    assert json.loads((tmp_path / "out/deep/quantize_config.json").read_text()) == found


@pytest.mark.parametrize("method", ["none", "int8"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_sparse_checkpoint_becomes_dense_and_is_described_so(tmp_path: Path, key: str, method: str) -> None:
    model = tmp_path / "sparse"
    dense = load_file(save_published(MODELS["qwen3"], model, "sparse_24") / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({key: config.pop("quantization_config"), **config}))
    run(model, tmp_path / "out", method)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    found = load_file(tmp_path / "out" / "model.safetensors")
    if method == "none":
        assert written == config
        assert found.keys() == dense.keys()
        assert all(torch.equal(found[name].float(), values.float()) for name, values in dense.items())
    else:
        assert written.pop("quantization_config")["format"] == "pack-quantized"
        assert written == config
        assert not [name for name in found if name.endswith((".bitmask", ".compressed"))]
        stem = "model.layers.1.mlp.down_proj"
        expected = dense[f"{stem}.weight"]
        weight = Weights(tmp_path / "out", torch.float32, torch.device("cpu")).read_linear(stem, *expected.shape)
        assert (weight - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("groupsize", [-1, 8, 40, 128])
def test_gptq_writes_the_layout_of_autogptq(tmp_path: Path, model: Path, groupsize: int, symmetric: bool) -> None:
    run(model, tmp_path / "out", groupsize=groupsize, symmetric=symmetric)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    stem = "model.layers.1.mlp.down_proj"
    num_groups = 1 if groupsize == -1 else -(-96 // groupsize)
    assert f"{stem}.weight" not in tensors
    assert (tensors[f"{stem}.qweight"].shape, tensors[f"{stem}.qweight"].dtype) == ((12, 64), torch.int32)
    assert (tensors[f"{stem}.qzeros"].tolist() == [[0x77777777] * 8] * num_groups) == symmetric
    assert (tensors[f"{stem}.scales"].shape, tensors[f"{stem}.scales"].dtype) == ((num_groups, 64), torch.float16)
    order = tensors[f"{stem}.g_idx"].tolist()
    assert order == ([0] * 96 if groupsize == -1 else [i // groupsize for i in range(96)])
    # Read by the published formula alone, it is the weight of the source, nearly.
    shifts = torch.arange(0, 32, 4)
    codes = (tensors[f"{stem}.qweight"][:, None, :] >> shifts[None, :, None] & 15).reshape(96, 64)
    zeros = (tensors[f"{stem}.qzeros"][:, :, None] >> shifts & 15).reshape(num_groups, 64) + 1
    weight = ((codes - zeros[order]) * tensors[f"{stem}.scales"].float()[order]).t()
    source = load_file(model / "model.safetensors")[f"{stem}.weight"]
    assert (weight - source).norm() / source.norm() < 0.3


def test_gptq_beats_rounding_on_every_layer_of_a_model(tmp_path: Path, model: Path, texts: Path) -> None:
    report = run(model, tmp_path / "out", calibration_file=str(texts), groupsize=-1)
    assert len(report.qualities) == 12
    assert all(quality.error < quality.rounded for quality in report.qualities.values())


def test_int8_and_q4_say_what_they_are_in_the_words_of_compressed_tensors(tmp_path: Path, model: Path) -> None:
    configs = {}
    for method in ("int8", "q4"):
        run(model, tmp_path / method, method)
        configs[method] = json.loads((tmp_path / method / "config.json").read_text())["quantization_config"]
        assert configs[method]["quant_method"] == "compressed-tensors"
        assert configs[method]["format"] == "pack-quantized"
        assert configs[method]["ignore"] == ["lm_head"]
    int8, q4 = (configs[method]["config_groups"]["group_0"]["weights"] for method in ("int8", "q4"))
    assert (int8["num_bits"], int8["strategy"], int8["group_size"]) == (8, "channel", None)
    assert (q4["num_bits"], q4["strategy"], q4["group_size"]) == (4, "group", 32)
    tensors = load_file(tmp_path / "q4" / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight_packed"].shape == (64, 8)
    assert tensors["model.layers.0.self_attn.q_proj.weight_scale"].shape == (64, 2)
    assert tensors["model.layers.0.self_attn.q_proj.weight_shape"].tolist() == [64, 64]


def test_scales_and_other_tensors_keep_the_type_of_the_model(tmp_path: Path, model: Path) -> None:
    path = model / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    output_file = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with output.SafetensorsWriter(model, output_file) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    run(model, tmp_path / "q4", "q4")
    found = load_file(tmp_path / "q4" / "model.safetensors")
    assert found["model.layers.0.self_attn.q_proj.weight_scale"].dtype is torch.bfloat16
    assert torch.equal(found["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(("method", "kept"), [("gptq", 3), ("q4", 3)])
def test_layers_of_other_sizes_stay_as_they_are_and_are_named(
    tmp_path: Path, method: str, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = save(tmp_path / "model", intermediate_size=100)
    with caplog.at_level(logging.INFO, logger="funitel"):
        report = run(model, tmp_path / "out", method)
    down = [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
    assert set(down) <= set(report.kept)
    assert f"left as they are layers={len(report.kept)}" in caplog.text
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if method == "gptq":
        names = [f"self_attn.{name}_proj" for name in "koqv"]
        assert config["modules_in_block_to_quantize"] == [names]
    else:
        assert config["ignore"] == [*down, "lm_head"]
    assert not weight_errors(model, tmp_path / "out").keys() & set(report.kept)
    assert logits(tmp_path / "out").isfinite().all()


def test_a_model_without_a_layer_to_quantise_is_refused(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model")  # 48 hidden units
    with pytest.raises(
        UnsupportedModel, match="no linear layer that gptq can hold: it needs inputs and outputs in mult"
    ):
        run(model, tmp_path / "out")
    assert left_in(tmp_path) == ["model"]
    run(model, tmp_path / "int8", "int8")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 0}))
    with pytest.raises(UnsupportedModel, match="num_layers must be within 1..4096, given 0"):
        run(model, tmp_path / "out", "int8")


def test_a_model_for_images_too_is_refused(tmp_path: Path, model: Path) -> None:
    text = json.loads((model / "config.json").read_text()) | {"model_type": "mistral"}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (model / "config.json").write_text(json.dumps(whole))
    with pytest.raises(
        UnsupportedModel, match="Mistral3ForConditionalGeneration is a model for images too: only models"
    ):
        run(model, tmp_path / "out", "int8")
    assert left_in(tmp_path) == ["model"]


def test_a_quantised_model_is_not_quantised_again(tmp_path: Path, model: Path) -> None:
    run(model, tmp_path / "once", "int8")
    with pytest.raises(UnsupportedModel, match="is quantised already, as int8"):
        run(tmp_path / "once", tmp_path / "twice", "q4")
    assert not (tmp_path / "twice").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, model: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    run(model, target, "int8")
    before = left_in(target)
    with pytest.raises(SettingsError, match=r"OUTPUT_DIR .*/out exists and is not empty"):
        run(model, target, "q4")
    assert left_in(target) == before
    with pytest.raises(SettingsError, match="exists and is not a folder"):
        run(model, target / "config.json", "q4")


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("failure", "expected"), [(full_disk, StartupError), (interrupt, KeyboardInterrupt)])
def test_a_failure_midway_leaves_nothing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, failure: Any, expected: type[BaseException]
) -> None:
    written: list[str] = []
    write = output.SafetensorsWriter.write

    def fail_late(self: output.SafetensorsWriter, name: str, tensor: torch.Tensor) -> None:
        written.append(name)
        if name.endswith("layers.1.mlp.down_proj.qweight"):
            assert left_in(tmp_path / "a" / "b") == [".out.partial"]
            failure()
        write(self, name, tensor)

    monkeypatch.setattr(output.SafetensorsWriter, "write", fail_late)
    with pytest.raises(expected) as caught:
        run(model, tmp_path / "a" / "b" / "out")
    assert len(written) > 20
    assert left_in(tmp_path) == ["model"]
    if expected is StartupError:
        assert str(caught.value) == f"cannot write OUTPUT_DIR {tmp_path}/a/b/out: No space left on device"


def test_a_disk_too_small_is_known_before_the_work(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StartupError, match="the quantised model takes 0 MB, the disk has 0 MB left"):
        run(model, tmp_path / "out")
    assert left_in(tmp_path) == ["model"]


def test_what_a_killed_process_left_is_swept_and_a_living_one_respected(tmp_path: Path, model: Path) -> None:
    left = tmp_path / ".out.partial" / "out"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half")
    run(model, tmp_path / "out", "int8")
    assert left_in(tmp_path) == ["model", "out"]
    with output.finished_folder(tmp_path / "other") as folder:
        assert folder.is_dir()
        with pytest.raises(SettingsError, match="is being written by another process"):
            run(model, tmp_path / "other", "int8")
    assert left_in(tmp_path) == ["model", "other", "out"]


def test_large_models_are_written_to_several_files(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((4, 8), float(i)) for i in range(5)} | {"last": torch.tensor(7)}
    plan = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with output.SafetensorsWriter(tmp_path, plan, max_file_bytes=300) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 5 * 128 + 8}
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[name])


def test_texts_come_from_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("plain text\nof two lines")
    (tmp_path / "a.jsonl").write_text('"a string"\n\n{"text": "a field", "more": 1}\n')
    (tmp_path / "c.md").write_text("not read")
    assert calibration_texts(str(tmp_path)) == ["a string", "a field", "plain text\nof two lines"]
    assert calibration_texts(str(tmp_path / "c.md")) == ["not read"]
    built_in = calibration_texts(None)
    assert len(built_in) > 10
    assert min(map(len, built_in)) > 300


def test_texts_are_cut_into_sequences(model: Path) -> None:
    codec = TextCodec(model)
    assert [len(sample) for sample in tokenize(codec, ["x" * 25, "y" * 7], 10, 10)] == [10, 10, 5, 7]
    assert [len(sample) for sample in tokenize(codec, ["x" * 25, "y" * 7], 3, 10)] == [10, 10, 5]
    assert [len(sample) for sample in tokenize(codec, ["x" * 21], 10, 10)] == [10, 10]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b" \n", "holds no text"),
        ("one.txt", b"x", "holds less than two tokens of text"),
        ("latin.txt", b"caf\xe9", "is not UTF-8 text: byte 3"),
        ("bad.jsonl", b'{"text": "x"}\n{"text"', "line 2 is not JSON"),
        ("other.jsonl", b'{"content": "x"}', 'line 1 is neither a string nor an object with "text"'),
        ("folder/readme.md", b"text", r"holds no \*\.txt or \*\.jsonl file"),
        (None, b"", "cannot be read: No such file or directory"),
    ],
)
def test_texts_that_cannot_be_used_are_refused(
    tmp_path: Path, model: Path, name: str | None, content: bytes, message: str
) -> None:
    path = tmp_path / (name or "missing.txt")
    if name is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    given = path.parent if path.parent != tmp_path else path
    with pytest.raises(SettingsError, match=message):
        run(model, tmp_path / "out", calibration_file=str(given))
    assert not (tmp_path / "out").exists()


def test_few_texts_are_warned_about(tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "short.txt").write_text("x" * 40)
    run(model, tmp_path / "out", calibration_file=str(tmp_path / "short.txt"))
    assert "calibration has 40 tokens for layers of 96 inputs" in caplog.text


def test_a_sequence_longer_than_the_context_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(SettingsError, match="--sequence-length 257 is longer than the model's context of 256 tokens"):
        run(model, tmp_path / "out", sequence_length=257)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 3] = torch.inf
    plan = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    with output.SafetensorsWriter(model, plan) as writer:
        for name, tensor in copies.items():
            writer.write(name, tensor)
    for method in ("gptq", "q4"):
        with pytest.raises(
            WeightsError, match=r"model\.layers\.2\.mlp\.(gate|up)_proj has weights that are not finite"
        ):
            run(model, tmp_path / "out", method)
    assert left_in(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groupsize": 0}, "--groupsize must be -1 or a positive multiple of 8, given 0"),
        ({"groupsize": -2}, "--groupsize must be -1"),
        ({"groupsize": 12}, "given 12"),
        ({"percdamp": 1.5}, r"--percdamp must be within 0\.\.1, given 1\.5"),
        ({"percdamp": float("nan")}, "given nan"),
        ({"num_samples": 0}, "--num-samples must be > 0, given 0"),
        ({"sequence_length": 1}, "--sequence-length must be > 1, given 1"),
        ({"num_threads": 0}, "--num-threads must be > 0, given 0"),
        ({"method": "q4", "groupsize": 64}, "--groupsize is for --method gptq, not q4"),
        ({"method": "int8", "act_order": False}, "--act-order is for --method gptq, not int8"),
        ({"method": "q4", "symmetric": True}, "--symmetric is for --method gptq, not q4"),
        ({"method": "int8", "calibration_file": "x"}, "--calibration-file is for --method gptq, not int8"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        QuantizeSettings(model_id="m", output_dir="o", **fields)
