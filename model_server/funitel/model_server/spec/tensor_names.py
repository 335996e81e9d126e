"""Name the tensors of a checkpoint, as part of a ModelSpec. The defaults are a Llama's, and for experts a Qwen's."""

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Checkpoint names without `.weight`; `{i}` is the layer, `{j}` a head or an expert.

    Give either `q`, `k`, `v` or the packed `qkv`; either `gate` and `up`, or `gate_up` with the gate's rows first; `up`
    alone where the MLP is not gated. An empty name means that the model has no such tensor.

    Names of a mixture of experts may list alternatives, separated by `|`: the first that the checkpoint has counts.
    `name[{j}]` is the matrix of expert `j` in a stack [experts, outputs, inputs]; its bias is a row of `name_bias`.
    """

    prefix: str = "model."
    embedding: str = "embed_tokens"
    embedding_norm: str = ""
    embedding_in: str = ""  # linear layer behind embeddings that are smaller than the hidden states
    embedding_out: str = ""  # its counterpart before the head
    positions: str = ""
    attention_norm: str = "layers.{i}.input_layernorm"
    attention_post_norm: str = ""
    q: str = "layers.{i}.self_attn.q_proj"
    k: str = "layers.{i}.self_attn.k_proj"
    v: str = "layers.{i}.self_attn.v_proj"
    qkv: str = ""
    q_norm: str = "layers.{i}.self_attn.q_norm"
    k_norm: str = "layers.{i}.self_attn.k_norm"
    sinks: str = "layers.{i}.self_attn.sinks"  # the whole name
    output_gate: str = "layers.{i}.self_attn.gate_proj"
    is_gate_in_q: bool = False  # rows of `q`: for each head its query, then its gate; there is no `output_gate`
    out: str = "layers.{i}.self_attn.o_proj"
    mlp_norm: str = "layers.{i}.post_attention_layernorm"  # empty in a parallel block: the attention's norm serves both
    mlp_post_norm: str = ""
    gate: str = "layers.{i}.mlp.gate_proj"
    up: str = "layers.{i}.mlp.up_proj"
    gate_up: str = ""
    down: str = "layers.{i}.mlp.down_proj"
    activation: str = "layers.{i}.mlp.act_fn"  # of the learnt slopes of an activation, `alpha_p` and `alpha_n`
    final_norm: str = "norm"
    head: str = "lm_head"
    is_transposed: bool = False  # linear weights stored [in, out]
    is_stack_transposed: bool = False  # stacks of experts stored [experts, in, out]
    is_stack_interleaved: bool = False  # of `expert_gate_up`, the gate's rows and the others take turns
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)  # patterns of tensors that carry nothing

    # Latent attention: hidden states -> latents -> heads. Without a latent of queries these come from `q`.
    q_down: str = "layers.{i}.self_attn.q_a_proj"
    q_latent_norm: str = "layers.{i}.self_attn.q_a_layernorm"
    q_up: str = "layers.{i}.self_attn.q_b_proj"
    kv_down: str = "layers.{i}.self_attn.kv_a_proj_with_mqa"
    kv_latent_norm: str = "layers.{i}.self_attn.kv_a_layernorm"
    kv_up: str = "layers.{i}.self_attn.kv_b_proj"
    # The indexer of sparse attention: queries from their latents, keys and the shares of heads from hidden states.
    index_q: str = "layers.{i}.self_attn.indexer.wq_b"
    index_k: str = "layers.{i}.self_attn.indexer.wk"
    index_k_norm: str = "layers.{i}.self_attn.indexer.k_norm"
    index_shares: str = "layers.{i}.self_attn.indexer.weights_proj"

    # Experts: one by one, or stacked; where a checkpoint has `expert_gate_up`, it has no `expert_gate`.
    router: str = "layers.{i}.mlp.gate"
    router_correction: str = ""  # added to scores where experts are chosen, not where they are weighed; the whole name
    expert_gate: str = "layers.{i}.mlp.experts.{j}.gate_proj"
    expert_up: str = "layers.{i}.mlp.experts.{j}.up_proj"
    expert_gate_up: str = "layers.{i}.mlp.experts.gate_up_proj[{j}]"
    expert_down: str = "layers.{i}.mlp.experts.{j}.down_proj|layers.{i}.mlp.experts.down_proj[{j}]"
    shared_gate: str = "layers.{i}.mlp.shared_experts.gate_proj"
    shared_up: str = "layers.{i}.mlp.shared_experts.up_proj"
    shared_down: str = "layers.{i}.mlp.shared_experts.down_proj"
    shared_gate_up: str = ""
    shared_share: str = ""  # linear layer of one output: its sigmoid is how much of the shared MLP a token takes
    router_scale: str = ""  # of hidden states that are normalised before the router reads them; the whole name
    expert_scale: str = ""  # multiplies the share of each expert; the whole name
    # Norms of the plain MLP and of the experts where a layer has both; these have no `mlp_norm`.
    dense_norm: str = ""
    dense_post_norm: str = ""
    experts_norm: str = ""
    experts_post_norm: str = ""

    # What is in every layer besides, see `layer_spec`.
    layer_embedding: str = "embed_tokens_per_layer"
    layer_projection: str = "per_layer_model_projection"
    layer_projection_norm: str = "per_layer_projection_norm"
    layer_embedding_gate: str = "layers.{i}.per_layer_input_gate"
    layer_embedding_out: str = "layers.{i}.per_layer_projection"
    layer_embedding_norm: str = "layers.{i}.post_per_layer_input_norm"
    layer_scale: str = "layers.{i}.layer_scalar"  # the whole name
    laurel_left: str = "layers.{i}.laurel.linear_left"
    laurel_right: str = "layers.{i}.laurel.linear_right"
    laurel_norm: str = "layers.{i}.laurel.post_laurel_norm"
    altup: str = "layers.{i}.altup"  # of its tensors, called as in transformers
    altup_in: str = "altup_projections.{j}"
    altup_out: str = "altup_unembed_projections.{j}"

    # Layers with a state. `state_in` has the rows of what is convolved, and of Mamba 2 and short convolutions more.
    # Of a delta net: `state_in`, or `state_q`, `state_k` and `state_v`, or `state_qkvz` with the rows of each key head
    # together; `state_gate`, `state_beta` and `state_step`, or the latter two as `state_ba`, by key head likewise.
    state_in: str = ""
    state_q: str = ""
    state_k: str = ""
    state_v: str = ""
    state_gate: str = ""
    state_beta: str = ""
    state_step: str = ""
    state_gate_down: str = ""  # linear layers before `state_gate` and `state_step` where a delta net has a rank
    state_step_down: str = ""
    state_qkvz: str = ""
    state_ba: str = ""
    state_select: str = ""  # of Mamba: linear layer from what is convolved to what steps, B and C come from
    state_step_norm: str = ""  # and norms of these three
    state_b_norm: str = ""
    state_c_norm: str = ""
    state_conv: str = ""
    state_conv_q: str = ""  # where the convolution of a delta net is in three parts, and the same of keys and values
    state_conv_k: str = ""
    state_conv_v: str = ""
    state_decay: str = ""  # logarithms of rates, one for each head; the whole name, as of the next two
    state_step_bias: str = ""
    state_skip: str = ""
    state_norm: str = ""
    state_out: str = ""

    def of_layer(self, stem: str) -> "TensorNames":
        """The names with `stem` for `layers.{i}.`."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        named: dict[str, Any] = {k: v.replace("layers.{i}.", stem) for k, v in values.items() if isinstance(v, str)}
        return replace(self, **named)


WITH_ALTERNATIVES = frozenset(
    ("router", "router_correction", "expert_gate", "expert_up", "expert_gate_up", "expert_down")
    + ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "gate", "up", "down")
    + ("shared_gate", "shared_up", "shared_gate_up", "shared_down", "shared_share")
)
"""Names that may list alternatives."""
