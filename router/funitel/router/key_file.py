"""The API keys a router was given: one as a setting, more in a file."""

from pathlib import Path

from funitel.proto.errors import SettingsError


def read_keys(key: str | None, path: str | None) -> tuple[str, ...]:
    """Return `key`, if there is one, and those of the file at `path`, one a line, without empty lines.

    Raises:
        SettingsError: the file cannot be read or holds no key.
    """
    keys = [] if key is None else [key]
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--api-key-file {path}: {getattr(error, 'strerror', None) or error}") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise SettingsError(f"--api-key-file {path} must hold a key, one a line; it is empty")
        keys += found
    return tuple(dict.fromkeys(keys))
