"""Inputs led by the code they reach: atheris on what reads GGUF files, and specs.

Usage: python -m funitel_testing.fuzz_coverage gguf|spec FOLDER RUNS. Ends with 0 if every input was read, or refused in
one line. Some sound and some damaged files are where it begins.
"""

import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["funitel.model_server"]):
    from funitel.model_server.convert.gguf import point_to_gguf
    from funitel.model_server.spec.json_file import read_spec
from funitel.proto.errors import StartupError
from funitel_testing.fuzz_mutants import mutant

MAX_BYTES = 16_384
MAX_SECONDS = 20
MAX_MIB = 2048
NUM_SEEDS = 40


def convert(path: Path) -> None:
    """All that is made of a GGUF file before its model is loaded."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        point_to_gguf(path, Path(folder))


READERS: dict[str, Callable[[Path], object]] = {"gguf": convert, "spec": read_spec}


def main() -> None:
    kind, folder, num_runs = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    corpus, path = folder / f"corpus-{kind}", folder / f"input.{kind}"
    corpus.mkdir()
    logging.disable()
    for number in range(NUM_SEEDS):
        (corpus / str(number)).write_bytes(mutant(kind, 0, number)[:MAX_BYTES])
    read = READERS[kind]

    def attempt(content: bytes) -> None:
        path.write_bytes(content)
        try:
            read(path)
        except StartupError as error:
            if not error.message.isprintable():
                raise AssertionError(error.message) from error

    limits = (f"-max_len={MAX_BYTES}", f"-timeout={MAX_SECONDS}", f"-rss_limit_mb={MAX_MIB}")
    atheris.Setup([sys.argv[0], str(corpus), f"-runs={num_runs}", "-print_final_stats=0", *limits], attempt)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
