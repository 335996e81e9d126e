"""The sequence table: the state of each running sequence on a shard, one row each.

A batch is a list of rows: concatenating is list addition, filtering is selection.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from funitel.model_server.sampling.grammar import GrammarState
from funitel.model_server.sampling.sampler import SamplingState
from funitel.model_server.sequence.detokenizer import Detokenizer, StopMatcher
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import FinishReason, SequenceStart


@dataclass(slots=True)
class SequenceState:
    """One sequence. `tokens` are prompt and completion; KV is computed for the first `num_cached` of them.

    Where an encoder reads the prompt, that is the first `source_len` tokens, and the decoder begins behind them.
    """

    index: int  # place in the table
    start: SequenceStart
    tokens: list[int]
    prompt_len: int  # the tokens that the completion comes behind
    num_cached: int
    sampling: SamplingState
    detokenizer: Detokenizer
    stops: StopMatcher
    wants_prompt_logprobs: bool = False
    num_blocks: int = 0
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[float] = field(default_factory=list)
    grammar: GrammarState | None = None  # on the rank that samples
    source_len: int = 0
    is_over: bool = False  # it takes part in no further step
    has_left: bool = False  # its batch has ended
    num_placeholders: int = 0  # tokens that a device has sampled, or will have, and the host does not know yet
    counts_place: int | None = None  # where the device counts its tokens, see `gpu_sampling/plan`

    @property
    def request_id(self) -> int:
        """Id the router knows the sequence by."""
        return self.start.request_id

    def take(self, token_id: int) -> None:
        """Append the next completion token."""
        self.tokens.append(token_id)
        self.sampling.push(token_id)

    def next_tokens(self, count: int) -> list[int]:
        """The next `count` tokens to compute; the last may be a placeholder for one that only the device knows."""
        tokens = self.tokens[self.num_cached : self.num_cached + count]
        if len(tokens) < count:
            tokens.append(-1 - self.index)  # see `ForwardBatch.build`
        return tokens

    @property
    def num_pending(self) -> int:
        """Known tokens without KV yet: one for a decoding row, none for a finished one.

        More in a prompt, and after tokens that were forced.
        """
        return 0 if self.is_over else len(self.tokens) + self.num_placeholders - self.num_cached

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt were asked for and its first token is still to come."""
        return self.wants_prompt_logprobs and self.num_generated + self.num_placeholders == 0

    @property
    def num_generated(self) -> int:
        """Completion tokens so far."""
        return len(self.tokens) - self.prompt_len


class SequenceTable:
    """Preallocated block tables [capacity, max_blocks] and the rows that use them; grows by doubling."""

    def __init__(self, max_blocks: int, capacity: int = 64) -> None:
        self.reset(max_blocks, capacity)

    def reset(self, max_blocks: int, capacity: int = 64) -> None:
        """Forget all rows."""
        self.max_blocks = max_blocks
        self._blocks = np.zeros((capacity, max_blocks), dtype=np.int32)
        self._free = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._blocks) - len(self._free)

    def take(self) -> int:
        """A free place."""
        if not self._free:
            capacity = len(self._blocks)
            self._blocks = np.concatenate([self._blocks, np.zeros_like(self._blocks)])
            self._free = list(range(2 * capacity - 1, capacity - 1, -1))
        return self._free.pop()

    def release(self, rows: Iterable[SequenceState]) -> None:
        """Give the places of `rows` back."""
        self._free.extend(row.index for row in rows)

    def grant(self, row: SequenceState, blocks: Sequence[int]) -> None:
        """Append blocks to a row's block table.

        Raises:
            InvalidRequest: more blocks than the longest sequence needs.
        """
        end = row.num_blocks + len(blocks)
        if end > self.max_blocks:
            raise InvalidRequest(f"request {row.request_id} has {end} blocks, at most {self.max_blocks} are allowed")
        self._blocks[row.index, row.num_blocks : end] = blocks
        row.num_blocks = end

    def block_table(self, row: SequenceState) -> np.ndarray:
        """Blocks of a row, in order: [num_blocks] int32."""
        table: np.ndarray = self._blocks[row.index, : row.num_blocks]
        return table
