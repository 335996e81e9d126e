"""Load damaged files one after the other, in bounded memory, and say what became of each.

Usage: fuzz_worker.py FOLDER_WITH_FILES_JSON. A line of JSON once all is ready, and one for each file.
"""

import json
import logging
import re
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.convert.gguf import point_to_gguf
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import check_folder, read_json
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.tools.spec import check
from funitel.proto.errors import MAX_CHARACTERS, StartupError
from funitel_testing.fuzz_mutants import CONFIG, SHAPES, mutant

CPU = torch.device("cpu")
HEADROOM_BYTES = 1 << 30  # of addresses, beside those of the libraries
FILES = {"safetensors": "model.safetensors", "gguf": "x.gguf", "spec": "spec.json", "pickle": "pytorch_model.bin"}
# What a message must name, beside or instead of the file.
_FIELD = re.compile(r"tensor|config\.json|metadata|spec")


def main() -> None:
    work = Path(sys.argv[1])
    job = json.loads((work / "files.json").read_text())
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    sys.stderr = open("/dev/null", "w")  # progress bars
    for kind in {kind for kind, _ in job["files"]}:
        _prepare(kind, work / kind)
    size = _status("VmSize") + HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    print(json.dumps({"ready": True}), flush=True)
    for kind, number in job["files"]:
        print(json.dumps({"kind": kind, "number": number, **_try(kind, job["seed"], number, work / kind)}), flush=True)


def _prepare(kind: str, folder: Path) -> None:
    """Make what is beside the file, and load a sound one, with all that the libraries load at their first use."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    sound = folder / FILES["safetensors"]
    save_file({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, sound)
    if kind == "spec":
        check(folder, None)
        return
    _load("safetensors", folder, sound)
    sound.unlink()


def _try(kind: str, seed: int, number: int, folder: Path) -> dict[str, object]:
    path = folder / FILES[kind]
    path.write_bytes(mutant(kind, seed, number))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before, began = _status("VmRSS"), time.monotonic()
    message = problem = ""
    try:
        _load(kind, folder, path)
    except StartupError as error:
        message = error.message
        if "\n" in message or not message.isprintable() or len(message) > MAX_CHARACTERS + 3:
            problem = "not one printable line"
        elif path.name not in message and not _FIELD.search(message):
            problem = "names neither file nor field"
    except BaseException as error:  # what a user would see as a traceback
        message, problem = traceback.format_exc(limit=-6), type(error).__name__
    return {
        "outcome": problem or ("refused" if message else "loaded"),
        "message": message[:3000],
        "seconds": round(time.monotonic() - began, 3),
        "mib": max(0, _status("VmHWM") - before) >> 20,
    }


def _load(kind: str, folder: Path, path: Path) -> None:
    """What starting a server would do with the file."""
    if kind == "spec":
        check(folder, str(path))
        return
    if kind == "gguf":
        converted = folder / "converted"
        for old in sorted(converted.rglob("*"), reverse=True):
            old.rmdir() if old.is_dir() else old.unlink()
        converted.mkdir(exist_ok=True)
        point_to_gguf(path, converted)
        folder = converted
    check_folder(folder)
    spec = spec_of(read_json(folder / "config.json"))
    weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
    decoder = Decoder(spec, weights, TensorParallel(), TorchAttention(4, CPU))
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    cache = KVCache(spec, heads, 4, 4, torch.float32, CPU)
    span = RowSpan([1, 2, 3], 0, np.array([1], np.int32), "all", 0)
    with torch.inference_mode():
        decoder(ForwardBatch.build([span], 4, CPU), cache)


def _status(name: str) -> int:
    """A line of this process's status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(f"{name}:")).split()[1]) * 1024


if __name__ == "__main__":
    main()
