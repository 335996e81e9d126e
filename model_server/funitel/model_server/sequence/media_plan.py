"""What a row needs of the media items of its prompt: their features by place, and the positions that they set."""

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(slots=True, eq=False)
class PlannedMedia:
    """An item: `places` are the positions in the prompt of the tokens that take its features, in order.

    `features` are None once all of these tokens are computed.
    """

    places: np.ndarray  # [num_features] int64, ascending
    features: torch.Tensor | None  # [num_features, hidden_size]
    deep: tuple[torch.Tensor, ...] = ()  # each [num_features, hidden_size]

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return int(self.places[-1]) + 1


@dataclass(slots=True, eq=False)
class MediaPlan:
    """The items of a prompt, and what they mean for the positions of a sequence.

    `rotary` are the rotary positions of the prompt's tokens where the model has three axes; behind the prompt all of
    them are the position in the sequence plus `rotary_delta`. `whole_spans` are [begin, end) of tokens that see each
    other.
    """

    items: list[PlannedMedia] = field(default_factory=list)
    rotary: np.ndarray | None = None  # [3, prompt_len] int64
    rotary_delta: int = 0
    whole_spans: tuple[tuple[int, int], ...] = ()

    def rotary_between(self, begin: int, end: int) -> np.ndarray | None:
        """Rotary positions [3, end - begin] of some tokens of the sequence; None where there are no axes."""
        if self.rotary is None:
            return None
        length = self.rotary.shape[1]
        own = self.rotary[:, begin : min(end, length)]
        behind = np.arange(max(begin, length), end) + self.rotary_delta
        return np.concatenate([own, np.broadcast_to(behind, (3, len(behind)))], axis=1) if len(behind) else own
