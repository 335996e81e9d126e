"""A queue with sequences in it."""

from funitel.router.core.request import Sequence
from funitel.router.scheduler.waiting_queue import Shares, WaitingQueue


def waiting(*sequences: Sequence) -> tuple[WaitingQueue, Shares]:
    shares = Shares()
    queue = WaitingQueue(shares)
    for sequence in sequences:
        shares.join(sequence.request.key)
        queue.add(sequence)
    return queue, shares
