"""PyTorch's own files: the same tensors in every layout hubs have, and nothing else ever runs."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from funitel.model_server.checkpoint import torch_pickle
from funitel.model_server.checkpoint.torch_pickle import PickleFile
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.files.integrity import check_folder, weight_files
from funitel.proto.errors import WeightsError
from funitel_testing.executors import load_executor
from funitel_testing.tiny import save_tiny

CPU = torch.device("cpu")


class Call:
    """Pickles as a call, which a careless reader makes."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "model")


def as_pickle(folder: Path, name: str = "pytorch_model.bin", **options: Any) -> dict[str, torch.Tensor]:
    """Replace a folder's safetensors by a file of PyTorch's; returns the tensors."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / name, **options)
    return tensors


def zip_of(pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file as torch writes them, around a pickle of one's own."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_a_folder_is_served_as_it_is(folder: Path, name: str, options: dict[str, Any]) -> None:
    tensors = as_pickle(folder, name, **options)
    check_folder(folder)
    weights = Weights(folder, torch.float32, CPU, is_shown=False)
    for key, tensor in tensors.items():
        assert torch.equal(weights.read(key, list(tensor.shape)), tensor)
        if tensor.dim() == 2:
            assert torch.equal(weights.read(key, list(tensor.shape), rows=(2, 9), columns=(1, 5)), tensor[2:9, 1:5])
    weights.finish(())
    load_executor(folder)


def test_shards_are_those_of_the_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, some in halves.items():
        torch.save({name: tensors[name] for name in some}, folder / file)
    torch.save({"step": 3}, folder / "training_args.bin")
    index = {"weight_map": {name: file for file, some in halves.items() for name in some}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(folder)] == list(halves)
    load_executor(folder)


def test_safetensors_come_first_and_what_is_no_weights_is_left_out(folder: Path) -> None:
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin"):
        torch.save({"x": torch.zeros(1)}, folder / name)
    assert [path.name for path in weight_files(folder)] == ["model.safetensors"]
    (folder / "model.safetensors").unlink()
    assert [path.name for path in weight_files(folder)] == ["pytorch_model.bin"]
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(WeightsError, match=r"has no weights \(\*\.safetensors, \*\.bin, \*\.pt or \*\.pth\)"):
        weight_files(folder)


@pytest.mark.parametrize("key", ["state_dict", "model", "module"])
def test_what_training_scripts_put_around_the_tensors_is_taken_off(tmp_path: Path, key: str) -> None:
    torch.save({key: {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "model.pt")
    assert PickleFile(tmp_path / "model.pt").keys() == ["w"]


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("wrap", [bytes, zip_of], ids=["bare", "zip"])
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_call_is_refused_by_its_name_and_not_made(
    folder: Path, tmp_path: Path, protocol: int, wrap: Callable[[bytes], bytes], is_inside: bool
) -> None:
    proof = tmp_path / "it ran"
    call = Call(os.system, f"touch '{proof}'")
    content = pickle.dumps({"w": call} if is_inside else call, protocol)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(wrap(content))
    with pytest.raises(WeightsError) as caught:
        load_executor(folder)
    assert not proof.exists()
    path = folder / "pytorch_model.bin"
    assert (
        caught.value.message == f"{path} is refused: it asks for posix.system, and a checkpoint may hold tensors only"
    )


def test_a_call_among_real_tensors_is_refused(tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    tensors = {"w": torch.ones(3), "x": Call(os.system, f"touch '{proof}'")}
    torch.save(tensors, tmp_path / "model.bin")
    torch.save(tensors, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("model.bin", "old.bin"):
        with pytest.raises(WeightsError, match=r"asks for posix\.system"):
            PickleFile(tmp_path / name)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (Call(eval, "1"), "eval"),
        (Call(exec, "x = 1"), "exec"),
        (Call(getattr, "x", "upper"), "getattr"),
        (Call(io.BytesIO, b"x"), "_io.BytesIO"),
        (Call(torch.load, "x"), "torch.serialization.load"),
    ],
)
def test_other_globals_are_named_too(tmp_path: Path, call: Call, name: str) -> None:
    (tmp_path / "model.bin").write_bytes(pickle.dumps(call, 2))
    with pytest.raises(WeightsError, match=rf"asks for (builtins\.|__builtin__\.)?{name},"):
        PickleFile(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a PyTorch checkpoint"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "cannot be read as a PyTorch"),
        (b"\x80\x02.", "cannot be read as a PyTorch checkpoint"),
        (b"PK\x03\x04", "is truncated or damaged: File is not a zip file"),
        (zip_of(pickle.dumps({}, 2), zipfile.ZIP_DEFLATED), r"its record archive/data\.pkl is compressed"),
    ],
)
def test_other_files_are_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(WeightsError, match=message) as caught:
        PickleFile(tmp_path / "model.bin")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flag", [0x01, 0x20, 0x40], ids=["encrypted", "patch", "strongly encrypted"])
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_record_that_needs_more_than_reading_is_one_line(
    tmp_path: Path, flag: int, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(zip_of(pickle.dumps({}, 2)))
    content[content.index(b"PK\x01\x02") + 8] |= flag  # in the directory of the zip, of its first record
    (tmp_path / "model.bin").write_bytes(content)
    if not is_checked:  # then torch raises, and the name of what it refused is looked for
        monkeypatch.setattr(torch_pickle, "check_pickle", lambda path: None)
    message = (
        r"its record archive/data\.pkl is compressed or encrypted" if is_checked else "cannot be read as a PyTorch"
    )
    with pytest.raises(WeightsError, match=message) as caught:
        PickleFile(tmp_path / "model.bin")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_truncated_file_is_refused(folder: Path, fraction: float, is_zip: bool) -> None:
    as_pickle(folder, _use_new_zipfile_serialization=is_zip)
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * fraction)])
    with pytest.raises(WeightsError, match="pytorch_model.bin (is truncated|cannot be read as a PyTorch checkpoint)"):
        PickleFile(path)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([torch.zeros(1)], "holds a list, not tensors by name"),
        ({"w": 3}, "'w' is a int, not a plain tensor"),
        ({3: torch.zeros(1)}, "3 is a torch.strided torch.float32 tensor on cpu, not a plain tensor with a name"),
        ({"w": torch.eye(2).to_sparse()}, "'w' is a torch.sparse_coo torch.float32 tensor"),
        ({"w": torch.zeros(2, device="meta")}, "tensor on meta"),
    ],
)
def test_what_is_no_plain_tensor_is_named(tmp_path: Path, value: object, kind: str) -> None:
    torch.save(value, tmp_path / "model.bin")
    with pytest.raises(WeightsError, match=kind):
        PickleFile(tmp_path / "model.bin")


def test_an_index_names_files_beside_it_only(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../other/model.safetensors"}}')
    with pytest.raises(WeightsError, match=r"names a file that is not beside it: \.\./other/model\.safetensors"):
        weight_files(folder)


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_a_share_takes_its_own_size_in_memory_and_hardly_more(tmp_path: Path) -> None:
    matrix = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)  # 4 MiB
    torch.save({f"w{i}": matrix + i for i in range(12)}, tmp_path / "pytorch_model.bin")
    before, most, kept = anonymous_bytes(), 0, []
    weights = Weights(tmp_path, torch.float32, CPU, is_shown=False)
    for i in range(12):
        kept.append(weights.read(f"w{i}", [1024, 1024], rows=(0, 512)))
        most = max(most, anonymous_bytes() - before)
    weights.finish(())
    assert sum(part.numel() * 4 for part in kept) == 24 << 20
    assert most < 1.2 * (24 << 20)
    assert torch.equal(kept[3], matrix[:512] + 3)
