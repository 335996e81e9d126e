"""The flags of a rank: those that the control plane sends, and those that the machine itself decides."""

from collections.abc import Iterator, Sequence
from dataclasses import fields

from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import StartupError
from funitel.proto.settings.options import flag_of

DECIDED_HERE = frozenset(
    {
        *("--revision", "--cache-dir", "--uds-path", "--listen", "--folder-fd", "--exit-with-parent"),
        *("--shard-tls-cert", "--shard-tls-key", "--shard-tls-ca"),
        *("--rank", "--local-rank", "--world-size", "--sharded", "--master-addr", "--master-port"),
        *("--cores", "--memory-node", "--most-threads", "--replicas-on-host"),
    }
)
"""Flags of a shard that depend on its machine, or on the job as a whole."""

_KNOWN = frozenset(flag_of(field.name) for field in fields(ModelServerSettings) if field.name != "model_id")


def flags_to_send(argv: Sequence[str]) -> tuple[str, ...]:
    """The flags of a shard's command line (behind the model) without those that its machine decides."""
    return tuple(word for flag, *values in _groups(argv) if flag not in DECIDED_HERE for word in (flag, *values))


def check_flags(flags: Sequence[str]) -> None:
    """Raise StartupError for a word that is no flag of a shard, or one that this machine decides."""
    if flags and not flags[0].startswith("--"):
        raise StartupError(f"{flags[0]!r} is no flag of a shard")
    for flag, *values in _groups(flags):
        if flag not in _KNOWN:
            raise StartupError(f"{flag} is no flag of a shard of this release")
        if flag in DECIDED_HERE:
            raise StartupError(f"{flag} is decided by the machine of the shard")
        if len(values) > 1:
            raise StartupError(f"{flag} has more than one value")


def value_of(flags: Sequence[str], flag: str) -> str | None:
    """The value of a flag; None where it is not given."""
    return next((values[0] for name, *values in _groups(flags) if name == flag and values), None)


def _groups(words: Sequence[str]) -> Iterator[list[str]]:
    """Each flag with its values; a word before the first flag is left out."""
    group: list[str] = []
    for word in words:
        if word.startswith("--"):
            if group:
                yield group
            group = [word]
        elif group:
            group.append(word)
    if group:
        yield group
