"""One tiny random model loaded once for all tests of the offline API."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from funitel.llm import LLM
from funitel_testing.tiny import save_tiny

POOL_TOKENS = 4000


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama with one token a byte and a context of 256 tokens."""
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def llm(model: Path) -> Iterator[LLM]:
    """That model, with room for everything a test asks at once."""
    with LLM(model, num_threads=1, block_size=4, max_batch_total_tokens=POOL_TOKENS) as llm:
        yield llm
