"""Responses kept in memory: what is given up when there is no more room."""

from typing import Any

import pytest

from funitel.router.api.responses.schema_request import InputText, MessageItem, TextConfig
from funitel.router.api.responses.schema_response import ModelResponse, OutputMessage, OutputText, ResponseReasoning
from funitel.router.api.responses.store import ResponseStore, StoredResponse


def stored(id: str, text: str = "", given: str = "", owner: bytes = b"", num_items: int = 1) -> StoredResponse:
    fields: dict[str, Any] = dict.fromkeys(
        (
            "instructions",
            "max_output_tokens",
            "max_tool_calls",
            "previous_response_id",
            "prompt_cache_key",
            "safety_identifier",
            "user",
        )
    )
    response = ModelResponse(
        id=id,
        created_at=1,
        metadata={},
        model="m",
        output=[OutputMessage(id=f"msg_{id}", content=[OutputText(text=text)])],
        parallel_tool_calls=True,
        reasoning=ResponseReasoning(effort=None, summary=None),
        store=True,
        temperature=1.0,
        text=TextConfig(),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        **fields,
    )
    content = [InputText(type="input_text", text=given)]
    items = [MessageItem(id=f"in_{id}{number or ''}", role="user", content=content) for number in range(num_items)]
    return StoredResponse.of(response, items, owner)


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(max_count=2, max_bytes=10**6)
    store.put(stored("a"))
    store.put(stored("b"))
    assert store.get("a") is not None
    store.put(stored("c"))
    assert [store.get(id) is not None for id in "abc"] == [True, False, True]
    assert len(store) == 2


def test_bytes_are_bounded() -> None:
    size = stored("a").num_bytes
    store = ResponseStore(max_count=100, max_bytes=3 * size)
    for id in "abcd":
        store.put(stored(id))
    assert len(store) == 3
    assert store.num_bytes == 3 * size
    store.put(stored("e", "x" * size))
    assert len(store) == 2
    assert store.num_bytes == 3 * size
    assert store.get("e") is not None
    store.put(stored("f", given="x" * 3 * size))  # larger than all the room
    assert len(store) == 2
    assert store.get("f") is None


def test_what_is_removed_makes_room() -> None:
    store = ResponseStore(max_count=10, max_bytes=10**6)
    store.put(stored("a"))
    assert store.remove("a")
    assert not store.remove("a")
    assert (len(store), store.num_bytes) == (0, 0)


def test_items_are_found_by_id() -> None:
    store = ResponseStore(max_count=10, max_bytes=10**6)
    store.put(stored("a", text="out", given="in"))
    store.put(stored("b"))
    found = [store.item("msg_a"), store.item("in_a")]
    assert [each.item.content[0].text for each in found if each and isinstance(each.item, MessageItem)] == ["out", "in"]
    assert store.item("msg_c") is None


@pytest.mark.parametrize("max_count", [0, 1])
def test_a_store_of_no_responses_keeps_none(max_count: int) -> None:
    store = ResponseStore(max_count=max_count, max_bytes=10**6)
    store.put(stored("a"))
    assert len(store) == max_count


@pytest.mark.parametrize("is_long", [False, True], ids=["by count", "by bytes"])
def test_no_owner_evicts_what_another_has_stored_while_it_holds_more(is_long: bool) -> None:
    text = "x" * 1000 * is_long
    store = ResponseStore(max_count=10**6 if is_long else 10, max_bytes=20_000 if is_long else 10**6)
    for number in range(3):
        store.put(stored(f"b{number}", text, owner=b"b"))
    for number in range(500):
        store.put(stored(f"a{number}", text, owner=b"a"))
    assert all(store.get(f"b{number}", b"b") for number in range(3))
    assert store.get("a499", b"a") is not None
    assert store.get("a0", b"a") is None
    for number in range(3, 500):
        store.put(stored(f"b{number}", text, owner=b"b"))
    of_a = sum(store.get(f"a{number}", b"a") is not None for number in range(500))
    assert abs(of_a - (len(store) - of_a)) <= 1, "each has a half"


def test_an_item_that_several_responses_have_goes_with_the_last_of_them() -> None:
    store = ResponseStore(max_count=10, max_bytes=10**6)
    first = stored("a", text="out", given="in")
    store.put(first)
    store.put(StoredResponse.of(stored("b").response, first.conversation))
    store.remove("a")
    assert store.item("in_a") is not None
    store.remove("b")
    assert store.item("in_a") is None
    assert store.item("msg_b") is None


def test_the_look_up_of_an_item_scans_nothing() -> None:
    """It scanned all that a key has stored, and a body has room for 40,000 references."""
    store = ResponseStore(max_count=10, max_bytes=10**8)
    store.put(stored("a", num_items=1000))
    scanned: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("input_items", "output_items"):
            patch.setattr(StoredResponse, name, property(lambda self: scanned.append("it") or ()))
        assert all(store.item(f"in_a{number}") for number in range(1, 1000))
    assert not scanned
