"""Make of a GGUF that no row is for a folder that names it: tokenizer, sizes, and why our own engine does not run it.

Another engine reads the tensors itself; the pointer of such a folder has none.
"""

from pathlib import Path

from funitel.model_server.convert.gguf import point_to_gguf
from funitel.model_server.convert.gguf_reader import read_gguf
from funitel.model_server.convert.gguf_tokenizer import build_tokenizer, special_token_id
from funitel.model_server.convert.hf_folder import write_json
from funitel.model_server.files.gguf_pointer import GgufPointer, part_of, write_pointer
from funitel.model_server.files.gguf_refusal import GGUF_REFUSAL
from funitel.proto.errors import UnsupportedModel


def point_or_describe(path: Path, folder: Path) -> None:
    """Write into `folder` what `point_to_gguf` does, or for a file that no row is for what another engine needs.

    Raises: `UnsupportedModel` for a tokenizer that is not supported, `WeightsError` for a damaged or incomplete file.
    """
    try:
        point_to_gguf(path, folder)
    except UnsupportedModel as error:
        _describe(path, folder, error.message)


def _describe(path: Path, folder: Path, refusal: str) -> None:
    gguf = read_gguf(path)
    built = build_tokenizer(gguf)
    token_ids = {f"{name}_token_id": special_token_id(gguf, name) for name in ("bos", "eos", "eot", "eom", "pad")}
    ends = [token_ids.pop(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    token_ids = {name: token_id for name, token_id in token_ids.items() if token_id is not None}
    config: dict[str, object] = {
        "architectures": [],
        "model_type": gguf.architecture,
        GGUF_REFUSAL: refusal,
        "vocab_size": built.tokenizer.get_vocab_size(),
        "max_position_embeddings": gguf.integer(gguf.key("context_length")),
        **token_ids,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {**token_ids, **({"eos_token_id": known} if known else {})})
    write_json(folder / "tokenizer_config.json", built.settings)
    built.tokenizer.save(str(folder / "tokenizer.json"))
    write_pointer(folder, GgufPointer(tuple(part_of(folder, *each) for each in gguf.parts), {}))
