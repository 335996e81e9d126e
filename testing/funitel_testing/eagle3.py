"""A random EAGLE-3 head for a tiny Llama as its checkpoints are, and what it drafts: the layer written out in torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

HEADS, KV_HEADS, DIM = 4, 2, 8


class Eagle3Oracle:
    """The head of a folder, which it writes, for the target of another.

    Args:
        folder: to write.
        target: of a Llama with the same hidden size.
        draft_vocab_size: tokens that it can propose, every second and third of the target's.
        layer: what its tensors are called.
        config: what its `config.json` says besides.
    """

    def __init__(
        self, folder: Path, target: Path, draft_vocab_size: int = 100, layer: str = "midlayer", **config: Any
    ) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._config = config
        told = self.model.config
        size, inner, vocab = told.hidden_size, 56, told.vocab_size
        shapes = {
            "fc": (size, 3 * size),
            f"{layer}.self_attn.q_proj": (HEADS * DIM, 2 * size),
            f"{layer}.self_attn.k_proj": (KV_HEADS * DIM, 2 * size),
            f"{layer}.self_attn.v_proj": (KV_HEADS * DIM, 2 * size),
            f"{layer}.self_attn.o_proj": (size, HEADS * DIM),
            f"{layer}.mlp.gate_proj": (inner, size),
            f"{layer}.mlp.up_proj": (inner, size),
            f"{layer}.mlp.down_proj": (size, inner),
            "lm_head": (draft_vocab_size, size),
        }
        torch.manual_seed(3)
        self._weights = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
        norms = (f"{layer}.input_layernorm", f"{layer}.hidden_norm", f"{layer}.post_attention_layernorm", "norm")
        self._weights |= {name: 1 + 0.1 * torch.randn(size) for name in norms}
        self._layer = layer
        chosen = torch.tensor([token for token in range(vocab) if token % 5 in (0, 2)][:draft_vocab_size])
        self._tokens = chosen
        tensors = {f"{name}.weight": values for name, values in self._weights.items()}
        tensors["d2t"] = chosen - torch.arange(draft_vocab_size)
        tensors["t2d"] = torch.isin(torch.arange(vocab), chosen)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        sizes = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "hidden_size": size,
            "intermediate_size": inner,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": DIM,
            "num_hidden_layers": 1,
            "max_position_embeddings": told.max_position_embeddings,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000.0,
            "vocab_size": vocab,
            "draft_vocab_size": draft_vocab_size,
        }
        (folder / "config.json").write_text(json.dumps(sizes | config, indent=2))

    def drafts(self, tokens: Sequence[int], count: int, layers: Sequence[int]) -> list[int]:
        """The greedy drafts behind `tokens`, everything computed anew for each; the target's `layers` are read."""
        with torch.inference_mode():
            answer = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
            read = torch.cat([answer.hidden_states[1 + layer][0] for layer in layers], dim=-1)
            states = F.linear(read, self._weights["fc"])
            ids, found = list(tokens[1:]), []
            for _ in range(count):
                out = self._compute(states, ids)
                logits = F.linear(self._norm("norm", out[-1:]), self._weights["lm_head"])
                found.append(int(self._tokens[int(logits.argmax())]))
                ids.append(found[-1])
                states = torch.cat((states, out[-1:]))
            return found

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[name], 1e-5)

    def _compute(self, states: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        layer, length = self._layer, len(ids)
        embedded = self._norm(f"{layer}.input_layernorm", self.model.model.embed_tokens(torch.tensor(ids)))
        normed = self._norm(f"{layer}.hidden_norm", states)
        x = torch.cat((embedded, normed), dim=-1)
        q, k, v = (
            F.linear(x, self._weights[f"{layer}.self_attn.{name}_proj"]).view(length, -1, DIM).transpose(0, 1)
            for name in "qkv"
        )
        angles = torch.arange(length)[:, None] * 5000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        q, k = (_turned(each, angles) for each in (q, k))
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        residual = normed if self._config.get("norm_before_residual") else states
        x = residual + F.linear(attended, self._weights[f"{layer}.self_attn.o_proj"])
        inner = self._norm(f"{layer}.post_attention_layernorm", x)
        gate, up = (F.linear(inner, self._weights[f"{layer}.mlp.{name}_proj"]) for name in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, self._weights[f"{layer}.mlp.down_proj"])


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
