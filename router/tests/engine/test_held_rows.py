"""Rows of an earlier router: their blocks are in use until each is claimed by its sequence, or dropped."""

from dataclasses import replace
from typing import Any

import pytest
from engines import request

from funitel.proto.takeover.state import HeldBatch, HeldRow
from funitel.router.core.beam_search import BeamParams
from funitel.router.core.request import Adapter, Sequence
from funitel.router.engine.held_rows import HeldRows, are_sound
from funitel.router.kv_cache.block_pool import BlockPool

ROW = HeldRow(7, "a/1", (3, 1), 6, 7)


def sequence(key: str = "a/1", prompt_len: int = 5, num_outputs: int = 2, **fields: Any) -> Sequence:
    return Sequence(99, replace(request(prompt_len), output_key=key, **fields), [0] * num_outputs)


@pytest.mark.parametrize(
    "rows",
    [
        (replace(ROW, blocks=(3, 7)),),
        (replace(ROW, blocks=(0, 3)),),
        (replace(ROW, blocks=(3, 3)),),
        (replace(ROW, num_computed=9, num_known=10),),
        (replace(ROW, num_computed=7),),
        (ROW, replace(ROW, output_key="b/1")),
    ],
    ids=["no such block", "block 0", "a block twice", "too few blocks", "nothing to compute", "an id twice"],
)
def test_rows_that_cannot_be_are_seen(rows: tuple[HeldRow, ...]) -> None:
    assert are_sound([HeldBatch(0, (ROW,))], 6, 4)
    assert not are_sound([HeldBatch(0, rows[:1]), HeldBatch(1, rows[1:])], 6, 4)


def test_a_row_is_claimed_once_by_the_sequence_with_its_tokens() -> None:
    pool = BlockPool(6, 4)
    held = HeldRows(pool, [ROW, replace(ROW, request_id=8, output_key="", blocks=(2,))])
    assert held.claim(sequence("b/1")) is None
    assert held.claim(sequence()) == ROW
    assert held.claim(sequence()) is None
    assert (pool.num_used, len(held)) == (3, 1)
    held.drop_all_but(())
    assert (pool.num_used, len(held)) == (2, 0)  # those of the claimed row are its sequence's


def test_a_row_with_an_adapter_is_claimed_by_a_sequence_that_gets_it() -> None:
    pool, asked = BlockPool(6, 4), sequence(adapter=Adapter("x", "/x", "x@1"))
    for adapter_id, is_loaded, is_claimed in (("x@1", True, True), ("x@1", False, False), ("x@2", True, False)):
        row = replace(ROW, adapter_id=adapter_id)
        held = HeldRows(pool, [row])
        found = held.claim(asked, lambda row, is_loaded=is_loaded: is_loaded)  # type: ignore[misc]
        assert found == (row if is_claimed else None)
        assert (pool.num_used, len(held)) == (2 if is_claimed else 0, 0)
        if is_claimed:
            pool.free(row.blocks)


@pytest.mark.parametrize(
    "asks",
    [
        sequence(num_outputs=1),
        sequence(adapter=Adapter("x", "/x", "x@1")),
        sequence(beams=BeamParams(width=2, num_returned=1, max_new_tokens=3, decode=str)),
    ],
    ids=["other tokens", "adapter", "beams"],
)
def test_a_row_that_does_not_suit_is_dropped(asks: Sequence) -> None:
    pool = BlockPool(6, 4)
    held = HeldRows(pool, [ROW])
    assert held.claim(asks) is None
    assert (pool.num_used, len(held)) == (0, 0)
