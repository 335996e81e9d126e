"""What must hold of a call before anything changes: its requests, its row updates, the blocks of every token."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from funitel.model_server.sequence.table import SequenceState
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import RowUpdate, SequenceStart


@dataclass(frozen=True, slots=True)
class StepBounds:
    """What steps stay within: blocks of the pool and of a row, tokens of a block and of the model's context."""

    num_blocks: int
    max_blocks: int
    block_size: int
    context: int


def check_supported(start: SequenceStart, vocab_size: int, *, takes_first_token: bool) -> None:
    """Raise InvalidRequest for what no step could give."""
    asked = {
        "adapter_id": start.adapter_id is not None,
        "first_token": start.sampling.first_token is not None and not takes_first_token,
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise InvalidRequest(f"{name} is not supported by this shard")
    first_token = start.sampling.first_token
    if first_token is not None and first_token >= vocab_size:
        raise InvalidRequest(f"first_token must be within 0..{vocab_size - 1}, given {first_token}")
    temperature = start.sampling.temperature
    if not 0.0 < temperature < math.inf:
        raise InvalidRequest(f"temperature must be > 0 and finite, given {temperature}", "temperature")
    unknown = [token_id for token_id, _ in start.sampling.logit_bias if token_id >= vocab_size]
    if unknown:
        raise InvalidRequest(f"logit_bias needs token ids within 0..{vocab_size - 1}, given {unknown[0]}", "logit_bias")
    if start.stopping.max_new_tokens <= len(start.output_ids):
        raise InvalidRequest(
            f"max_new_tokens must be > the {len(start.output_ids)} tokens already produced, "
            f"given {start.stopping.max_new_tokens}"
        )


def check_addresses(start: SequenceStart, bounds: StepBounds) -> None:
    """Blocks must lie in the pool, and slots, which TGI routers send too, must say the same as blocks."""
    num_blocks, size = bounds.num_blocks, bounds.block_size
    if any(block >= num_blocks for block in start.blocks):
        raise InvalidRequest(f"block {max(start.blocks)} is outside the pool of {num_blocks} blocks")
    if len(set(start.blocks)) < len(start.blocks):
        raise InvalidRequest(f"request {start.request_id} has a block twice")
    for position, slot in enumerate(start.slots):
        index, offset = divmod(position, size)
        if index >= len(start.blocks) or slot != start.blocks[index] * size + offset:
            raise InvalidRequest(f"slot {slot} of token {position} does not lie in its block")


def check_step(
    running: Sequence[SequenceState],
    new: Sequence[SequenceState],
    counts: Sequence[int],
    updates: Sequence[RowUpdate],
    bounds: StepBounds,
) -> None:
    """Every update has its row, every granted block lies in the pool, every token of the step in a block."""
    by_id = {row.request_id: row for row in running}
    if updates and len(by_id) < len(running):
        raise InvalidRequest("row updates need distinct request ids")
    granted: Counter[int] = Counter()
    for update in updates:
        if update.request_id not in by_id:
            raise InvalidRequest(f"row update for request {update.request_id}, which is not in the step")
        if any(block >= bounds.num_blocks for block in update.blocks):
            raise InvalidRequest(f"block {max(update.blocks)} is outside the pool of {bounds.num_blocks} blocks")
        granted[update.request_id] += len(update.blocks)
    _check_owners(new, updates, bounds.block_size)
    for row, count in zip([*running, *new], counts, strict=True):
        _check_blocks(row, count, granted[row.request_id], bounds)


def _check_blocks(row: SequenceState, count: int, num_granted: int, bounds: StepBounds) -> None:
    held = row.num_blocks + num_granted
    if held > bounds.max_blocks:
        raise InvalidRequest(f"request {row.request_id} has {held} blocks, at most {bounds.max_blocks} are allowed")
    num_tokens, context = row.num_cached + count, bounds.context
    if num_tokens > context:  # a table of learned positions has no more
        raise InvalidRequest(
            f"request {row.request_id} would have {num_tokens} tokens, the model's context is {context}"
        )
    needed = -(-num_tokens // bounds.block_size)
    if count and needed > held:
        raise InvalidRequest(f"request {row.request_id} needs {needed} blocks for this step, it has {held}")


def _check_owners(new: Sequence[SequenceState], updates: Sequence[RowUpdate], block_size: int) -> None:
    """Every block that a call grants to be written has one owner; those that are found computed may have several."""
    owners: dict[int, int] = {}
    granted = [(row.request_id, row.start.blocks[-(-row.start.cache_len // block_size) :]) for row in new]
    for request_id, blocks in (*granted, *((update.request_id, update.blocks) for update in updates)):
        for block in blocks:
            if owners.setdefault(block, request_id) != request_id:
                raise InvalidRequest(f"block {block} is granted to requests {owners[block]} and {request_id}")
