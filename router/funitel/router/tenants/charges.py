"""Charges that last: what requests reserve and what they have used is written by the control plane, in batches.

One batch is under way at a time; what comes meanwhile makes the next one. A request with a limit by month runs once its
reservation is on the disk. What others have used is kept here for a second, and sent again until it is taken.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from pydantic import BaseModel, ValidationError

from funitel.proto.errors import FunitelError, NotReady, QuotaExceeded
from funitel.proto.security.quota import QuotaReservation, Settlement
from funitel.router.fleet.control import ControlAnswer, ControlSocket

logger = logging.getLogger(__name__)

TARGET = "/v1/fleet/charges"
USAGE_SECONDS = 1.0  # that usage is kept before it is sent
RETRY_SECONDS = 0.5
ANSWER_SECONDS = 5.0  # that the control plane may take to write a batch
# Of one batch. To lay it out and to encode it holds up all streams, by about 5 us for each.
MAX_RESERVATIONS = 1024
MAX_SETTLEMENTS = 1024
_ID_BYTES = 12


@dataclass(frozen=True, slots=True)
class _Sending:
    """A reservation that is being sent, with what is told its answer."""

    reservation: QuotaReservation
    answered: "asyncio.Future[None]" = field(compare=False)


class _Refusal(BaseModel):
    message: str
    limit: str


class _Answer(BaseModel):
    """What the control plane says of the reservations of a batch, in their order."""

    refusals: tuple[_Refusal | None, ...]


_RESERVATION = tuple(each.name for each in fields(QuotaReservation))
_SETTLEMENT = tuple(each.name for each in fields(Settlement))


class Charges:
    """Sends charges to the control plane. Event loop only."""

    def __init__(self, control: ControlSocket) -> None:
        self._control = control
        self._router = secrets.token_hex(_ID_BYTES)
        self._number = 0
        self._reserving: list[_Sending] = []
        self._settled: list[Settlement] = []
        self._sending: tuple[Settlement, ...] = ()  # those of the last batch, until they are taken
        self._wake = asyncio.Event()

    def new_id(self) -> str:
        """An id for a request."""
        return f"{self._router}-{secrets.token_hex(_ID_BYTES)}"

    def has_made(self, id: str) -> bool:
        """Whether an id is of this router, not of one before it."""
        return id.startswith(f"{self._router}-")

    async def reserve(self, reservation: QuotaReservation) -> None:
        """Reserve the most that a request may take; returns once it is on the disk.

        Raises:
            QuotaExceeded: not so much is left of a month.
            NotReady: the control plane does not answer.
        """
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reserving.append(_Sending(reservation, answered))
        self._wake.set()
        try:
            await answered
        except asyncio.CancelledError:
            if not answered.cancelled() and answered.exception() is None:  # written, and its client leaves now
                self.settle(reservation.unused(), is_reserved=True)
            raise

    def settle(self, settled: Settlement, *, is_reserved: bool) -> None:
        """Send what a request has used: at once where it has a reservation, else within a second."""
        self._settled.append(settled)
        if is_reserved:
            self._wake.set()

    async def run(self) -> None:
        """Send batches until cancelled."""
        while True:
            try:
                async with asyncio.timeout(USAGE_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            while self._reserving or self._settled or self._sending:
                if not await self._send():
                    await asyncio.sleep(RETRY_SECONDS)

    async def flush(self) -> None:
        """Send what has been used; what the control plane does not take at once is lost, and logged."""
        while self._settled or self._sending:
            if not await self._send():
                lost = len(self._settled) + len(self._sending)
                logger.error("the usage of %d requests is lost: the control plane does not answer", lost)
                return

    async def _send(self) -> bool:
        """Send one batch; False where the control plane has not taken what was used."""
        taken, self._reserving = self._reserving[:MAX_RESERVATIONS], self._reserving[MAX_RESERVATIONS:]
        taken = [each for each in taken if not each.answered.done()]  # a client that left waits no more
        if not self._sending:
            self._sending, self._settled = tuple(self._settled[:MAX_SETTLEMENTS]), self._settled[MAX_SETTLEMENTS:]
            self._number += 1  # what is sent again has the same number, so that it counts once
        content = {
            "router": self._router,
            "number": self._number,
            "reservations": _objects(_RESERVATION, (each.reservation for each in taken)),
            "settlements": _objects(_SETTLEMENT, self._sending),
        }
        try:
            answer = await self._told(content)
            if answer.status != 200:
                raise NotReady(answer.error)
            refusals = _refusals(answer.content, len(taken))
        except asyncio.CancelledError:
            self._refuse(taken, NotReady("the server stops"))
            raise
        except FunitelError as error:
            self._refuse(taken, NotReady(f"the limits of this API key cannot be checked: {error.message}"))
            return not self._sending
        self._sending = ()
        for each, refusal in zip(taken, refusals, strict=True):
            self._answer(each, refusal)
        return True

    async def _told(self, content: dict[str, object]) -> ControlAnswer:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._control.tell(TARGET, content)
        except TimeoutError:
            raise NotReady(f"the control plane has not answered for {ANSWER_SECONDS:g} s") from None

    def _answer(self, each: _Sending, refusal: _Refusal | None) -> None:
        if each.answered.done():
            if refusal is None:  # its client left meanwhile
                self.settle(each.reservation.unused(), is_reserved=True)
        elif refusal is None:
            each.answered.set_result(None)
        else:
            each.answered.set_exception(QuotaExceeded(refusal.message, refusal.limit))

    def _refuse(self, taken: list[_Sending], error: FunitelError) -> None:
        """Refuse reservations that may have been written: they are settled as unused."""
        for each in taken:
            if not each.answered.done():
                each.answered.set_exception(error)
            self._settled.append(each.reservation.unused())


def _objects(names: tuple[str, ...], records: Iterable[object]) -> list[dict[str, Any]]:
    """What `dataclasses.asdict` makes of flat records, in a tenth of its time."""
    values: Callable[[object], tuple[Any, ...]] = attrgetter(*names)
    return [dict(zip(names, values(record), strict=True)) for record in records]


def _refusals(content: bytes, count: int) -> tuple[_Refusal | None, ...]:
    """What an answer says of `count` reservations; raises NotReady for what is no such answer."""
    try:
        refusals = _Answer.model_validate_json(content).refusals
    except ValidationError:
        raise NotReady("the control plane sent no answer to charges") from None
    if len(refusals) != count:
        raise NotReady(f"the control plane answered {len(refusals)} of {count} reservations")
    return refusals
