"""Frames of keys: what is done to keys before they become codes of 4 bits, from what a model computes for a short text.

Scores are products of queries and keys, so a map of keys and the inverse transpose of it for queries leave them what
they are, and what is taken away from all keys of a head changes all scores of a query alike. Keys lose what they have
in common, and are mapped such that an error counts for the same in every direction.
"""

import torch

_SHRINKAGE = 0.01  # of the mean variance, added to every direction: some have none on a short text

Frames = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Shifts [layers, heads, dim], maps of keys and maps of queries [layers, heads, dim, dim], float32."""


def frames_of(sums: torch.Tensor, num_tokens: int, dim: int) -> Frames:
    """The frames for sums of queries and keys over so many tokens.

    Args:
        sums: [layers, heads, dim + 2 * dim * dim]: of keys, of their products and of products of queries.

    The map is the square root of the geometric mean of the inverse covariance of keys and the second moment of queries:
    of all maps it makes the error of scores least, where errors are alike in all directions and grow with the size of
    keys.
    """
    shape = *sums.shape[:2], dim, dim
    total, keys, queries = torch.split(sums, [dim, dim * dim, dim * dim], dim=-1)
    mean = total / num_tokens
    of_keys = _widened(keys.view(shape) / num_tokens - mean.unsqueeze(-1) * mean.unsqueeze(-2))
    of_queries = _widened(queries.view(shape) / num_tokens)
    root, inverse = _power(of_keys, 0.5), _power(of_keys, -0.5)
    middle = inverse @ _power(root @ of_queries @ root, 0.5) @ inverse
    sizes, directions = torch.linalg.eigh(middle)
    directions, sizes = directions.transpose(-1, -2), sizes.clamp_min(1e-12).sqrt().unsqueeze(-1)
    frames = mean, directions * sizes, directions / sizes
    shifts, key_maps, query_maps = (each.float().contiguous() for each in frames)
    return shifts, key_maps, query_maps


def _widened(moments: torch.Tensor) -> torch.Tensor:
    mean = moments.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-12)
    return moments + _SHRINKAGE * mean[..., None, None] * torch.eye(moments.shape[-1], dtype=moments.dtype)


def _power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    sizes, directions = torch.linalg.eigh(matrix)
    scaled = directions * sizes.clamp_min(1e-12).pow(exponent).unsqueeze(-2)
    return torch.matmul(scaled, directions.transpose(-1, -2))
