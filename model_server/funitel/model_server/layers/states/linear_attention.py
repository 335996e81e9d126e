"""Recurrences of linear attention over tokens of one sequence in chunks, or over one token of each of several.

A head's state is a matrix S [key_dim, value_dim]. With a log decay g, a token makes it exp(g) * S + k v^T, or by the
delta rule exp(g) * S + b * k (v - exp(g) * S^T k)^T, and reads q^T S. Heads lie as [groups, heads of a group]: queries
and keys are those of a group. Everything is float32. Source: Gated DeltaNet, arXiv 2412.06464; Mamba 2, 2405.21060.
"""

import torch

CHUNK = 64  # tokens that are computed with matrix products; within a chunk the work grows with the square


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What tokens read, [num_tokens, groups, heads, value_dim], and the state behind them.

    Args:
        q: [num_tokens, groups, key_dim], as are `k`.
        k: keys.
        v: [num_tokens, groups, heads, value_dim].
        log_decay: [num_tokens, groups, heads], <= 0.
        state: [groups, heads, key_dim, value_dim].
    """
    results = []
    for chunk in _chunks(q, k, v, log_decay):
        scores = chunk.scores() * chunk.pair_decays
        results.append(scores @ chunk.v + chunk.q_decayed @ state)
        state = chunk.behind(state, chunk.v)
    return _by_token(results), state


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
    for chunk, rates in zip(_chunks(q, k, v, log_decay), torch.split(beta, CHUNK), strict=True):
        rate = rates.permute(1, 2, 0)[..., None]  # [groups, heads, num_tokens, 1]
        # A token's correction depends on those before it in the chunk: (1 + L) u = rate * (v - what the state gives).
        system = rate * (chunk.k @ chunk.k.transpose(-1, -2)).tril(-1) * chunk.pair_decays
        given = (chunk.k * chunk.decays) @ state
        corrections = torch.linalg.solve_triangular(system, rate * (chunk.v - given), upper=False, unitriangular=True)
        scores = chunk.scores() * chunk.pair_decays
        results.append(scores @ corrections + chunk.q_decayed @ state)
        state = chunk.behind(state, corrections)
    return _by_token(results), state


def attend_once(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend` for one token of each of several sequences; the first dimension is that of the sequences."""
    state = torch.addcmul(state * log_decay.exp()[..., None, None], k[:, :, None, :, None], v[..., None, :])
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
    state = state * log_decay.exp()[..., None, None]
    correction = beta[..., None] * (v - _read(k, state))
    state = torch.addcmul(state, k[:, :, None, :, None], correction[..., None, :])
    return _read(q, state), state


def _read(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """x^T S: [rows, groups, key_dim] of [rows, groups, heads, key_dim, value_dim]."""
    return (x[:, :, None, None, :] @ state)[..., 0, :]


class _Chunk:
    """Some tokens: queries and keys [groups, 1, num_tokens, key_dim], values [groups, heads, num_tokens, value_dim]."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor) -> None:
        self.q, self.k = (x.transpose(0, 1)[:, None] for x in (q, k))
        self.v = v.permute(1, 2, 0, 3)
        # Sums of strong decays are large and what counts are small differences between them.
        summed = log_decay.permute(1, 2, 0).double().cumsum(dim=-1)  # [groups, heads, num_tokens]
        later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        differences = summed[..., :, None] - summed[..., None, :]
        # [..., token, token before it or itself]
        self.pair_decays = differences.float().masked_fill(later, -torch.inf).exp()
        self.decays = summed.float().exp()[..., None]  # since the beginning of the chunk
        self.left = (summed[..., -1:] - summed).float().exp()[..., None]  # until its end
        self.total = summed[..., -1].float().exp()[..., None, None]

    @property
    def q_decayed(self) -> torch.Tensor:
        """Queries that read the state before the chunk."""
        return self.q * self.decays

    def scores(self) -> torch.Tensor:
        return self.q @ self.k.transpose(-1, -2)

    def behind(self, state: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The state behind the chunk, with what its tokens write."""
        return state * self.total + (self.k * self.left).transpose(-1, -2) @ values


def _chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor) -> list[_Chunk]:
    parts = (torch.split(x, CHUNK) for x in (q, k, v, log_decay))
    return [_Chunk(*part) for part in zip(*parts, strict=True)]


def _by_token(results: list[torch.Tensor]) -> torch.Tensor:
    """[groups, heads, num_tokens, value_dim] of each chunk -> [num_tokens, groups, heads, value_dim]."""
    return torch.cat(results, dim=2).permute(2, 0, 1, 3)
