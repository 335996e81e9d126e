"""Whether the model or the server is to blame for what a client did not get."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

URL = os.environ.get("FUNITEL_CLIENTS_URL", "")
LONG_URL = os.environ.get("FUNITEL_CLIENTS_LONG_URL", "")
ENCODER_URL = os.environ.get("FUNITEL_CLIENTS_ENCODER_URL", "")
_CALLS = Path(os.environ.get("FUNITEL_CLIENTS_CALLS", os.devnull))


class ModelFault(AssertionError):
    """The calls and their answers were right; what the model wrote was not of use."""


class Calls:
    """The calls that clients have made since this object was made."""

    def __init__(self) -> None:
        self._begin = _CALLS.stat().st_size if _CALLS.is_file() else 0
        self.refusals_expected = False

    @property
    def all(self) -> list[dict[str, Any]]:
        """Each with `method`, `path`, `status`, `request` and `answer`."""
        if not _CALLS.is_file():
            return []
        with _CALLS.open() as file:
            file.seek(self._begin)
            return [json.loads(line) for line in file]

    @property
    def refused(self) -> list[dict[str, Any]]:
        """Those that were answered with a status of an error."""
        return [call for call in self.all if call["status"] >= 400]

    def words(self) -> str:
        """The first refusal in a line; empty where there is none."""
        for call in self.refused:
            return f"{call['method']} {call['path']} -> {call['status']}: {call['answer'][:300]}"
        return ""

    def check(self, path: str) -> None:
        """Check that there was a call to a path, and that none was refused."""
        assert not self.refused, self.words()
        assert path in {call["path"] for call in self.all}, f"no call to {path}: {[c['path'] for c in self.all]}"

    @contextmanager
    def model_may(self, *errors: type[BaseException], when: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Blame the model for some errors of a client where no call was refused."""
        try:
            yield
        except errors as error:
            if self.refused or not when():
                raise
            raise ModelFault(" ".join(str(error).split())[:300]) from error


def of_the_model(condition: bool, words: str) -> None:
    """Blame the model unless a condition holds."""
    if not condition:
        raise ModelFault(words)
