"""Minimum bytes and operations of a step, by the shape of the model. Pure arithmetic; units are in the names."""

from funitel.model_server.spec.model_spec import ModelSpec


def layer_elements(spec: ModelSpec) -> int:
    """Weights in the matrices of one layer: a token takes two operations with each."""
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads  # queries, keys, values, and the way back
    return spec.hidden_size * (heads * spec.head_dim + 3 * spec.intermediate_size)


def weight_bytes(spec: ModelSpec, bytes_each: float) -> float:
    """Bytes of weights that a decoding step reads: every matrix and the head; of the embeddings only its rows."""
    return bytes_each * (spec.num_layers * layer_elements(spec) + spec.vocab_size * spec.hidden_size)


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
