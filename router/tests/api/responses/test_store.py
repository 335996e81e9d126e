"""Responses kept in memory: what is given up when there is no more room."""

from typing import Any

import pytest

from funitel.router.api.responses.schema_request import InputText, MessageItem, TextConfig
from funitel.router.api.responses.schema_response import ModelResponse, OutputMessage, OutputText, ResponseReasoning
from funitel.router.api.responses.store import ResponseStore, StoredResponse


def stored(id: str, text: str = "", given: str = "") -> StoredResponse:
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
    item = MessageItem(id=f"in_{id}", role="user", content=[InputText(type="input_text", text=given)])
    return StoredResponse.of(response, [item])


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
    assert [item.text for item in found if isinstance(item, MessageItem)] == ["out", "in"]
    assert store.item("msg_c") is None


@pytest.mark.parametrize("max_count", [0, 1])
def test_a_store_of_no_responses_keeps_none(max_count: int) -> None:
    store = ResponseStore(max_count=max_count, max_bytes=10**6)
    store.put(stored("a"))
    assert len(store) == max_count
