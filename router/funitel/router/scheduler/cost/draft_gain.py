"""Draft gain: whether drafts pay beside so many sequences, by the costs of a token and the share accepted. Pure.

A step with drafts gives more tokens and takes longer. Where a share t of a step's time grows with its tokens, and a
share a of drafts is accepted, drafts pay if a > t: one stream waits for the weights whatever it computes, a full batch
for arithmetic. The shard decides by the row; this decides for all, so that a full batch does without.
"""

MIN_SHARE = 0.25  # of a step's time that grows with tokens: below it, rows alone decide
LEARNING = 1 / 16  # of what is known, by each step with drafts
RETRY_STEPS = 128  # steps without drafts, after which they are tried again
TRIAL_STEPS = 16  # with drafts that are verified, before they may be given up again


class DraftGain:
    """Learns from results of steps, and says whether the next may have drafts."""

    def __init__(self) -> None:
        self.accepted = 1.0  # share of drafts, by a moving mean; all until some were verified
        self.drafts_per_row = 0.0  # in a step of decoding sequences, by a moving mean
        self._num_trials = 0  # steps with drafts since they were tried anew
        self._num_without = 0  # steps since they were given up

    def observe(self, num_rows: int, num_drafts: int, num_accepted: int) -> None:
        """Take a step of `num_rows` decoding sequences into account."""
        self.drafts_per_row += LEARNING * (num_drafts / max(1, num_rows) - self.drafts_per_row)
        if num_drafts:
            self._num_trials += 1
            self.accepted += LEARNING * (num_accepted / num_drafts - self.accepted)

    def pays(self, token_share: float) -> bool:
        """Whether the next step may have drafts, where `token_share` of its time grows with its tokens."""
        if self._num_trials < TRIAL_STEPS or token_share < MIN_SHARE or self.accepted >= token_share:
            self._num_without = 0
            return True
        self._num_without += 1
        if self._num_without > RETRY_STEPS:
            self._num_trials = self._num_without = 0
        return False
