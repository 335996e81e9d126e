"""Recurrences of linear attention over tokens of one sequence in chunks, or over one token of each of several.

A head's state is a matrix S [key_dim, value_dim]. With a log decay g, a token makes it exp(g) * S + k v^T, or by the
delta rule exp(g) * S + b * k (v - exp(g) * S^T k)^T, and reads q^T S. A decay is one number for the matrix, or one for
each of its rows. Heads lie as [groups, heads of a group]: queries and keys are those of a group. Everything is float32.

What no state enters is computed for several chunks at once; from chunk to chunk goes the state alone. Source: Gated
DeltaNet, arXiv 2412.06464; Mamba 2, 2405.21060; with a decay for each row Kimi Linear, 2510.26692.
"""

from collections.abc import Iterator

import torch

CHUNK = 64  # tokens that are computed with matrix products; within a chunk the work grows with the square
SPAN = 8 * CHUNK  # tokens of which the chunks are computed at once; the memory in between grows with it
_BLOCK = 16  # tokens of which the decays of each row are multiplied pair by pair


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What tokens read, [num_tokens, groups, heads, value_dim], and the state behind them.

    Args:
        q: [num_tokens, groups, key_dim], as are `k`.
        k: keys.
        v: [num_tokens, groups, heads, value_dim].
        log_decay: [num_tokens, groups, heads] or [num_tokens, groups, heads, key_dim], <= 0.
        state: [groups, heads, key_dim, value_dim].
    """
    results = []
    for chunks in _spans(q, k, v, log_decay):
        before, state = chunks.pass_on(state, chunks.written(chunks.v))
        results.append(chunks.by_token(chunks.scores(chunks.q) @ chunks.v + chunks.q * chunks.decays @ before))
    return torch.cat(results), state


def attend_by_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend`, by the delta rule; `beta` [num_tokens, groups, heads] is how much of what is read is replaced."""
    results = []
    for chunks, rates in zip(_spans(q, k, v, log_decay), torch.split(beta, SPAN), strict=True):
        rate = chunks.cut(rates).permute(0, 2, 3, 1)[..., None]  # [num_chunks, groups, heads, size, 1]
        # A token's correction depends on those before it in the chunk: (1 + L) u = rate * (v - what the state gives).
        # Both parts of the right side are solved for before the state is known.
        system = rate * chunks.scores(chunks.k).tril(-1)
        sides = torch.cat((rate * chunks.v, rate * chunks.k * chunks.decays), dim=-1)
        solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
        values, keys = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
        before, corrections = [], []
        left = chunks.keys_left
        for value, key, total, ending in zip(values, keys, chunks.total, left, strict=True):
            before.append(state)
            corrections.append(value - key @ state)
            state = state * total + ending @ corrections[-1]
        read = chunks.scores(chunks.q) @ torch.stack(corrections) + chunks.q * chunks.decays @ torch.stack(before)
        results.append(chunks.by_token(read))
    return torch.cat(results), state


def attend_once(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend` for one token of each of several sequences; the first dimension is that of the sequences."""
    state = torch.addcmul(_decayed(state, log_decay), k[:, :, None, :, None], v[..., None, :])
    return _read(q, state), state


def attend_once_by_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend_by_delta` for one token of each of several sequences."""
    state = _decayed(state, log_decay)
    correction = beta[..., None] * (v - _read(k, state))
    state = torch.addcmul(state, k[:, :, None, :, None], correction[..., None, :])
    return _read(q, state), state


def _decayed(state: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """States [num_rows, groups, heads, key_dim, value_dim] by decays of a whole matrix or of each row."""
    decay = log_decay.exp()[..., None]
    return state * (decay if decay.dim() == state.dim() else decay[..., None])


def _read(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """x^T S: [rows, groups, key_dim] of [rows, groups, heads, key_dim, value_dim]."""
    return (x[:, :, None, None, :] @ state)[..., 0, :]


class _Chunks:
    """Some tokens, in chunks of equal size; the last is filled up with tokens that change nothing.

    Queries and keys are [num_chunks, groups, 1, size, key_dim], values [num_chunks, groups, heads, size, value_dim].
    Decays have a last dimension of 1 or of key_dim.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor) -> None:
        self.num_tokens = len(q)
        self.num_chunks = -(-len(q) // CHUNK)
        self.size = -(-len(q) // self.num_chunks)
        self.q, self.k = (self.cut(x).transpose(1, 2)[:, :, None] for x in (q, k))
        self.v = self.cut(v).permute(0, 2, 3, 1, 4)
        self.is_by_row = log_decay.dim() == v.dim()
        each = log_decay if self.is_by_row else log_decay[..., None]
        # Sums of strong decays are large and what counts are small differences between them.
        self.summed = self.cut(each).permute(0, 2, 3, 1, 4).double().cumsum(dim=-2)
        self.decays = self.summed.float().exp()  # since the beginning of the chunk
        self.total = self.summed[..., -1, :, None].float().exp()

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, ...] -> [num_chunks, size, ...]."""
        missing = self.num_chunks * self.size - len(x)
        if missing:
            x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
        return x.reshape(self.num_chunks, self.size, *x.shape[1:])

    def by_token(self, results: torch.Tensor) -> torch.Tensor:
        """[num_chunks, groups, heads, size, value_dim] -> [num_tokens, groups, heads, value_dim]."""
        return results.permute(0, 3, 1, 2, 4).flatten(0, 1)[: self.num_tokens]

    @property
    def keys_left(self) -> torch.Tensor:
        """Keys, as they have decayed at the end of the chunk: [num_chunks, groups, heads, key_dim, size]."""
        left = (self.summed[..., -1:, :] - self.summed).float().exp()
        return (self.k * left).transpose(-1, -2)

    def written(self, values: torch.Tensor) -> torch.Tensor:
        """What tokens that write these values leave at the end of their chunk."""
        return self.keys_left @ values

    def pass_on(self, state: torch.Tensor, written: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The states before each chunk, and the one behind the last."""
        before = []
        for total, added in zip(self.total, written, strict=True):
            before.append(state)
            state = torch.addcmul(added, state, total)
        return torch.stack(before), state

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Products of x and the keys up to each token, with the decay in between; 0 for later keys.

        [num_chunks, groups, heads, size, size]
        """
        if self.is_by_row:
            blocks = [self._block(x, first) for first in range(0, self.size, _BLOCK)]
            return torch.cat(blocks, dim=-2)
        summed = self.summed[..., 0]
        decays = _pair_decays(summed[..., :, None] - summed[..., None, :], 0)
        return (x @ self.k.transpose(-1, -2)) * decays

    def _block(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Rows of `scores` from `first` on, where each row of a matrix has its decay.

        Behind the tokens of the block, a product of decays is one until its beginning and one from there on.
        """
        last = min(first + _BLOCK, self.size)
        x, keys, mine = x[..., first:last, :], self.k[..., first:last, :], self.summed[..., first:last, :]
        decays = _pair_decays(mine[..., :, None, :] - mine[..., None, :, :], 1)
        scores = (x[..., :, None, :] * keys[..., None, :, :] * decays).sum(dim=-1)
        later = scores.new_zeros(*scores.shape[:-1], self.size - last)
        if not first:
            return torch.cat((scores, later), dim=-1)
        border = self.summed[..., first - 1 : first, :]
        earlier = self.k[..., :first, :] * (border - self.summed[..., :first, :]).float().exp()
        before = (x * (mine - border).float().exp()) @ earlier.transpose(-1, -2)
        return torch.cat((before, scores, later), dim=-1)


def _pair_decays(differences: torch.Tensor, trailing: int) -> torch.Tensor:
    """Decays between tokens and those before them, 0 for later ones; of [..., token, other], with more dimensions."""
    size = differences.shape[-1 - trailing]
    later = torch.ones(size, size, dtype=torch.bool, device=differences.device).triu(1)
    return differences.float().masked_fill(later[(...,) + (None,) * trailing], -torch.inf).exp()


def _spans(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor) -> Iterator[_Chunks]:
    parts = (torch.split(x, SPAN) for x in (q, k, v, log_decay))
    return (_Chunks(*part) for part in zip(*parts, strict=True))
