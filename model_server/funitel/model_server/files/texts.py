"""Read the texts of a file or folder that a flag names."""

import json
from collections.abc import Iterator
from pathlib import Path

from funitel.proto.errors import SettingsError

BUILT_IN = Path(__file__).with_name("calibration.txt")
"""The texts that models are calibrated on where none are given."""


def read_texts(path: str, flag: str) -> list[str]:
    """Texts of a file or folder in UTF-8; those of white space alone are left out.

    A .jsonl file holds one text a line, as a string or as the field "text" of an object; any other file is one text;
    a folder gives its *.txt and *.jsonl files, by name.

    Args:
        path: the file or folder.
        flag: the flag that named it, for messages.

    Raises:
        SettingsError: nothing there, or nothing readable.
    """
    source = Path(path).expanduser()
    files = [source]
    if source.is_dir():
        files = sorted(file for file in source.iterdir() if file.suffix in (".txt", ".jsonl") and file.is_file())
        if not files:
            raise SettingsError(f"{flag} {path} holds no *.txt or *.jsonl file")
    texts = [text for file in files for text in _texts_of(file, flag) if text.strip()]
    if not texts:
        raise SettingsError(f"{flag} {path} holds no text")
    return texts


def _texts_of(file: Path, flag: str) -> Iterator[str]:
    try:
        content = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{flag} {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{flag} {file} is not UTF-8 text: byte {error.start}") from error
    if file.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield _text_of_line(f"{flag} {file} line {number}", line)


def _text_of_line(place: str, line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{place} is not JSON: {error}") from error
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise SettingsError(f'{place} is neither a string nor an object with "text"')
    return text
