"""Every error has its codes, and the tree in the docstring is the tree."""

import grpc
import pytest

from funitel.proto import errors
from funitel.proto.errors import FunitelError


def family(base: type[FunitelError] = FunitelError) -> list[type[FunitelError]]:
    """A class and all of the module that derive from it, in the order they are defined."""
    children = [child for child in base.__subclasses__() if child.__module__ == errors.__name__]
    return [base, *(cls for child in children for cls in family(child))]


def drawn_parents() -> dict[str, str | None]:
    """Class -> base class, as the docstring draws them: four columns a generation."""
    parents: dict[str, str | None] = {}
    line_of_descent: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        words = line.lstrip(" │├└─").split()
        if not line.startswith("    ") or not words:
            continue
        depth = (len(line) - len(line.lstrip(" │├└─"))) // 4 - 1
        line_of_descent[depth:] = [words[0]]
        parents[words[0]] = line_of_descent[depth - 1] if depth else None
    return parents


def test_the_drawn_tree_is_the_real_one() -> None:
    real = {cls.__name__: None if cls is FunitelError else cls.__bases__[0].__name__ for cls in family()}
    assert list(drawn_parents().items()) == list(real.items())


def test_every_drawn_class_says_what_it_means() -> None:
    for line in (errors.__doc__ or "").splitlines():
        if "── " in line:
            assert len(line.split("── ")[1].split()) > 2, line


@pytest.mark.parametrize("cls", family())
def test_every_class_has_its_codes(cls: type[FunitelError]) -> None:
    assert 400 <= cls.http_status <= 599
    assert cls.error_type
    assert cls.error_type == cls.error_type.lower() or cls is errors.NoInstances, "TGI writes one with a capital"
    assert grpc.StatusCode[cls.grpc_status] is not grpc.StatusCode.OK
    assert cls.metric
    assert cls.__doc__
    comes_back = cls.http_status in (429, 503) and cls is not errors.QuotaExceeded  # a month is too long to wait
    assert cls.retry_after == comes_back, "a client that shall come back is told when"


@pytest.mark.parametrize("cls", family())
def test_a_message_is_one_line_behind_its_prefix(cls: type[FunitelError]) -> None:
    error = cls("first line\n  second\tline ")
    assert error.message == "first line second line"
    assert error.public_message == cls.prefix + "first line second line"
    assert isinstance(error, FunitelError)


@pytest.mark.parametrize(
    ("name", "status", "error_type", "code"),
    [
        ("InvalidRequest", 422, "validation", "INVALID_ARGUMENT"),
        ("Overloaded", 429, "overloaded", "RESOURCE_EXHAUSTED"),
        ("ShardFailed", 424, "generation", "INTERNAL"),
        ("StepFailed", 424, "generation", "ABORTED"),
        ("UnknownBatch", 424, "generation", "INTERNAL"),
        ("ResourceExhausted", 424, "generation", "RESOURCE_EXHAUSTED"),
        ("SlotsLost", 424, "generation", "ABORTED"),
        ("BrokenScores", 424, "generation", "ABORTED"),
        ("ShardUnsound", 424, "generation", "DATA_LOSS"),
        ("Incomplete", 500, "incomplete_generation", "INTERNAL"),
        ("NotReady", 503, "healthcheck", "UNAVAILABLE"),
    ],
)
def test_what_tgis_clients_and_routers_tell_apart(name: str, status: int, error_type: str, code: str) -> None:
    cls = getattr(errors, name)
    assert (cls.http_status, cls.error_type, cls.grpc_status) == (status, error_type, code)


def test_an_invalid_request_may_name_its_field() -> None:
    assert errors.InvalidRequest("no").param is None
    assert errors.ContextTooLong("too long", "inputs").param == "inputs"


@pytest.mark.parametrize("cls", family())
def test_a_message_that_quotes_much_is_cut(cls: type[FunitelError]) -> None:
    error = cls("given: " + "x" * 1_000_000)
    assert len(error.public_message) <= errors.MAX_CHARACTERS + len(cls.prefix) + len("...")
    assert str(error) == error.message
    assert len(errors.InvalidRequest("no", "x" * 1_000_000).param or "") == errors.MAX_PARAM_CHARACTERS + len("...")
