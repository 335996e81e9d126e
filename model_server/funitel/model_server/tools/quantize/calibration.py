"""Read calibration texts of a file or folder, or those built in, as token sequences.

The built-in texts are our own, with a part of `docs/` among them, and two that are in the public domain: the beginning
of Lewis Carroll's Alice's Adventures in Wonderland (1865) and propositions of Isaac Newton's Opticks (1730).
"""

from collections.abc import Sequence

from funitel.model_server.files.texts import BUILT_IN, read_texts
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.proto.errors import SettingsError

_SEPARATOR = "\n=====\n"  # between the texts of the file that comes with us


def calibration_texts(path: str | None) -> list[str]:
    """Texts of `--calibration-file`, as `read_texts` has them; of the built-in file when None.

    Raises:
        SettingsError: nothing there, or nothing readable.
    """
    if path is None:
        return [text.strip() for text in BUILT_IN.read_text(encoding="utf-8").split(_SEPARATOR)]
    return read_texts(path, "--calibration-file")


def tokenize(codec: TextCodec, texts: Sequence[str], num_samples: int, sequence_length: int) -> list[list[int]]:
    """At most `num_samples` sequences of at most `sequence_length` tokens; a text's last one may be short.

    Raises:
        SettingsError: the texts give no sequence of two tokens.
    """
    samples: list[list[int]] = []
    for text in texts:
        ids = codec.encode(text, add_special_tokens=True)
        for start in range(0, len(ids), sequence_length):
            samples.append(ids[start : start + sequence_length])
            if len(samples) == num_samples:
                break
        if len(samples) == num_samples:
            break
    samples = [sample for sample in samples if len(sample) > 1]
    if not samples:
        raise SettingsError("--calibration-file holds less than two tokens of text")
    return samples
