"""Rows that an earlier router has left on the shards of one replica, until the requests come that they belong to.

Their blocks are in use meanwhile. Event loop only.
"""

from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Seq

from funitel.proto.takeover.state import HeldBatch, HeldRow
from funitel.router.core.request import Sequence
from funitel.router.kv_cache.block_pool import BlockPool


def are_sound(batches: Iterable[HeldBatch], num_blocks: int, block_size: int) -> bool:
    """Whether rows can be those of a pool of so many blocks: each id once, and a place for each computed token."""
    rows = [row for batch in batches for row in batch.rows]
    if len({row.request_id for row in rows}) < len(rows):
        return False
    return all(_is_sound(row, num_blocks, block_size) for row in rows)


def _is_sound(row: HeldRow, num_blocks: int, block_size: int) -> bool:
    are_blocks = len(set(row.blocks)) == len(row.blocks) and all(0 < block <= num_blocks for block in row.blocks)
    return are_blocks and row.num_computed < row.num_known and row.num_computed <= len(row.blocks) * block_size


def may_go_on(sequence: Sequence) -> bool:
    """Whether a row may be that of a sequence: not where it has more than blocks, which another router cannot know."""
    request = sequence.request
    return request.beams is None and not request.media


class HeldRows:
    """The rows of one replica, by the output keys of their sequences."""

    def __init__(self, blocks: BlockPool, rows: Seq[HeldRow] = ()) -> None:
        """Hold the blocks of rows, in a pool of which nothing is in use."""
        blocks.hold([row.blocks for row in rows])
        self._blocks = blocks
        # Nothing asks for those without a key.
        self._rows = {row.output_key or f" {row.request_id}": row for row in rows}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keys(self) -> list[str]:
        """Output keys of the rows that no request has claimed."""
        return list(self._rows)

    def claim(self, sequence: Sequence, may_run: Callable[[HeldRow], bool] = lambda row: True) -> HeldRow | None:
        """Take the row of a sequence out, with its blocks.

        One that has other tokens or another adapter, or that may not run, is dropped, and None returned.
        """
        key, adapter = sequence.request.output_key, sequence.request.adapter
        row = self._rows.get(key)
        if row is None:
            return None
        is_alike = row.num_known == sequence.num_known and row.adapter_id == (adapter.id if adapter else None)
        if may_go_on(sequence) and is_alike and not row.state_slot and may_run(row):
            return self._rows.pop(key)
        self.drop(key)
        return None

    def drop(self, key: str) -> None:
        """Forget the row of a key, if there is one; its blocks are free, before any step is planned."""
        row = self._rows.pop(key, None)
        if row is not None:
            self._blocks.free(row.blocks)

    def drop_all_but(self, keep: Container[str]) -> None:
        """Forget the rows of all keys but `keep`."""
        for key in [key for key in self._rows if key not in keep]:
            self.drop(key)
