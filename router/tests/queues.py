"""A queue with sequences in it."""

from funitel.router.core.request import Sequence
from funitel.router.scheduler.waiting_queue import FairShares, WaitingQueue


def waiting(*sequences: Sequence) -> tuple[WaitingQueue, FairShares]:
    shares = FairShares()
    queue = WaitingQueue(shares)
    for sequence in sequences:
        shares.join(sequence.request.key)
        queue.add(sequence)
    return queue, shares
