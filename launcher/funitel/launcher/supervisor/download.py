"""Run the model server's download command before any shard starts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from funitel.launcher.processes.relay import parse_record, relay
from funitel.launcher.supervisor.process import Child
from funitel.proto.errors import StartupError


class Download:
    """One run of `download-weights`; it inherits stderr, so that progress bars work on a terminal.

    With `json_output` its stderr is rewritten as JSON events, like that of other processes.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], *, json_output: bool = False) -> None:
        self._lines: list[str] = []
        self._log = relay("download", json_output=True)
        on_stderr_line = self._log if json_output else None
        self.child = Child(
            "download", argv, environ, self._on_line, stderr_through=not json_output, on_stderr_line=on_stderr_line
        )

    def _on_line(self, line: str) -> None:
        """Forward log records; keep other lines, of which the last is the folder."""
        if parse_record(line) is not None:
            self._log(line)
        else:
            self._lines.append(line)

    async def folder(self) -> Path:
        """Run it and return the model's folder.

        Raises:
            typer.Exit: it failed and has logged the reason in its own `error:` line.
            StartupError: it was killed, printed nothing, or could not be started.
        """
        await self.child.start()
        code = await self.child.wait()
        if code > 0 and self.child.has_started:
            raise typer.Exit(1)
        if code != 0 or not self._lines:
            raise StartupError(self.child.exit_reason())
        return Path(self._lines[-1])
