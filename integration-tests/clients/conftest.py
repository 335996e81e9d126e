"""Servers for the tests of public clients, none of which is changed for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from funitel_testing.servers import Server, serving

collect_ignore = ["third_party"]  # needs environments of its own: `make clients`


@pytest.fixture(scope="package")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model, one shard."""
    flags = ("--model-id", "smollm2-135m-instruct", "--dtype", "float32", "--max-batch-total-tokens", "8192")
    batches = ("--batch-dir", str(tmp_path_factory.mktemp("batches")))
    with serving(tmp_path_factory.mktemp("server"), *flags, *batches) as running:
        yield running
        assert "Traceback" not in running.log.read_text(), running.tail()


@pytest.fixture(scope="package")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An embedding model of the catalogue."""
    with serving(tmp_path_factory.mktemp("encoder"), "--model-id", "all-minilm-l6-v2", "--device", "cpu") as running:
        yield running
        assert "Traceback" not in running.log.read_text(), running.tail()
