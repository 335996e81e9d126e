"""Bytes kept for clients: counted, bounded over all, and it is the largest share that goes."""

from hypothesis import given
from hypothesis import strategies as st

from funitel.router.transport.memory_budget import MemoryBudget


class FakeClient:
    """Remembers what it was cut for."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def disconnect(self, reason: str) -> None:
        self.reasons.append(reason)

    def keep_unread(self, num_bytes: int) -> None:
        raise NotImplementedError

    def keep_body(self, num_bytes: int) -> None:
        raise NotImplementedError


def test_the_largest_share_goes_whoever_asks_for_more() -> None:
    ledger = MemoryBudget(100, "much")
    small, large, newcomer = FakeClient(), FakeClient(), FakeClient()
    ledger.add(small, 10)
    ledger.add(large, 80)
    ledger.add(newcomer, 10)
    assert ledger.num_bytes == 100
    ledger.add(small, 5)
    assert (small.reasons, large.reasons, newcomer.reasons) == ([], ["much"], [])
    assert ledger.num_bytes == 25
    ledger.add(large, -80)
    assert ledger.num_bytes == 25, "it was forgotten already"
    ledger.add(newcomer, 200)
    assert newcomer.reasons == ["much"]
    ledger.forget(small)
    assert ledger.num_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-50, 50))))
def test_the_sum_is_that_of_the_shares_and_never_too_large(changes: list[tuple[int, int]]) -> None:
    ledger, clients = MemoryBudget(100, "much"), [FakeClient() for _ in range(4)]
    for place, num_bytes in changes:
        ledger.add(clients[place], num_bytes)
        assert ledger.num_bytes == sum(ledger._bytes_of.values()) <= 100
        assert all(share > 0 for share in ledger._bytes_of.values())
