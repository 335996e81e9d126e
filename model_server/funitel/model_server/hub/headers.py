"""A hub repository as a folder of headers: its configuration, and weights files that have their length and no content.

What a model takes is computed from such a folder as from a whole one, and no weight is fetched.
"""

import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi, get_session, hf_hub_download, hf_hub_url, hf_raise_for_status
from huggingface_hub.constants import DEFAULT_REVISION
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, by the library's pages

from funitel.model_server.convert.gguf_description import point_or_describe
from funitel.model_server.convert.gguf_reader import read_part
from funitel.model_server.hub.gguf_choice import choose, models_among, parse_hub_name
from funitel.model_server.hub.huggingface import explained_errors, is_weights
from funitel.proto.errors import WeightsError

_CONFIG_FILES = frozenset(
    (
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "quantize_config.json",
        "quant_config.json",
        "hf_quant_config.json",
        "model.safetensors.index.json",
    )
)
_CHUNK_BYTES = 1 << 20
_FIRST_CHUNKS = 4  # that hold the header of most GGUFs; then twice as many, and so on


def fetch_headers(model_id: str, revision: str | None, folder: Path) -> Path:
    """Write the headers of a repository, or of the GGUF of it that is named, below `folder`.

    Returns: the folder of the model.

    Raises:
        WeightsError: it has neither safetensors nor the GGUF that is asked for, or that is damaged.
        StartupError: the hub cannot be reached, or refuses.
    """
    wanted = parse_hub_name(model_id)
    repository, revision = wanted.repository, revision or DEFAULT_REVISION
    with explained_errors(model_id, repository, revision):
        siblings = HfApi().model_info(repository, revision=revision).siblings or ()
        files = [each.rfilename for each in siblings]
        ggufs = models_among(files)
        if wanted.wants_gguf or ggufs and not any(map(is_weights, files)):
            paths = [_fetch_gguf(repository, name, revision, folder) for name in choose(ggufs, wanted).files]
            made = folder / "model"
            made.mkdir()
            point_or_describe(paths[0], made)
            return made
        _fetch_safetensors(repository, files, revision, folder)
        return folder


def _fetch_safetensors(repository: str, files: list[str], revision: str, folder: Path) -> None:
    weights = [name for name in files if is_weights(name)]
    if not weights:
        raise WeightsError(
            f"{repository} has no safetensors on the hub: what it takes is known once it is downloaded "
            f"(funitel download-weights {repository})"
        )
    for name in files:
        if name in _CONFIG_FILES:
            shutil.copyfile(hf_hub_download(repository, name, revision=revision), folder / name)
    for name in weights:
        found = HfApi().parse_safetensors_file_metadata(repository, name, revision=revision)
        header: dict[str, object] = {
            tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": list(info.data_offsets)}
            for tensor, info in found.tensors.items()
        }
        num_bytes = max((info.data_offsets[1] for info in found.tensors.values()), default=0)
        _write_hollow(folder / name, header | {"__metadata__": found.metadata}, num_bytes)


def _write_hollow(path: Path, header: dict[str, object], num_bytes: int) -> None:
    """A safetensors file of this header; its data is a hole, which takes no room on the disk."""
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + num_bytes)


def _fetch_gguf(repository: str, name: str, revision: str, folder: Path) -> Path:
    """A file of a GGUF as far as its header goes; the rest is a hole."""
    path = folder / Path(name).name
    url = hf_hub_url(repository, name, revision=revision)
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer, path.open("wb") as file:
        hf_raise_for_status(answer)
        num_bytes = int(answer.headers["Content-Length"])
        needed = _FIRST_CHUNKS
        for count, chunk in enumerate(answer.iter_bytes(_CHUNK_BYTES), 1):
            file.write(chunk)
            if count == needed:
                file.flush()
                file.truncate(num_bytes)
                if _has_header(path):
                    break
                needed *= 2
        file.truncate(num_bytes)
    return path


def _has_header(path: Path) -> bool:
    with suppress(WeightsError):
        read_part(path)
        return True
    return False
