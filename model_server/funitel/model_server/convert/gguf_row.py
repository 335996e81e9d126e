"""Define a row of the table of GGUF architectures, and the roles of tensors that all of them share.

Names of tensors are in no row: what a tensor is for has one name in every GGUF (`ROLES`), and the family's ModelSpec
says what its checkpoints call the same thing.
Source: the keys of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and what llama.cpp's converter writes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from funitel.model_server.convert.gguf_reader import GgufFile

Rule = Callable[[GgufFile], Any]  # reads one setting off a file's metadata
# GGUF's name of a tensor -> the field of TensorNames for the same thing; `#` is the number of the block.
ROLES: Mapping[str, str] = {
    "token_embd": "embedding",
    "token_embd_norm": "embedding_norm",
    "position_embd": "positions",
    "blk.#.attn_norm": "attention_norm",
    "blk.#.post_attention_norm": "attention_post_norm",
    "blk.#.attn_q": "q",
    "blk.#.attn_k": "k",
    "blk.#.attn_v": "v",
    "blk.#.attn_qkv": "qkv",
    "blk.#.attn_q_a": "q_down",
    "blk.#.attn_q_a_norm": "q_latent_norm",
    "blk.#.attn_q_b": "q_up",
    "blk.#.attn_kv_a_mqa": "kv_down",
    "blk.#.attn_kv_a_norm": "kv_latent_norm",
    "blk.#.attn_kv_b": "kv_up",
    "blk.#.attn_q_norm": "q_norm",
    "blk.#.attn_k_norm": "k_norm",
    "blk.#.attn_output": "out",
    "blk.#.ffn_norm": "mlp_norm",
    "blk.#.post_ffw_norm": "mlp_post_norm",
    "blk.#.ffn_gate": "gate",
    "blk.#.ffn_up": "up",
    "blk.#.ffn_down": "down",
    "blk.#.ffn_gate_inp": "router",
    "blk.#.exp_probs_b": "router_correction",
    "blk.#.ffn_gate_exps": "expert_gate",
    "blk.#.ffn_up_exps": "expert_up",
    "blk.#.ffn_down_exps": "expert_down",
    "blk.#.ffn_gate_shexp": "shared_gate",
    "blk.#.ffn_up_shexp": "shared_up",
    "blk.#.ffn_down_shexp": "shared_down",
    "blk.#.ffn_gate_inp_shexp": "shared_share",
    "output_norm": "final_norm",
    "output": "head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one GGUF architecture maps to a Hugging Face one.

    `settings` are those of config.json, each a value or a rule. In the files of a `is_permuted` architecture, the rows
    of each head of queries and keys lie as a rotary embedding of neighbours wants them, where Hugging Face's rotates
    halves. `factors` are tensors that the settings are read from. `roles` are those that differ from `ROLES`, empty
    for a tensor that it has not.
    """

    hf_class: str
    settings: Mapping[str, Any]
    is_permuted: bool = False
    factors: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)

    def config(self, gguf: GgufFile) -> dict[str, Any]:
        """The settings as `gguf` has them."""
        return {key: rule(gguf) if callable(rule) else rule for key, rule in self.settings.items()}
