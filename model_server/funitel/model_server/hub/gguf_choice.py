"""Choose one GGUF of a hub repository by what follows the repository's name: a quantisation tag, a file, or nothing.

`owner/name:Q4_K_M` has a tag, `owner/name/folder/file.gguf` a path; a bare `owner/name` gets llama.cpp's choice.
Knows only names: no network, no disk.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from funitel.proto.errors import WeightsError

_HOSTS = re.compile(r"(https?://)?(www\.)?(hf\.co|huggingface\.co)/", re.IGNORECASE)
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_NO_MODELS = re.compile("mmproj|imatrix", re.IGNORECASE)  # projectors of images, statistics of quantisers
_QUANTISATION = re.compile(
    r"(?<![a-z0-9])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))(?![a-z0-9])",
    re.IGNORECASE,
)
_PREFERRED = ("Q4_K_M", "Q8_0")
_LATEST = "latest"  # what llama.cpp and Ollama call the default
_MAX_LISTED = 40


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository and what of it is asked for: a `tag`, a `file` by its path there, or neither."""

    repository: str
    tag: str | None = None
    file: str | None = None

    @property
    def wants_gguf(self) -> bool:
        """Whether a GGUF is meant even where there are other weights."""
        return self.tag is not None or self.file is not None


@dataclass(frozen=True, slots=True)
class HubGguf:
    """One model of a repository: its file or, of a split one, all files in order; `missing` are not there."""

    name: str
    files: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def quantisation(self) -> str:
        """The tag in its path, in capitals, such as `Q4_K_M`; empty where there is none."""
        found = _QUANTISATION.findall(self.name)
        return _canonical(found[-1]) if found else ""


def parse_hub_name(text: str) -> HubName:
    """Take the name of a repository and of its GGUF apart. Raises: `WeightsError`: the tag is empty."""
    name = _HOSTS.sub("", text, count=1) if _HOSTS.match(text) else text
    if is_hub_file(name):
        owner, repository, file = name.split("/", 2)
        return HubName(f"{owner}/{repository}", file=file)
    repository, colon, tag = name.partition(":")
    if not colon or tag.startswith("/"):  # an address of another host is no name
        return HubName(name)
    if not tag.strip():
        raise WeightsError(f"{text} has no tag after its colon: name a quantisation, such as {repository}:Q4_K_M")
    return HubName(repository, tag=None if tag.lower() == _LATEST else tag.strip())


def is_hub_file(model_id: str) -> bool:
    """Whether this has the form `owner/name/path/file.gguf`."""
    parts = model_id.split("/")
    return len(parts) > 2 and all(parts) and ":" not in "".join(parts[:2]) and parts[-1].lower().endswith(".gguf")


def models_among(files: Iterable[str]) -> list[HubGguf]:
    """The GGUF models among a repository's files, in the order of their names; parts of one are joined."""
    names = {name for name in files if name.lower().endswith(".gguf") and not _is_no_model(name)}
    found: dict[str, HubGguf] = {}
    for name in sorted(names):
        part = _PART.fullmatch(name)
        if part is None or int(part["count"]) < 1:
            found[name] = HubGguf(name, (name,))
        elif (key := f"{part['stem']}-of-{part['count']}") not in found:
            suffix = name[-5:]
            numbers = range(1, int(part["count"]) + 1)
            parts = tuple(f"{part['stem']}-{number:05}-of-{part['count']}{suffix}" for number in numbers)
            missing = tuple(each for each in parts if each not in names)
            found[key] = HubGguf(f"{part['stem']}{suffix}", parts, missing)
    return list(found.values())


def choose(models: Sequence[HubGguf], wanted: HubName) -> HubGguf:
    """The model that is asked for, by the closest fit.

    Raises: `WeightsError`: none or several fit, or parts of it are missing; the line has what there is.
    """
    if not models:
        raise WeightsError(f"{wanted.repository} has no GGUF of a model")
    if not wanted.wants_gguf:
        whole = [each for each in models if not each.missing] or models
        preferred = (found[0] for tag in _PREFERRED if (found := _of_quantisation(whole, tag)))
        return _complete(next(preferred, whole[0]), wanted.repository)
    if wanted.file is not None:
        asked, found = wanted.file, [each for each in models if wanted.file in (*each.files, each.name)]
    else:
        asked, found = str(wanted.tag), _of_tag(models, str(wanted.tag))
    if len(found) == 1:
        return _complete(found[0], wanted.repository)
    if found:
        raise WeightsError(f"{asked} fits {len(found)} models of {wanted.repository}: {described(found)}; name one")
    why = ", which is no model by its name" if _is_no_model(asked) else ""
    raise WeightsError(f"{wanted.repository} has no GGUF {asked}{why}; it has {described(models)}")


def described(models: Sequence[HubGguf]) -> str:
    """What can stand after the repository's name and a colon for each model, in one line."""
    counts = Counter(each.quantisation for each in models)
    labels = [
        each.quantisation if each.quantisation and counts[each.quantisation] == 1 else each.name for each in models
    ]
    rest = len(labels) - _MAX_LISTED
    return ", ".join(labels[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _is_no_model(name: str) -> bool:
    return _NO_MODELS.search(PurePosixPath(name).name) is not None


def _of_tag(models: Sequence[HubGguf], tag: str) -> list[HubGguf]:
    """The models that a tag fits: by name, by quantisation, by a whole word, else by a part of the name."""
    lower = tag.lower()
    named = [each for each in models if any(lower in _spellings(name) for name in (each.name, *each.files))]
    if found := named or _of_quantisation(models, tag):
        return found
    # A quantisation is not part of another: F16 not of BF16.
    before = "(?<![a-z0-9])" if _QUANTISATION.fullmatch(tag) else ""
    pattern = re.compile(before + re.escape(tag), re.IGNORECASE)
    return [each for each in models if any(pattern.search(name) for name in (each.name, *each.files))]


def _spellings(path: str) -> set[str]:
    """A path and a file's name, each with and without the suffix, in lower case."""
    lower = path.lower()
    name = PurePosixPath(lower).name
    return {lower, name, lower.removesuffix(".gguf"), name.removesuffix(".gguf")}


def _canonical(quantisation: str) -> str:
    return re.sub("^FP", "F", quantisation.upper())


def _of_quantisation(models: Sequence[HubGguf], tag: str) -> list[HubGguf]:
    if found := [each for each in models if each.quantisation == _canonical(tag)]:
        return found
    word = re.compile(rf"(?<![a-z0-9]){re.escape(tag)}(?![a-z0-9_])", re.IGNORECASE)
    return [each for each in models if word.search(each.name)]


def _complete(model: HubGguf, repository: str) -> HubGguf:
    if model.missing:
        rest = f" and {len(model.missing) - 1} more" if len(model.missing) > 1 else ""
        raise WeightsError(
            f"{repository} has {model.name} in {len(model.files)} parts, without {model.missing[0]}{rest}"
        )
    return model
