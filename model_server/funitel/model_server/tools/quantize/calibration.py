"""Read calibration texts of a file or folder, or those built in, as token sequences.

The built-in texts are our own, with a part of `docs/` among them, and two that are in the public domain: the beginning
of Lewis Carroll's Alice's Adventures in Wonderland (1865) and propositions of Isaac Newton's Opticks (1730).
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.proto.errors import SettingsError

BUILT_IN = Path(__file__).with_name("calibration.txt")
_SEPARATOR = "\n=====\n"  # between the texts of the file that comes with us


def read_texts(path: str | None) -> list[str]:
    """Texts of `--calibration-file`; of the built-in file when None.

    A .jsonl file holds one text a line, as a string or as the field "text" of an object; any other file is one text;
    a folder gives its *.txt and *.jsonl files, by name.

    Raises:
        SettingsError: nothing there, or nothing readable.
    """
    if path is None:
        return [text.strip() for text in BUILT_IN.read_text(encoding="utf-8").split(_SEPARATOR)]
    source = Path(path).expanduser()
    files = [source]
    if source.is_dir():
        files = sorted(file for file in source.iterdir() if file.suffix in (".txt", ".jsonl") and file.is_file())
        if not files:
            raise SettingsError(f"--calibration-file {path} holds no *.txt or *.jsonl file")
    texts = [text for file in files for text in _texts_of(file) if text.strip()]
    if not texts:
        raise SettingsError(f"--calibration-file {path} holds no text")
    return texts


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


def _texts_of(file: Path) -> Iterator[str]:
    try:
        content = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--calibration-file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"--calibration-file {file} is not UTF-8 text: byte {error.start}") from error
    if file.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield _text_of_line(file, number, line)


def _text_of_line(file: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"--calibration-file {file} line {number} is not JSON: {error}") from error
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise SettingsError(f'--calibration-file {file} line {number} is neither a string nor an object with "text"')
    return text
