"""What the tests of third-party clients share. They run outside the project's environment: `make clients`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from blame import URL, Calls, ModelFault


@pytest.fixture(scope="session")
def url() -> str:
    """Address of the server."""
    return URL


@pytest.fixture
def calls(request: pytest.FixtureRequest) -> Calls:
    """The calls of this test."""
    request.node.calls = found = Calls()
    return found


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note whom a failure is to be blamed on, and its reason in one line."""
    outcome: Any = yield
    report = outcome.get_result()
    if not report.failed or call.excinfo is None:
        return
    error = call.excinfo.value
    refusal = item.calls.words() if hasattr(item, "calls") else ""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    item.user_properties += [  # which the report of the teardown has too, and only that one goes into the file
        ("blame", "model" if isinstance(error, ModelFault) else "server"),
        ("reason", (refusal or words)[:400]),
    ]
