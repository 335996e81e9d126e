"""Clients of bytes under load while something dies, and their answers beside those of an undisturbed run."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from funitel_testing.takeovers.asks import ASKS, RawAsk, comparable, drawn_ids
from funitel_testing.takeovers.raw import RawAnswer, RawConnection

SLOW_EVERY = 7  # of the clients one is a slow reader,
PIPELINED_EVERY = 5  # and one sends two requests at once
CLOSING_EVERY = 11  # and one asks for the connection to be closed
RESTARTED = b"the router was restarted while this request came in"
Reference = dict[tuple[str, int], RawAnswer]


@dataclass
class Comparison:
    """What became of the requests of one run."""

    num_answers: int = 0
    num_refused: int = 0  # requests that were read and not in the journal yet: 503, to be repeated
    problems: list[str] = field(default_factory=list)
    silences: list[float] = field(default_factory=list)  # the longest of each answer, in seconds

    def take(self, ask: RawAsk, number: int, answer: RawAnswer, expected: RawAnswer) -> None:
        """Compare an answer with the one of an undisturbed run."""
        self.num_answers += 1
        self.silences.append(answer.silence)
        where = f"{ask.name} {number}"
        if answer.status != 200:
            self.problems.append(f"{where}: {answer.status} {answer.body[:200]!r}")
            return
        (head, chunks), (known_head, known_chunks) = comparable(answer), comparable(expected)
        if head != known_head:
            self.problems.append(f"{where}: head {head!r} instead of {known_head!r}")
        if chunks != known_chunks:
            self.problems.append(f"{where}: {_difference(chunks, known_chunks)}")
        for name, values in drawn_ids(answer).items():
            if len(values) != 1:
                self.problems.append(f"{where}: several values of {name.decode()}: {sorted(values)}")


def _difference(chunks: Sequence[bytes], known: Sequence[bytes]) -> str:
    for place, (chunk, other) in enumerate(zip(chunks, known, strict=False)):
        if chunk != other:
            return f"chunk {place} of {len(known)} is {chunk[:160]!r} instead of {other[:160]!r}"
    return f"{len(chunks)} chunks instead of {len(known)}"


async def undisturbed(port: int, count: int, num_tokens: int, kinds: Sequence[RawAsk] = ASKS) -> Reference:
    """The answers of so many requests, each kind in turn, while nothing dies."""
    found: Reference = {}

    async def ask(number: int) -> None:
        kind = kinds[number % len(kinds)]
        connection = await RawConnection.to(port)
        await connection.send(kind.request(number, num_tokens))
        found[kind.name, number] = await connection.answer()
        await connection.close()

    await asyncio.gather(*(ask(number) for number in range(count)))
    return found


async def disturbed(
    port: int,
    count: int,
    num_tokens: int,
    known: Reference,
    strike: Callable[[], Awaitable[None]],
    comparison: Comparison,
    kinds: Sequence[RawAsk] = ASKS,
) -> None:
    """Ask the same requests again, while `strike` does its work, and compare every answer."""

    async def ask(number: int) -> None:
        is_slow = number % SLOW_EVERY == SLOW_EVERY - 1
        numbers = [number]
        if number % PIPELINED_EVERY == PIPELINED_EVERY - 1:
            numbers.append((number + len(kinds)) % count)
        closes = len(numbers) == 1 and number % CLOSING_EVERY == CLOSING_EVERY - 1
        asks = [(kinds[each % len(kinds)], each) for each in numbers]
        connection = await RawConnection.to(port, is_slow=is_slow)
        await connection.send(*(kind.request(each, num_tokens, closes=closes) for kind, each in asks))
        for kind, each in asks:
            try:
                answer = await connection.answer()
            except Exception as error:
                comparison.num_answers += 1
                comparison.problems.append(f"{kind.name} {each}: {type(error).__name__}: {error}")
                break
            if answer.status == 503 and RESTARTED in answer.body:
                comparison.num_refused += 1
                break
            if closes:
                answer.head = answer.head.replace(b"connection: close\r\n", b"")
            comparison.take(kind, each, answer, known[kind.name, each])
        await connection.close()

    await asyncio.gather(strike(), *(ask(number) for number in range(count)))


def report(comparison: Comparison) -> str:
    """One line, and the first problems."""
    worst = sorted(comparison.silences)
    median = worst[len(worst) // 2] if worst else 0.0
    lines = [
        f"{comparison.num_answers} answers, {len(comparison.problems)} wrong or lost, "
        f"{comparison.num_refused} requests refused, "
        f"longest silence median {median:.2f} s, worst {max(worst, default=0.0):.2f} s"
    ]
    return "\n".join([*lines, *comparison.problems[:10]])
