"""Errors of memory that is not there."""

import pytest

from funitel.model_server.device.memory import within_memory
from funitel.proto.errors import NotEnoughMemory, WeightsError


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9.99 GiB"),
        RuntimeError("unable to mmap 538092792 bytes from file </x>: Cannot allocate memory (12)"),
        OSError("[Errno 12] Cannot allocate memory"),
    ],
)
def test_a8_a_model_without_memory_is_one_line_with_what_is_left(error: Exception) -> None:
    def load(count: int) -> None:
        raise error

    with pytest.raises(NotEnoughMemory, match=r"^the model does not fit in the \d+ MB that .+ leaves: .*llocate"):
        within_memory(load)(3)


@pytest.mark.parametrize("error", [RuntimeError("no"), WeightsError("no"), NotEnoughMemory("no")])
def test_a8_other_errors_stay_what_they_are(error: Exception) -> None:
    def load() -> None:
        raise error

    with pytest.raises(type(error), match="^no$"):
        within_memory(load)()
