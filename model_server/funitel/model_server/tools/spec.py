"""The command `funitel spec`: print the spec of a checkpoint, or check a spec against its tensors."""

from collections.abc import Sequence
from pathlib import Path

import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.storage import HollowStorage, Storage
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.media.families.whisper import WhisperEncoder
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.encoder_decoder.model import Seq2Seq
from funitel.model_server.registry.encoder_decoders import is_seq2seq, seq2seq_spec_of
from funitel.model_server.registry.lookup import choose_spec, spec_of
from funitel.model_server.spec.json_file import to_json
from funitel.proto.errors import WeightsError

_META = torch.device("meta")


class Inspection(Weights):
    """A checkpoint that hands out tensors without values and notes what does not fit."""

    def __init__(self, folder: Path, prefix: str) -> None:
        super().__init__(folder, torch.float32, _META, prefix, is_shown=False)
        self.problems: list[str] = []

    def _shaped(self, name: str, shape: Sequence[int]) -> Storage:
        try:
            storage = self._find(name)
            self._used.update(storage.names)
            if storage.shape != tuple(shape):
                self._note(f"wrong shape: {name} is {list(storage.shape)}, the spec says {list(shape)}")
        except WeightsError:
            self._note(f"missing: {name} {list(shape)}")
        return HollowStorage(name, shape)

    def finish(self, ignored: Sequence[str]) -> None:
        """Note the tensors that the model does not know."""
        try:
            super().finish(ignored)
        except WeightsError:
            self.problems += [f"unexpected: {name}" for name in self.unexpected]

    def _note(self, problem: str) -> None:
        if problem not in self.problems:  # packed tensors are read in parts
            self.problems.append(problem)


def show(folder: Path, *, is_whole: bool, architecture: str | None = None) -> str:
    """The spec of a checkpoint as JSON; of an encoder-decoder those of both stacks.

    `architecture` is one to read its `config.json` as, in place of the one that it names.

    Raises:
        StartupError: there is no spec for it.
    """
    config = read_json(folder / "config.json")
    if architecture is not None:
        config["architectures"] = [architecture]
    spec = seq2seq_spec_of(config) if is_seq2seq(config) else spec_of(config)
    return to_json(spec, is_whole=is_whole)


def check(folder: Path, model_spec: str | None) -> list[str]:
    """What of a checkpoint does not fit a spec: one line for each tensor missing, unexpected or of the wrong shape.

    Raises:
        StartupError: there is no spec, or no checkpoint.
    """
    if model_spec is None and is_seq2seq(config := read_json(folder / "config.json")):
        both = seq2seq_spec_of(config)
        weights = Inspection(folder, both.decoder.names.prefix)
        if both.hears:
            WhisperEncoder(both, weights)
        Seq2Seq(both, weights, TensorParallel(device=_META))
        return weights.problems
    spec = choose_spec(model_spec, folder)
    weights = Inspection(folder, spec.names.prefix)
    Decoder(spec, weights, TensorParallel(device=_META), TorchAttention(1, _META))
    return weights.problems
