"""Check the numbers of a model folder's configuration files, before anything computes with them.

Each field that is known by its name, at any depth, has a kind and bounds, far beyond any model's. What other code
refuses later it names by the fields of a spec; here file and field are named as they are written.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funitel.model_server.files.integrity import read_json
from funitel.model_server.spec.json_file import MOST
from funitel.proto.errors import UnsupportedModel

_MAX_INT = 2**31 - 1
_MAX_CODE = 2**63 - 1  # of any integer
_MAX_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class _Numbers:
    """An integer or a number within bounds; `by_layer`: it may also be a list of them."""

    least: float
    most: float
    is_integer: bool = True
    by_layer: bool = False

    def problem(self, value: Any) -> str | None:
        """What the value must be; None where it is."""
        kinds = (int,) if self.is_integer else (int, float)
        if isinstance(value, kinds) and not isinstance(value, bool) and self.least <= value <= self.most:
            return None
        kind = "an integer" if self.is_integer else "a number"
        return f"must be {kind} within {self.least:.16g}..{self.most:.16g}"


def _fields(names: str, kind: _Numbers) -> dict[str, _Numbers]:
    return dict.fromkeys(names.split(), kind)


_CONFIG: Mapping[str, _Numbers] = {
    **_fields("vocab_size padded_vocab_size vocab_size_per_layer_input", _Numbers(1, MOST["vocab_size"])),
    **_fields("hidden_size n_embd n_embed d_model dim word_embed_proj_dim", _Numbers(1, MOST["hidden_size"])),
    **_fields(
        "num_hidden_layers n_layer n_layers num_layers num_decoder_layers num_encoder_layers encoder_layers "
        "decoder_layers",
        _Numbers(1, MOST["num_layers"]),
    ),
    **_fields("first_k_dense_replace max_window_layers num_kv_shared_layers", _Numbers(0, MOST["num_layers"])),
    **_fields(
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads "
        "num_key_value_heads num_kv_heads n_head_kv multi_query_group_num num_global_key_value_heads index_n_heads",
        _Numbers(1, MOST["num_heads"], by_layer=True),
    ),
    **_fields("head_dim kv_channels d_kv global_head_dim index_head_dim", _Numbers(1, MOST["head_dim"], by_layer=True)),
    **_fields("qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim", _Numbers(0, MOST["head_dim"])),
    **_fields("kv_lora_rank q_lora_rank hidden_size_per_layer_input laurel_rank", _Numbers(0, MOST["hidden_size"])),
    **_fields(
        "ffn_dim ffn_hidden_size d_ff n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim",
        _Numbers(1, MOST["intermediate_size"]),
    ),
    **_fields(
        "intermediate_size moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "intermediate_size_mlp prefix_dense_intermediate_size",
        _Numbers(0, MOST["intermediate_size"], by_layer=True),
    ),
    **_fields(
        "max_position_embeddings n_positions n_ctx max_seq_len max_seq_length seq_length max_sequence_length "
        "max_source_positions max_target_positions original_max_position_embeddings",
        _Numbers(1, _MAX_INT),
    ),
    **_fields("sliding_window window_size", _Numbers(-1, _MAX_INT, by_layer=True)),
    **_fields("altup_num_inputs", _Numbers(1, 1 << 10)),
    **_fields("altup_active_idx", _Numbers(0, 1 << 10)),
    **_fields("activation_sparsity_pattern", _Numbers(0, 1, is_integer=False, by_layer=True)),
    **_fields("attention_chunk_size floor_scale index_topk", _Numbers(1, _MAX_INT)),
    **_fields("type_vocab_size relative_attention_num_buckets relative_attention_max_distance", _Numbers(0, 1 << 24)),
    **_fields(
        "num_experts num_local_experts n_routed_experts num_experts_per_tok n_shared_experts n_group topk_group "
        "num_nextn_predict_layers num_shared_experts moe_num_experts moe_k moe_topk moe_num_shared_experts "
        "top_k_experts",
        _Numbers(0, 1 << 20, by_layer=True),
    ),
    **_fields(
        "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_epsilon norm_eps",
        _Numbers(0, 1, is_integer=False),
    ),
    **_fields("rope_theta rotary_emb_base rope_local_base_freq rope_ratio", _Numbers(1e-6, 1e15, is_integer=False)),
    **_fields("partial_rotary_factor rotary_pct", _Numbers(0, 1, is_integer=False)),
    **_fields(
        "factor low_freq_factor high_freq_factor attention_factor beta_fast beta_slow mscale mscale_all_dim",
        _Numbers(0, 1e9, is_integer=False),
    ),
    **_fields(
        "attention_multiplier residual_multiplier embedding_multiplier logits_scaling final_logit_softcapping "
        "attn_logit_softcapping query_pre_attn_scalar clip_qkv routed_scaling_factor scale_emb scale_depth "
        "swiglu_limit attn_scale llama_4_scaling_beta router_jitter_noise short_mscale long_mscale",
        _Numbers(-1e9, 1e9, is_integer=False),
    ),
}
_OBJECTS = frozenset(("rope_scaling", "rope_parameters", "text_config", "quantization_config", "attn_config"))
_GENERATION: Mapping[str, _Numbers] = {
    "temperature": _Numbers(0, 100, is_integer=False),
    **_fields("top_p min_p typical_p", _Numbers(0, 1, is_integer=False)),
    **_fields("repetition_penalty encoder_repetition_penalty", _Numbers(0, 1e9, is_integer=False)),
    **_fields("top_k max_length max_new_tokens min_length min_new_tokens", _Numbers(-1, _MAX_INT)),
}
_TOKEN_IDS = _Numbers(-1, _MAX_INT, by_layer=True)  # -1: some checkpoints have no padding
_END_TOKEN_IDS = _Numbers(0, _MAX_INT, by_layer=True)
# Tokenizers without a bound write 1e30.
_LENGTH = {"model_max_length": _Numbers(1, 1e40, is_integer=False)}

FILES: Mapping[str, Mapping[str, _Numbers]] = {
    "config.json": _CONFIG,
    "generation_config.json": _GENERATION,
    "funitel.json": _GENERATION,
    "tokenizer_config.json": _LENGTH,
    "sentence_bert_config.json": {"max_seq_length": _Numbers(1, _MAX_INT)},
}


def check_numbers(folder: Path) -> None:
    """Check the configuration files of a model folder that are there.

    Raises:
        UnsupportedModel: a number is none, or beyond its bounds; with file, field, value and limit.
        WeightsError: a file is not a JSON object.
    """
    for name, fields in FILES.items():
        if not (folder / name).is_file():
            continue
        problem = next(_problems(read_json(folder / name), fields, ""), None)
        if problem is not None:
            raise UnsupportedModel(f"{folder / name}: {problem}")


def _problems(given: Any, fields: Mapping[str, _Numbers], path: str) -> Iterator[str]:
    """What is wrong below a place, in the order of the file."""
    items = given.items() if isinstance(given, dict) else enumerate(given)
    for key, value in items:
        at = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}" if path else str(key)
        kind = _kind_of(key, fields)
        if key in _OBJECTS and value is not None and not isinstance(value, dict):
            yield f"{at} must be an object, given {_shown(value)}"
        elif kind is not None:
            yield from _field_problems(value, kind, at)
        elif isinstance(value, dict | list):
            yield from _problems(value, fields, at)
        elif isinstance(value, float) and math.isnan(value):
            yield f"{at} is not a number"
        elif isinstance(value, int) and abs(value) > _MAX_CODE:
            yield f"{at} must be within +-{_MAX_CODE}, given {_shown(value)}"


def _kind_of(key: int | str, fields: Mapping[str, _Numbers]) -> _Numbers | None:
    if not isinstance(key, str):
        return None
    if key == "eos_token_id":
        return _END_TOKEN_IDS
    return _TOKEN_IDS if key.endswith("_token_id") else fields.get(key)


def _field_problems(value: Any, kind: _Numbers, at: str) -> Iterator[str]:
    """What is wrong with a field that has a kind; null is always right."""
    if value is None:
        return
    items = enumerate(value) if kind.by_layer and isinstance(value, list) and value else None
    for place, item in [(at, value)] if items is None else [(f"{at}[{i}]", item) for i, item in items]:
        problem = kind.problem(item)
        if problem is not None:
            yield f"{place} {problem}, given {_shown(item)}"


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) > _MAX_CODE:
        return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1} and beyond"
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
