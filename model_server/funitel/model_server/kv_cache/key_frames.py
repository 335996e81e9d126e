"""Frames of keys: what is done to keys before they become codes of 4 bits, from what a model computes for a short text.

Scores are products of queries and keys, so a map of keys and the inverse transpose of it for queries leave them what
they are, and what is taken away from keys changes the scores of a query by an amount that is known. Keys lose what they
have in common, and are mapped such that an error counts for the same in every direction. The key of a sequence's first
token loses what first keys have in common: it is large, much the same for all texts, and takes most of the attention.
"""

from typing import NamedTuple

import torch

_SHRINKAGE = 0.01  # of the mean variance, added to every direction: some have none on a short text


class Frames(NamedTuple):
    """Frames of the keys of some layers, float32."""

    shifts: torch.Tensor  # [layers, heads, dim], what is taken away from keys
    first_shifts: torch.Tensor  # [layers, heads, dim], the same of the first tokens of sequences
    key_maps: torch.Tensor  # [layers, heads, dim, dim]
    query_maps: torch.Tensor  # [layers, heads, dim, dim]


def num_sums(dim: int) -> int:
    """Numbers that are added up for a head of this size, see `frames_of`."""
    return 2 * (dim + dim * dim)


def frames_of(sums: torch.Tensor, num_tokens: int, num_first: int, dim: int) -> Frames:
    """The frames for sums over the keys of first tokens, and over the queries and keys of the tokens that follow.

    Args:
        sums: [layers, heads, num_sums(dim)]: of keys of first tokens; of the others, of keys, of their products and of
            products of queries.
        num_tokens: tokens that follow the first ones.
        num_first: tokens that are the first of a sequence.

    The map is the square root of the geometric mean of the inverse covariance of keys and the second moment of queries:
    of all maps it makes the error of scores least, where errors are alike in all directions and grow with the size of
    keys.
    """
    shape = *sums.shape[:2], dim, dim
    first, total, keys, queries = torch.split(sums, [dim, dim, dim * dim, dim * dim], dim=-1)
    mean = total / num_tokens
    of_keys = _widened(keys.view(shape) / num_tokens - mean.unsqueeze(-1) * mean.unsqueeze(-2))
    of_queries = _widened(queries.view(shape) / num_tokens)
    root, inverse = _power(of_keys, 0.5), _power(of_keys, -0.5)
    middle = inverse @ _power(root @ of_queries @ root, 0.5) @ inverse
    sizes, directions = torch.linalg.eigh(middle)
    directions, sizes = directions.transpose(-1, -2), sizes.clamp_min(1e-12).sqrt().unsqueeze(-1)
    frames = mean, first / num_first, directions * sizes, directions / sizes
    return Frames(*(each.float().contiguous() for each in frames))


def _widened(moments: torch.Tensor) -> torch.Tensor:
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-12)
    return moments + _SHRINKAGE * mean[..., None, None] * torch.eye(moments.shape[-1], dtype=moments.dtype)


def _power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    sizes, directions = torch.linalg.eigh(matrix)
    scaled = directions * sizes.clamp_min(1e-12).pow(exponent).unsqueeze(-2)
    return torch.matmul(scaled, directions.transpose(-1, -2))
