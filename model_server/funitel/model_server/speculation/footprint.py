"""Memory of a drafter's step, where what it needs of the target's hidden states is known before it computes."""

import torch

from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.speculation.speculator import MAX_STEP_DRAFTS

_HIDDEN_STATES = 14  # that a layer has at once at most: what enters, embeddings, both fused, residuals and norms
_COPIES = 3  # of heads and units: before and behind rotation or activation, and what products read


def hidden_bytes(spec: ModelSpec, num_layers: int, num_tokens: int) -> int:
    """Bytes of the outputs of `num_layers` layers of the target, which are kept until the drafter has seen them."""
    return num_tokens * num_layers * spec.hidden_size * torch.float32.itemsize


def head_step_bytes(
    target: ModelSpec, layer: ModelSpec | None, parallel: TensorParallel, dtype: torch.dtype, num_tokens: int
) -> int:
    """Bytes that heads behind a target take to see `num_tokens` tokens, or to make the drafts of a step.

    Left out is what depends on contexts. `layer` is the spec of their layer; None where they have none.
    """
    logits = 2 * MAX_STEP_DRAFTS * target.vocab_size * torch.float32.itemsize
    spec = layer or target
    width = _HIDDEN_STATES * spec.hidden_size
    if layer is not None:
        heads = HeadSplit.of(layer.num_heads, layer.num_kv_heads, parallel.size, parallel.rank)
        width += _COPIES * (heads.num_heads + 2 * heads.num_kv_heads) * layer.head_dim
        units = layer.intermediate_size
        if layer.experts is not None:
            experts = layer.experts
            units = max(units, experts.num_chosen * experts.intermediate_size + experts.shared_size)
            width += experts.num_chosen * layer.hidden_size
        start, end = parallel.split(units)
        width += _COPIES * 2 * (end - start)  # gates and units
    return num_tokens * width * dtype.itemsize + logits
