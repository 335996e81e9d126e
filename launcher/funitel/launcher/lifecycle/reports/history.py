"""The history of models: the last events of each, in memory for answers and in the state for a later start."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from funitel.launcher.control_plane.records import ModelEvent

logger = logging.getLogger(__name__)

MAX_EVENTS = 200  # of one model
MAX_MODELS = 1000  # also of those that were forgotten


class History:
    """Events by the name of the model."""

    def __init__(self, write: Callable[[str, ModelEvent], None]) -> None:
        """Begin empty; `write` is called with each new event."""
        self._write = write
        self._events: OrderedDict[str, deque[ModelEvent]] = OrderedDict()

    def restore(self, name: str, events: Sequence[ModelEvent]) -> None:
        """Take the events of an earlier start."""
        self._events[name] = deque(events, MAX_EVENTS)

    def add(self, name: str, stage: str, message: str) -> None:
        """Add an event, and log it."""
        event = ModelEvent(at=time.time(), stage=stage, message=message)
        self._events.setdefault(name, deque(maxlen=MAX_EVENTS)).append(event)
        self._events.move_to_end(name)
        while len(self._events) > MAX_MODELS:
            self._events.popitem(last=False)
        logger.info("%s %s: %s", name, stage, message)
        self._write(name, event)

    def of(self, name: str) -> Sequence[ModelEvent] | None:
        """The events of a model, oldest first; None for a name that never was."""
        events = self._events.get(name)
        return None if events is None else tuple(events)
