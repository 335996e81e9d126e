"""The tasks that wait for a sandbox process: a queue for each API key, and the keys take turns. Event loop only."""

from collections import OrderedDict
from collections.abc import Container, Iterator

from funitel.router.sandbox.process import SandboxTask


class TaskQueue:
    """Tasks in the order of their turns; `len` and iteration are over all of them."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[bytes, OrderedDict[SandboxTask, None]] = OrderedDict()  # the next key first

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def __iter__(self) -> Iterator[SandboxTask]:
        for tasks in self._by_key.values():
            yield from tasks

    def append(self, task: SandboxTask) -> None:
        """Let a task wait behind those of its key."""
        self._by_key.setdefault(task.key, OrderedDict())[task] = None

    def put_back(self, task: SandboxTask) -> None:
        """Let a task wait before all others."""
        tasks = self._by_key.setdefault(task.key, OrderedDict())
        tasks[task] = None
        tasks.move_to_end(task, last=False)
        self._by_key.move_to_end(task.key, last=False)

    def first(self, passed_over: Container[bytes] = ()) -> SandboxTask | None:
        """The first task of the next key, some keys passed over."""
        return next((next(iter(tasks)) for key, tasks in self._by_key.items() if key not in passed_over), None)

    def take(self, task: SandboxTask) -> None:
        """Remove a task at its turn; the other keys are next."""
        self.discard(task)
        if task.key in self._by_key:
            self._by_key.move_to_end(task.key)

    def discard(self, task: SandboxTask) -> None:
        """Remove a task, if it waits."""
        tasks = self._by_key.get(task.key)
        if tasks is not None:
            tasks.pop(task, None)
            if not tasks:
                del self._by_key[task.key]

    def clear(self) -> None:
        """Remove all tasks."""
        self._by_key.clear()
