"""The folders of a control plane: of its sockets, its state, its logs."""

from dataclasses import dataclass
from pathlib import Path

from funitel.launcher.control_plane.state_folder import CONTROL_SOCKET, DATABASE, LOGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where a control plane has its files.

    Attributes:
        run: of sockets.
        state: of the state, which outlives the process; None for one in memory.
    """

    run: Path
    state: Path | None

    @property
    def database(self) -> Path | None:
        """Of the state; None for one in memory."""
        return None if self.state is None else self.state / DATABASE

    @property
    def files(self) -> Path:
        """Of logs and of the files of registrations."""
        return self.run if self.state is None else self.state

    @property
    def logs(self) -> Path:
        """Of the output of processes."""
        return self.files / LOGS

    @property
    def control_socket(self) -> Path:
        """Of the control plane."""
        return self.run / CONTROL_SOCKET
