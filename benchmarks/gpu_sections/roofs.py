"""Minimum bytes and operations of a step, by the shape of the model. Pure arithmetic; units are in the names."""

from funitel.model_server.spec.model_spec import ModelSpec


def layer_elements(spec: ModelSpec) -> int:
    """Weights in the matrices of one layer: a token takes two operations with each."""
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads  # queries, keys, values, and the way back
    return spec.hidden_size * (heads * spec.head_dim + 3 * spec.intermediate_size)


def weight_bytes(spec: ModelSpec, bytes_each: float) -> float:
    """Bytes of weights that a decoding step reads: every matrix and the head; of the embeddings only its rows."""
    return bytes_each * (spec.num_layers * layer_elements(spec) + spec.vocab_size * spec.hidden_size)


def mixture_bytes(spec: ModelSpec, num_hit: float, bytes_each: float) -> float:
    """Bytes of weights that a decoding step of a mixture reads, with `num_hit` experts hit in each layer on average.

    Scores of experts are computed in float32. Every layer has experts, and none that all tokens pass.
    """
    experts = spec.experts
    assert experts is not None
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
    each = heads * spec.head_dim + 3 * num_hit * experts.intermediate_size
    layer = spec.hidden_size * (bytes_each * each + 4 * experts.num_experts)
    return spec.num_layers * layer + bytes_each * spec.vocab_size * spec.hidden_size


def kv_bytes(spec: ModelSpec, context: float, bytes_each: float) -> float:
    """Bytes of keys and values that a row of so many tokens reads in a step."""
    return bytes_each * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * context


def prompt_operations(spec: ModelSpec, num_tokens: int) -> float:
    """Floating-point operations of a prompt, without the head, which computes one row only.

    A token sees half of the prompt on average; a score and what it weighs are two operations an element each.
    """
    attention = 4 * spec.num_heads * spec.head_dim * num_tokens / 2
    return num_tokens * spec.num_layers * (2.0 * layer_elements(spec) + attention)


def share_of_roof(num_bytes: float, seconds: float, bytes_a_second: float) -> float:
    """What reading so many bytes at the ceiling's pace is of the time taken."""
    return num_bytes / bytes_a_second / seconds
