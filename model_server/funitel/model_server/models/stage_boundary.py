"""What goes from a pipeline stage to the next: hidden states, and embeddings of layers that are still to come."""

from dataclasses import dataclass

import torch

from funitel.model_server.device.stages import StageLink
from funitel.model_server.spec.model_spec import ModelSpec

Passed = tuple[torch.Tensor, torch.Tensor | None]
"""Hidden states that enter a layer, and embeddings [num_tokens, layers, size] from that one on, if the model has some.

Hidden states are [num_tokens, hidden_size], of several streams [num_tokens, num_streams, hidden_size].
"""


@dataclass(frozen=True, slots=True)
class StageBoundary:
    """Where a torch decoder begins or ends within a model, in tensors of its precision and device."""

    link: StageLink
    dtype: torch.dtype
    device: torch.device

    def take_over(self, spec: ModelSpec, num_tokens: int) -> Passed:
        """What the stage before has passed on. Raises: see `StageLink.receive`."""
        num_streams = 1 if spec.altup is None else spec.altup.num_streams
        size = 0 if spec.layer_embeddings is None else spec.layer_embeddings.size
        num_further = spec.num_layers - spec.held_layers.start
        widths = [num_streams * spec.hidden_size, num_further * size]
        passed = torch.empty(num_tokens, sum(widths), dtype=self.dtype, device=self.device)
        self.link.receive(passed)
        x, further = torch.split(passed, widths, dim=1)
        x = x.contiguous() if spec.altup is None else x.reshape(num_tokens, num_streams, -1)
        return x, further.reshape(num_tokens, num_further, size) if size else None

    def pass_on(self, x: torch.Tensor, further: torch.Tensor | None) -> None:
        """Give them to the next stage, of which `further` are the embeddings. Raises: see `StageLink.send`."""
        parts = [x.flatten(1), *([] if further is None else [further.flatten(1)])]
        self.link.send((torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]).to(self.dtype))
