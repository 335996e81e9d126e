"""Write a Hugging Face folder from a file of another format: JSON, safetensors, and SentencePiece's BPE.

Safetensors are never whole in memory. Of BPE the pair of neighbours with the best joined score merges first.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, normalizers

from funitel.model_server.files.progress import Progress


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor to be written; `read` gives its values, in parts along its first dimension, when their turn has come.

    `dtype` is safetensors' name of the type of the values.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    num_bytes: int
    read: Callable[[], Iterable[npt.NDArray[Any]]]


def write_json(path: Path, value: object) -> None:
    """Write JSON for people to read as well."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: Sequence[Planned], metadata: Mapping[str, str], label: str) -> None:
    """Stream the tensors out, so that no more than a part of one is in memory at a time."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    progress = Progress(label, end)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            for part in tensor.read():
                file.write(np.ascontiguousarray(part).data)
                progress.advance(part.nbytes)
    progress.finish()


PIECE_SPACE = "\u2581"  # SentencePiece writes a space as this letter


def sentencepiece_bpe(
    scores: Mapping[str, float], tokens: Sequence[str], *, unknown: str | None, adds_space: bool = True
) -> Tokenizer:
    """A tokenizer with merges in the order of `scores`; byte tokens stand for letters that `tokens` lack.

    Rank order stands for score order, so every way to cut a token in two known tokens becomes a merge. Of a token
    listed twice the first id counts. `adds_space` puts a space before each text.
    """
    vocab = {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(scores, key=lambda token: (-scores[token], vocab[token]))
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prepend: list[normalizers.Normalizer] = [normalizers.Prepend(PIECE_SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", PIECE_SPACE)])
    strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(PIECE_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
