"""What the tools of the model server say when they end with an error."""

import sys

import pytest

from funitel.launcher.control_plane.model_tools import ModelTools
from funitel.proto.errors import FunitelError, InvalidRequest, NotFound, NotReady


def tools(code: int, err: str) -> ModelTools:
    program = f"import sys; sys.stderr.write({err!r}); sys.exit({code})"
    return ModelTools({}, command=(sys.executable, "-S", "-c", program))


@pytest.mark.parametrize(
    ("code", "err", "kind", "message"),
    [
        (1, "a warning\nerror: x is no folder\n", NotFound, "x is no folder"),
        (2, "error: --json: no\n", InvalidRequest, "--json: no"),
        (1, "Traceback\nMemoryError\n", FunitelError, "funitel-server models: MemoryError"),
        (9, "", FunitelError, "funitel-server models: it ended with 9"),
    ],
)
async def test_a_model_that_is_not_there_is_not_found(
    code: int, err: str, kind: type[FunitelError], message: str
) -> None:
    with pytest.raises(FunitelError) as caught:
        await tools(code, err).engines("x")
    assert type(caught.value) is kind
    assert caught.value.message == message


async def test_a_tool_that_does_not_end_is_given_up() -> None:
    sleeping = ModelTools({}, command=(sys.executable, "-S", "-c", "import time; time.sleep(60)"), max_seconds=0.2)
    with pytest.raises(NotReady, match="funitel-server cached has not ended within 0.2 s"):
        await sleeping.cached()
