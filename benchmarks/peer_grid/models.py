"""The files that are compared: found in the cache, or made there. The demo model, and shapes with random weights."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from funitel.model_server.convert.gguf_reader import read_gguf
from funitel.model_server.convert.gguf_tokenizer import build_tokenizer
from funitel.proto.errors import FunitelError

from .builds import build
from .folders import Folders
from .plan import DEMO
from .random_models import write_checkpoint, write_gguf, write_json
from .shapes import DEMO_SHAPE, SHAPES, num_bytes

DEMO_NAME = "smollm2-135m-instruct"


class Models:
    """Makes what is asked for, once; the disk that all take is bounded by `folders`."""

    def __init__(self, folders: Folders, report: Callable[[str], None]) -> None:
        self._folders, self._report = folders, report

    def get(self, model: str, file: str) -> Path:
        """The GGUF of a model, or for `bf16` the folder of its checkpoint.

        Raises:
            FunitelError: the demo model cannot be fetched or converted.
            OSError: there is no room for it.
        """
        if (model, file) == (DEMO, "q4_1"):
            return self.demo()
        path = self._folders.models / (f"{model}-{file}" if file == "bf16" else f"{model}-{file}.gguf")
        if path.exists():
            os.utime(path)  # the one that was used last is deleted last
            return path
        size = num_bytes(DEMO_SHAPE if model == DEMO else SHAPES[model], file)
        self._folders.make_room(size, path)
        self._report(f"{path.name}: writing {size / 1e9:.1f} GB")
        with self._folders.writing(path) as partial:
            self._write(model, file, partial)
        return path

    def demo(self) -> Path:
        """The demo model's GGUF as it comes, in Q4_1."""
        cache = Path(os.environ.get("FUNITEL_CACHE") or Path.home() / ".cache" / "funitel")
        for _ in range(2):
            found = sorted(cache.glob("SmolLM2-135M-Instruct*.gguf"))
            if found:
                return found[0]
            command = [sys.executable, "-m", "funitel.model_server", "download-weights", DEMO_NAME]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        raise FunitelError(f"{DEMO_NAME} is not in {cache}, and could not be fetched")

    def tokenizer(self) -> Path:
        """A folder with the tokenizer of all models."""
        folder = self._folders.models.parent / "tokenizer"
        folder.mkdir(parents=True, exist_ok=True)
        built = build_tokenizer(read_gguf(self.demo()))
        built.tokenizer.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", built.settings)
        return folder

    def _write(self, model: str, file: str, path: Path) -> None:
        if file == "bf16":
            path.mkdir()
            write_checkpoint(path, DEMO_SHAPE if model == DEMO else SHAPES[model], self.demo())
        elif model == DEMO:
            self._requantise(path, file)
        else:
            write_gguf(path, SHAPES[model], file, self.demo())

    def _requantise(self, path: Path, file: str) -> None:
        program = build("llama.cpp", self._folders, jobs=1, report=self._report).program("llama-quantize")
        command = [program, "--allow-requantize", str(self.demo()), str(path), file.upper(), "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise FunitelError(f"llama-quantize: {done.stderr.strip().splitlines()[-1]}")
