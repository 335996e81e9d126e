"""Tell transformers how to split a model over ranks, of which several use the same key-value head."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer


def distributed_config(size: int, shared: Iterable[str], num_kv_heads: int) -> Any:
    """The configuration of `from_pretrained` for `size` ranks; `shared` are rules of projections to shared heads."""
    kind = f"funitel_shared_{num_kv_heads}"
    plan = dict.fromkeys(shared, kind)
    if plan:
        ALL_PARALLEL_STYLES.register(kind, _shared_heads(num_kv_heads))
    return DistributedConfig(tp_size=size, tp_plan=plan or None)


def _shared_heads(num_heads: int) -> Any:
    """The style, as transformers calls it, of a projection to `num_heads` of which each rank uses one."""

    class SharedHeads(TensorParallelLayer):  # type: ignore[misc]
        def transform_output_post_forward(self, module: Any, output: torch.Tensor, mesh: Any) -> torch.Tensor:
            width = output.shape[-1] // num_heads
            head = mesh.get_local_rank() * num_heads // mesh.size()
            return output[..., head * width : (head + 1) * width]

    return SharedHeads()
