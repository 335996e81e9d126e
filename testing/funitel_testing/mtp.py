"""Tiny checkpoints with a layer for multi-token prediction, and what that layer drafts by transformers' modules."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

_AROUND = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


class MtpOracle:
    """A model of transformers with a random layer behind its last, whose tensors are added to its checkpoint.

    Args:
        folder: of the checkpoint, which has one file.
        seed: of the layer's values.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        how: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
        config = copy.deepcopy(self.model.config)
        self._num_layers = config.num_hidden_layers
        config.num_hidden_layers = 1
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
        for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
            if getattr(config, name, None) is not None:
                setattr(config, name, [kind])
        if getattr(config, "mlp_only_layers", None):
            config.mlp_only_layers = []
        body = self.model.model
        torch.manual_seed(seed)
        self.layer = MtpLayer(config, type(body.layers[-1]), type(body.norm), 0).float().eval()
        for name, values in self.layer.state_dict().items():
            values.copy_(torch.randn_like(values) * (0.1 if "norm" in name else 0.3))
        self._save(folder)

    def _save(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        is_qwen = "qwen" in self.model.config.model_type
        for name, values in self.layer.state_dict().items():
            stem, _, rest = name.partition(".")
            if is_qwen:
                own = f"mtp.layers.0.{rest}" if stem == "mtp_block" else f"mtp.{_AROUND[stem]}.{rest}"
            else:
                layer = f"model.layers.{self._num_layers}"
                own = f"{layer}.{rest}" if stem == "mtp_block" else f"{layer}.{stem.replace('post', 'shared_head.')}"
                own = own.replace("shared_head._norm", "shared_head.norm")
                own = own if stem == "mtp_block" else f"{own}.{rest}"
            tensors[own] = values.clone()
        save_file(tensors, path, metadata={"format": "pt"})

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The greedy drafts behind `tokens`, everything computed anew for each of them."""
        body = self.model.model
        hidden = body(torch.tensor([tokens[:-1]])).last_hidden_state
        ids, found = list(tokens[1:]), []
        for _ in range(count):
            length = len(ids)
            embedded = body.embed_tokens(torch.tensor([ids]))
            positions = torch.arange(length)[None]
            mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
            rotation = body.rotary_emb(embedded, position_ids=positions)
            states = self.layer(embedded, hidden, rotation, mask, positions, None)
            found.append(int(self.model.lm_head(states[:, -1]).argmax()))
            ids.append(found[-1])
            hidden = torch.cat((hidden, states[:, -1:]), dim=1)
        return found
