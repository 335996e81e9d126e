"""Parse and format the adapters to serve, in TGI's form: `owner/repo,name=owner/repo@revision,name=/folder`."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAX_NAME_CHARACTERS = 256
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter as it is listed: its name, and a folder, or else a hub repository and its revision."""

    name: str
    folder: str | None = None
    repository: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        place = self.folder or self.repository or ""
        if self.revision is not None:
            place += f"@{self.revision}"
        return f"{self.name}={place}"

    @classmethod
    def parse(cls, text: str) -> "AdapterSource":
        """Read one entry; raises ValueError with the reason for text of another form."""
        name, equals, place = text.partition("=")
        if not equals:
            place = text
        if problem := name_problem(name if equals else text):
            raise ValueError(f"has a name that {problem}: {text!r}")
        if place.startswith(("/", ".", "~")):
            return cls(name, folder=place)
        repository, at, revision = place.partition("@")
        if not _REPOSITORY.fullmatch(repository) or "@" in revision or (at and not revision):
            words = "is neither a folder, which begins with / or ., nor owner/repo or owner/repo@revision"
            raise ValueError(f"has an adapter that {words}: {text!r}")
        return cls(name if equals else repository, repository=repository, revision=revision or None)


def name_problem(name: str) -> str | None:
    """What is wrong with the name of an adapter; None if nothing is. Metrics list names with commas between."""
    if not name.strip():
        return "is empty"
    if len(name) > MAX_NAME_CHARACTERS:
        return f"has more than {MAX_NAME_CHARACTERS} characters"
    if "," in name or not name.isprintable():
        return "has a comma, or characters that do not print"
    return None


class AdapterList:
    """Adapters to serve, from text with commas between or from entries; `str` gives the text."""

    def __init__(self, listed: str | Iterable[AdapterSource]) -> None:
        """Raise ValueError with the reason for text of another form, or a name that is given twice."""
        self._entries = _parse(listed) if isinstance(listed, str) else tuple(listed)
        names = [entry.name for entry in self._entries]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"names two adapters {twice!r}")

    def __iter__(self) -> Iterator[AdapterSource]:
        return iter(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdapterList) and self._entries == other._entries

    def __hash__(self) -> int:
        return hash(self._entries)

    def __str__(self) -> str:
        return ",".join(map(str, self._entries))


def _parse(text: str) -> tuple[AdapterSource, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError("has an empty entry")
    return tuple(AdapterSource.parse(part) for part in parts)
