"""Encode long texts in a sandbox process for `encode_pool.EncodePool`: the setup is the path of a tokenizer.json
and its control tokens.

An answer is `[result]`, or null where the tokenizer cannot represent the text.
"""

import ctypes
from typing import Any

import tokenizers

from funitel.proto.errors import InvalidRequest, translating
from funitel.router.sandbox.worker import Answer, serve
from funitel.router.text.control_text import ControlText
from funitel.router.text.encode import EncodeCalls


def prepare(setup: dict[str, Any]) -> Answer:
    """Read the tokenizer."""
    calls = EncodeCalls(tokenizers.Tokenizer.from_file(setup["path"]), ControlText(**setup["control"]))
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # of glibc

    def answer(task: dict[str, Any]) -> list[Any] | None:
        try:
            with translating(_unencodable):
                return [calls.run(**task)]
        except InvalidRequest:
            return None
        finally:
            trim(0)  # gigabytes may have been used

    return answer


def _unencodable(error: Exception) -> InvalidRequest:
    """The library raises bare Exception; running out of memory has to end the process."""
    if isinstance(error, MemoryError):
        raise error
    return InvalidRequest(str(error))


if __name__ == "__main__":
    serve(prepare)
