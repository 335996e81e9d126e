"""Clients at work while a fault strikes, and what became of each of their requests."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from funitel_testing.faults.asks import Ask, Heard, Kind, Lost, Refused

PATIENCE_SECONDS = 240.0  # a request that takes longer hangs, however busy the machine
AGAIN_SECONDS = 0.2  # until one that was turned away asks again; shorter than any Retry-After, to see the first instant

STREAMS = (Kind.STREAM,)
MIXED = (Kind.STREAM, Kind.SAMPLE, Kind.CHAT, Kind.GRAMMAR, Kind.CHOICES, Kind.WHOLE, Kind.LONG)
LEAVES_EVERY = 6  # of mixed clients' requests one is left by its client midway

Answers = dict[Ask, Heard]


def asks_of(kinds: Sequence[Kind], count: int, num_tokens: int, salt: str = "") -> list[Ask]:
    """Different requests of these kinds in turn; where there are several kinds, some clients hang up midway."""
    asks = []
    for number in range(count):
        is_left = len(kinds) > 1 and number % LEAVES_EVERY == LEAVES_EVERY - 1
        kind = Kind.STREAM if is_left else kinds[number % len(kinds)]
        asks.append(Ask(kind, number, num_tokens, leave_after=num_tokens // 3 if is_left else None, salt=salt))
    return asks


@dataclass
class Outcome:
    """What became of a request; instants on the monotonic clock."""

    ask: Ask
    began: float  # the last time that it was asked
    ended: float | None = None
    heard: Heard = field(default_factory=Heard)
    loss: str = ""  # how it was lost
    num_refusals: int = 0  # times it was refused with Retry-After or found no server

    def __post_init__(self) -> None:
        """Remember the first time that it was asked."""
        self._first = self.began

    def was_in_flight(self, instant: float) -> bool:
        """Whether it had been asked by then, even if it was refused later, and not answered."""
        return self._first <= instant and not self.was_over(instant)

    def was_over(self, instant: float) -> bool:
        """Whether it had been answered by then."""
        return self.ended is not None and self.ended <= instant

    @property
    def is_heard(self) -> bool:
        """Whether its answer has begun, and is not whole."""
        return self.ended is None and self.heard.num_pieces >= 3


class Load:
    """Requests asked by `num_clients` clients, each of which asks its next one when it has its answer.

    Args:
        url: of the server.
        asks: what is asked, in this order.
        num_clients: most that are asked at once.
        may_be_away: a server that is not there, or goes before it has answered at all, is asked again.
        until_struck: all of it is asked again until the fault is injected, which thus finds requests in flight.
    """

    def __init__(
        self, url: str, asks: Sequence[Ask], num_clients: int, *, may_be_away: bool = False, until_struck: bool = False
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.struck: float | None = None  # set when the fault is injected
        self._url = url
        self._asks = self._rounds(asks, until_struck=until_struck)
        self._num_asks = len(asks)
        self._num_clients = num_clients
        self._may_be_away = may_be_away

    async def run(self) -> list[Outcome]:
        """Ask everything; every outcome, in the order of asking."""
        # A connection for each request: one kept from the last may be closed by the server as the next is sent.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_SECONDS, limits=limits) as client:
            await asyncio.gather(*(self._ask_on(client) for _ in range(self._num_clients)))
        return self.outcomes

    async def until_in_flight(self, share: float = 0.3) -> None:
        """Return once that share of the clients hears its answer, and has not heard all of it."""
        wanted = min(self._num_clients, self._num_asks) * share
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sum(outcome.is_heard for outcome in self.outcomes) < wanted:
            assert time.monotonic() < deadline, "the load does not start"
            assert not (losses := [outcome.loss for outcome in self.outcomes if outcome.loss]), losses
            await asyncio.sleep(0.01)

    def _rounds(self, asks: Sequence[Ask], *, until_struck: bool) -> Iterator[Ask]:
        yield from asks
        while until_struck and self.struck is None:
            yield from asks

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        for ask in self._asks:
            outcome = Outcome(ask, time.monotonic())
            self.outcomes.append(outcome)
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._insist(client, outcome)
            except TimeoutError:
                outcome.loss = f"no answer in {PATIENCE_SECONDS:g} s"
            except (Lost, httpx.HTTPError) as error:
                outcome.loss = f"{type(error).__name__}: {error}"
            outcome.ended = time.monotonic()

    async def _insist(self, client: httpx.AsyncClient, outcome: Outcome) -> None:
        """Ask until the request is let in; then hear its answer."""
        while True:
            outcome.began = time.monotonic()
            try:
                await outcome.ask.put(client, outcome.heard)
                return
            except Refused:
                pass
            except httpx.TransportError as error:
                if not self._is_away(error, outcome):
                    raise
            outcome.num_refusals += 1
            await asyncio.sleep(AGAIN_SECONDS)

    def _is_away(self, error: httpx.TransportError, outcome: Outcome) -> bool:
        """Whether no server answered: no connection, or one that an ending server did not accept."""
        is_late = self.struck is not None and outcome.began > self.struck
        is_unheard = not outcome.heard.num_pieces and isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
        return self._may_be_away and (isinstance(error, httpx.ConnectError) or (is_late and is_unheard))


async def undisturbed(url: str, asks: Sequence[Ask], num_clients: int) -> Answers:
    """What the server answers when nothing happens to it."""
    wanted = list(dict.fromkeys(ask.undisturbed for ask in asks))
    outcomes = await Load(url, wanted, num_clients).run()
    assert not (losses := [outcome.loss for outcome in outcomes if outcome.loss]), losses
    return {outcome.ask: outcome.heard for outcome in outcomes}


async def seconds_to_answer(url: str, since: float, *, may_be_lost: bool = False) -> float:
    """Seconds from an instant until a request that was asked after it has its whole answer.

    `may_be_lost`: a server that is about to end may have taken it; then it is asked again.
    """
    while True:
        load = Load(url, [Ask(Kind.STREAM, 1000, 2)], 1, may_be_away=True)
        load.struck = since
        (outcome,) = await load.run()
        if not outcome.loss:
            return time.monotonic() - since
        may_be_asked_again = may_be_lost and time.monotonic() - since < PATIENCE_SECONDS
        assert may_be_asked_again, f"the server does not come back: {outcome.loss}"
        await asyncio.sleep(AGAIN_SECONDS)
