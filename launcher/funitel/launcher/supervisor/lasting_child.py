"""Children that outlive a launcher that dies, so that the next one can adopt them; they write to files, not pipes."""

import asyncio
import logging
import os
import signal
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self

from funitel.launcher.processes.file_tail import FileTail
from funitel.launcher.processes.folder_watch import FolderWatch
from funitel.launcher.processes.relay import relay
from funitel.launcher.processes.watched import WatchedProcess
from funitel.launcher.supervisor.process import Child
from funitel.proto.errors import FunitelError
from funitel.proto.process.deployment_file import runs

logger = logging.getLogger(__name__)

_numbers = count()  # of the log files of this launcher


class LastingChild(Child):
    """A child that may outlive the launcher, or that an earlier launcher has started."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
        on_line: Callable[[str], None],
        *,
        log: Path,
        changes: FolderWatch,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Describe the child; `start` starts it.

        Args:
            name: for messages, such as "shard rank 0".
            argv: command line.
            environ: its complete environment.
            on_line: called with each line of its output.
            log: file of its output, which is removed once it has ended.
            changes: of the folder of that file.
            pass_fds: descriptors that it inherits under the same numbers.
        """
        super().__init__(name, argv, environ, on_line, pass_fds=pass_fds)
        self._log = log
        self._changes = changes
        self._tail = FileTail(log, self._take)
        self._process: WatchedProcess | None = None

    @property
    def record(self) -> Mapping[str, Any]:
        """What `adopt` needs."""
        identity = {"pid": 0, "started": 0} if self._process is None else self._process.identity
        return {**identity, "name": self.name, "argv": list(self._argv), "log": str(self._log)}

    async def start(self) -> None:
        """Start the process; one that cannot be started has exited with code 1, with the reason as its last error."""
        try:
            process = WatchedProcess.started_as(self.name, self._argv, self._environ, self._log, self._pass_fds)
        except FunitelError as error:
            self.error = error.message.removeprefix(f"{self.name} ")
            self._exited = asyncio.create_task(_ended(1))
            return
        self._follow(process)

    def adopt(self, record: Mapping[str, Any]) -> None:
        """Watch the process that an earlier launcher has started; where it has ended, this child has exited."""
        process = WatchedProcess.found(self.name, record) if runs(record) else None
        if process is None:
            self._remove_log()
            self._exited = asyncio.create_task(_ended(0))
            return
        self._follow(process)

    def _follow(self, process: WatchedProcess) -> None:
        self._process, self._pid = process, process.pid
        self._tail.start()
        self._changes.add(self._tail.read)
        self._exited = asyncio.create_task(self._until_ended(process))

    async def _until_ended(self, process: WatchedProcess) -> int:
        await asyncio.wait({process.exited})
        self._changes.remove(self._tail.read)
        self._tail.stop()
        self._remove_log()
        return process.exited.result() or 0

    @property
    def code(self) -> int | None:
        return self.exited.result() if self._process is None else self._process.exited.result()

    def _remove_log(self) -> None:
        with suppress(OSError):
            self._log.unlink()

    def _take(self, line: str) -> None:
        self._note(line)
        self._on_line(line)

    def _signal(self, send: Callable[[int, int], None], number: signal.Signals) -> None:
        if self._process is None:
            return
        if send is os.killpg:
            self._process.kill()
        else:
            self._process.send(number)


async def _ended(code: int) -> int:
    return code


@dataclass(frozen=True, slots=True)
class LastingFiles:
    """Where children that outlive a launcher write, and the file that names them; without it they never end with it."""

    logs: Path
    deployment_file: str | None = None

    def prepare(self) -> None:
        """Make the folder of the logs; raises OSError where another user has it."""
        self.logs.mkdir(mode=0o700, exist_ok=True)
        facts = self.logs.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
            raise PermissionError(f"{self.logs} belongs to another user")
        self.logs.chmod(0o700)


@dataclass(frozen=True, slots=True)
class ChildMaker:
    """Makes children: ones that end with the launcher, or, with `lasting`, ones that another launcher can adopt.

    Attributes:
        json_output: of the launcher.
        lasting: files of children that outlive it.
        on_change: called when the processes are others than before.
        changes: of the folder of logs.
    """

    json_output: bool
    lasting: LastingFiles | None = None
    on_change: Callable[[], None] = field(default=lambda: None)
    changes: FolderWatch | None = None

    @classmethod
    def lasting_in(cls, files: LastingFiles | None, on_change: Callable[[], None], *, json_output: bool) -> Self:
        """Make children with these files, if any."""
        return cls(json_output, files, on_change, None if files is None else FolderWatch(files.logs))

    @property
    def outlives(self) -> bool:
        """Whether children go on without any launcher."""
        return self.lasting is not None and self.lasting.deployment_file is None

    @property
    def deployment_file(self) -> str | None:
        """For the command lines of children."""
        return None if self.lasting is None else self.lasting.deployment_file

    def make(
        self, name: str, title: str, argv: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> Child:
        """Describe a child; `title` precedes the lines of its output."""
        on_line = relay(title, json_output=self.json_output)
        if self.lasting is None or self.changes is None:
            return Child(name, argv, environ, on_line, pass_fds=pass_fds)
        log = self.lasting.logs / f"{title.replace(' ', '-')}-{os.getpid()}-{next(_numbers)}.log"
        return LastingChild(name, argv, environ, on_line, log=log, changes=self.changes, pass_fds=pass_fds)

    def adopt(self, title: str, record: Mapping[str, Any]) -> Child:
        """Watch a child of an earlier launcher."""
        on_line, log = relay(title, json_output=self.json_output), Path(record["log"])
        assert self.changes is not None, "only children that outlive a launcher are adopted"
        child = LastingChild(record["name"], record["argv"], {}, on_line, log=log, changes=self.changes)
        child.adopt(record)
        return child


def record_of(child: Child | None) -> Mapping[str, Any] | None:
    """What is needed to adopt a child; None for one that ends with the launcher."""
    return child.record if isinstance(child, LastingChild) else None
