"""GGUFs by the names of hub repositories, from a hub on this machine: what is fetched, and what is said."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants as hub_constants
import pytest
from transformers import PreTrainedModel

from funitel.model_server.files.gguf_pointer import POINTER, check_pointer
from funitel.model_server.hub import resolve
from funitel.model_server.hub.resolve import ResolvedModel
from funitel.proto.errors import StartupError, WeightsError
from funitel_testing.fake_hub import FakeHub, running

REPOSITORY = "org/Tiny-GGUF"
Resolve = Callable[..., ResolvedModel]
MakeGguf = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory, make_gguf: MakeGguf) -> dict[str, bytes]:
    """The files of a repository: a model in two quantisations and in two parts."""
    folder = tmp_path_factory.mktemp("ggufs")
    for seed, name in enumerate(("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf")):
        make_gguf(folder / name, seed=seed)
    make_gguf(folder / "tiny-F32.gguf", seed=2, tensors_a_file=12)
    parts = sorted(path.name for path in folder.glob("tiny-F32-*"))
    assert len(parts) == 2
    files = {name: (folder / name).read_bytes() for name in ("tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf")}
    files |= {f"F32/{name}": (folder / name).read_bytes() for name in parts}
    return files | {"README.md": b"#", "config.json": b"{}", "mmproj-Q4_K_M.gguf": b"GGUF", "imatrix.gguf": b"GGUF"}


@pytest.fixture
def hub(content: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    older = {"tiny-Q8_0.gguf": content["tiny-Q4_K_M.gguf"]}
    with running(FakeHub({REPOSITORY: {"main": content, "v1": older}})) as hub:
        monkeypatch.setattr(hub_constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


@pytest.fixture
def find(tmp_path: Path) -> Resolve:
    def find(name: str, revision: str | None = None) -> ResolvedModel:
        return resolve.resolve(name, revision=revision, cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hub")

    return find


def weights_of(model: ResolvedModel) -> list[bytes]:
    """The content of the files that a folder points to."""
    return [(model.folder / part.file).read_bytes() for part in check_pointer(model.folder / POINTER).parts]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (f"{REPOSITORY}:q8_0", ["tiny-Q8_0.gguf"]),
        (f"{REPOSITORY}/tiny-Q8_0.gguf", ["tiny-Q8_0.gguf"]),
        (f"hf.co/{REPOSITORY}:tiny-q8", ["tiny-Q8_0.gguf"]),
        (REPOSITORY, ["tiny-Q4_K_M.gguf"]),
        (f"{REPOSITORY}:F32", ["F32/tiny-F32-00001-of-00002.gguf", "F32/tiny-F32-00002-of-00002.gguf"]),
    ],
)
def test_the_files_of_one_gguf_are_fetched_and_mapped(
    name: str, files: list[str], hub: FakeHub, find: Resolve, content: dict[str, bytes], tmp_path: Path
) -> None:
    model = find(name)
    assert weights_of(model) == [content[file] for file in files]
    assert sorted(file for file, _ in hub.fetched) == files
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {".locks", model.folder.name}
    assert not list(model.folder.glob("*.safetensors"))
    hub.fetched.clear()
    assert find(name) == ResolvedModel(name, model.folder, was_present=True)
    assert hub.fetched == []


def test_a_choice_of_ours_is_said_in_one_line(hub: FakeHub, find: Resolve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "funitel")
    find(REPOSITORY)
    assert caplog.messages == [
        f"{REPOSITORY}: the GGUF tiny-Q4_K_M.gguf is served; name another as {REPOSITORY}:TAG, one of F32, Q4_K_M, Q8_0"
    ]
    caplog.clear()
    find(f"{REPOSITORY}:Q4_K_M")
    assert caplog.messages == []


def test_a_tag_that_is_not_there_fetches_nothing(hub: FakeHub, find: Resolve) -> None:
    with pytest.raises(WeightsError, match=f"^{REPOSITORY} has no GGUF Q2_K; it has F32, Q4_K_M, Q8_0$"):
        find(f"{REPOSITORY}:Q2_K")
    assert hub.fetched == []


def test_safetensors_come_first_unless_a_gguf_is_named(hub: FakeHub, find: Resolve, content: dict[str, bytes]) -> None:
    hub.repositories = {REPOSITORY: {"main": {**content, "model.safetensors": b"none"}}}
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        find(REPOSITORY)
    assert sorted(file for file, _ in hub.fetched) == ["config.json", "model.safetensors"]
    assert weights_of(find(f"{REPOSITORY}:Q8_0")) == [content["tiny-Q8_0.gguf"]]


def test_a_revision_has_its_own_file(hub: FakeHub, find: Resolve, content: dict[str, bytes]) -> None:
    assert weights_of(find(f"{REPOSITORY}:Q8_0", "v1")) == [content["tiny-Q4_K_M.gguf"]]
    with pytest.raises(WeightsError, match="has no GGUF Q4_K_M; it has Q8_0"):
        find(f"{REPOSITORY}:Q4_K_M", "v1")
    with pytest.raises(StartupError, match=f"hub repository {REPOSITORY} has no revision v2"):
        find(f"{REPOSITORY}:Q4_K_M", "v2")


def test_without_a_network_what_is_cached_is_served(
    hub: FakeHub, find: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{REPOSITORY}:Q8_0"
    folder = find(name).folder
    for constant, value in (("HF_HUB_OFFLINE", True), ("ENDPOINT", "http://127.0.0.1:1")):
        with monkeypatch.context() as without:
            without.setattr(hub_constants, constant, value)
            assert find(name).folder == folder
            assert find(REPOSITORY).folder == folder  # the only one here
            line = r"has no GGUF F32; it has Q8_0 on this machine, and the hub is unreachable: "
            with pytest.raises(StartupError, match=line):
                find(f"{REPOSITORY}:F32")
            with pytest.raises(StartupError, match="org/other is not on this machine .* the hub is unreachable: "):
                find("org/other:Q8_0")


def test_a_download_that_broke_off_goes_on(
    hub: FakeHub, find: Resolve, content: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    hub.cut["tiny-Q8_0.gguf"] = 4096
    model = find(f"{REPOSITORY}:Q8_0")
    assert hub.fetched == [("tiny-Q8_0.gguf", 0), ("tiny-Q8_0.gguf", 4096)]
    assert weights_of(model) == [content["tiny-Q8_0.gguf"]]


def test_a_repository_without_ggufs_and_a_misspelt_path_say_so(
    hub: FakeHub, find: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories = {REPOSITORY: {"main": {"model.safetensors": b"", "mmproj.gguf": b""}}}
    with pytest.raises(WeightsError, match=f"^{REPOSITORY} has no GGUF of a model$"):
        find(f"{REPOSITORY}:Q8_0")
    with pytest.raises(StartupError, match="the hub has no repository org/other"):
        find("org/other/tiny.gguf")
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightsError, match=r"no such folder or file: models/tiny/a\.gguf"):
        find("models/tiny/a.gguf")


def test_the_command_fetches_with_the_token(content: dict[str, bytes], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "funitel.model_server", "download-weights", f"{REPOSITORY}:Q8_0"]
    with running(FakeHub({REPOSITORY: {"main": content}}, token="hf_secret")) as hub:
        refused = subprocess.run(command, env=hub.environ(tmp_path), capture_output=True, text=True)
        done = subprocess.run(command, env=hub.environ(tmp_path, HF_TOKEN="hf_secret"), capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"hub repository {REPOSITORY} is gated: accept its terms there and set HF_TOKEN" in refused.stderr
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / POINTER).is_file()
