"""One server for the tests of public clients, none of which is changed for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from funitel_testing.servers import Server, serving


@pytest.fixture(scope="package")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model, one shard."""
    flags = ("--model-id", "smollm2-135m-instruct", "--dtype", "float32", "--max-batch-total-tokens", "8192")
    with serving(tmp_path_factory.mktemp("server"), *flags) as running:
        yield running
        assert "Traceback" not in running.log.read_text(), running.tail()
