"""Make the model present and whole before any shard starts, by the model server's own download command."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from funitel.launcher.supervisor.process import Child, parse_record, relay
from funitel.proto.errors import StartupError


class Download:
    """One run of `download-weights`, its stderr left alone so that progress bars look right on a terminal."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self._lines: list[str] = []
        self._log = relay("download", json_output=True)
        self.child = Child("download", argv, environ, self._on_line, stderr_through=True)

    def _on_line(self, line: str) -> None:
        """Hand on what it logs; the rest ends with the folder."""
        if parse_record(line) is not None:
            self._log(line)
        else:
            self._lines.append(line)

    async def folder(self) -> Path:
        """Run it and return the model's folder.

        Raises:
            typer.Exit: it failed and has said why, in its own `error:` line.
            StartupError: it was killed or answered nothing.
        """
        await self.child.start()
        code = await self.child.wait()
        if code > 0:
            raise typer.Exit(1)
        if code < 0 or not self._lines:
            raise StartupError(self.child.epitaph())
        return Path(self._lines[-1])
