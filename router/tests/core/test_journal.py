"""The journal of a request: facts are drawn once, handed over before they are used, and read by the next router."""

from typing import Any

from funitel.router.core.journal import EARLIER, KEY, UNKEPT, KeptJournal, earlier_facts, is_replayed


def test_a_request_that_is_not_kept_draws_anew() -> None:
    values = iter((1, 2))
    assert [UNKEPT.draw("seed", lambda: next(values)) for _ in range(2)] == [1, 2]
    assert UNKEPT.output_key() == ""


def test_a_fact_is_drawn_once_and_handed_over_once() -> None:
    put: list[dict[str, Any]] = []
    journal = KeptJournal("a", {}, put.append)
    values = iter((1, 2))
    assert [journal.draw("seed", lambda: next(values)) for _ in range(2)] == [1, 1]
    assert not put
    journal.flush()
    journal.flush()
    journal.draw("id", lambda: "x")
    journal.flush()
    assert put == [{"seed": 1}, {"id": "x"}]


def test_the_next_router_finds_the_facts() -> None:
    put: list[dict[str, Any]] = []
    journal = KeptJournal("a", {"seed": 7}, put.append)
    assert journal.draw("seed", lambda: 8) == 7
    journal.flush()
    assert not put
    assert [journal.output_key() for _ in range(2)] == ["a/1", "a/2"]


def test_facts_of_one_name_are_drawn_in_order() -> None:
    put: list[dict[str, Any]] = []
    journal = KeptJournal("a", {}, put.append)
    values = iter((3, 4))
    assert [journal.draw_next("seed", lambda: next(values)) for _ in range(2)] == [3, 4]
    journal.flush()
    again = KeptJournal("a", put[0], put.append)
    assert [again.draw_next("seed", lambda: 9) for _ in range(3)] == [3, 4, 9]


def test_shards_keep_no_outputs_of_an_answer_that_depends_on_none() -> None:
    journal = KeptJournal("a", {}, lambda _: None)
    journal.keep_no_outputs()
    UNKEPT.keep_no_outputs()
    assert journal.output_key() == ""


def test_nothing_is_handed_over_once_the_answer_was_given() -> None:
    put: list[dict[str, Any]] = []
    journal = KeptJournal("a", {}, put.append)
    ended: list[str] = []
    journal.when_done(lambda: ended.append("a"))
    journal.done()
    journal.done()
    journal.draw("late", lambda: 1)
    journal.flush()
    assert put == []


def test_a_scope_says_what_an_earlier_router_has_left() -> None:
    assert not is_replayed({})
    assert not is_replayed({EARLIER: {}})
    assert is_replayed({EARLIER: {KEY: "a"}})
    assert earlier_facts({EARLIER: {KEY: "a"}}) == {KEY: "a"}


def test_what_waits_for_the_end_of_an_answer_is_called_once_even_if_it_comes_late() -> None:
    called: list[str] = []
    journal = KeptJournal("a", {}, lambda facts: None)
    journal.when_done(lambda: called.append("early"))
    assert not called
    journal.done()
    journal.done()
    journal.when_done(lambda: called.append("late"))
    assert called == ["early", "late"]
    UNKEPT.when_done(lambda: called.append("never"))
    assert called == ["early", "late"]
