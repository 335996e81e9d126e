"""The image of this repository, built once, and a tiny model for it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from funitel_testing.container.build import Builder, CannotBuild, Image, install_tools
from funitel_testing.tiny import VOCAB_SIZE, save_tiny

CONTEXT = 8192
DEFAULT_CACHE = Path.home() / ".cache"


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """A builder that leaves nothing behind but the archive of a base that it made."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or DEFAULT_CACHE) / "funitel-container"
    try:
        install_tools()
    except CannotBuild as error:
        if os.geteuid() == 0 or "FUNITEL_NEEDS_CONTAINER" in os.environ:
            pytest.fail(f"the image cannot be built: {error}")
        pytest.skip(str(error))
    made = Builder(tmp_path_factory.mktemp("builder"), cache)
    yield made
    made.remove()


@pytest.fixture(scope="session")
def image(builder: Builder) -> Image:
    """The image."""
    builder.build(builder.base(), "funitel:test")
    return builder.image("funitel:test")


@pytest.fixture(scope="session")
def sagemaker_image(builder: Builder, image: Image) -> Image:
    """The image for Amazon SageMaker."""
    builder.build_stage("sagemaker", "funitel:test", "funitel:sagemaker")
    return builder.image("funitel:sagemaker")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model `tiny` that every user can read: long answers, and no token to end them early."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny("llama", folder / "tiny", max_position_embeddings=CONTEXT, eos_token_id=VOCAB_SIZE)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder
