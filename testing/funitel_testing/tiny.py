"""Small random models in Hugging Face layout, one per family, with a byte-level tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = "<|end|>"
VOCAB_SIZE = 288

# Uneven on purpose: six query heads in three groups, an MLP that two ranks split and three do not evenly.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama3_rope": (
        "Llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "linear_rope": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "smollm": ("Llama", {"tie_word_embeddings": True, "rope_theta": 100000.0}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gpt2": (
        "GPT2",
        {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 256, "n_inner": 100},
    ),
}


def byte_tokenizer() -> Tokenizer:
    """One token per byte, then an end token and some fillers: VOCAB_SIZE in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer.add_tokens([AddedToken(f"<extra{i}>") for i in range(VOCAB_SIZE - 257)])
    return tokenizer


def save_tiny(family: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of `family` with weights large enough that its tokens vary; returns `folder`."""
    kind, differences = FAMILIES[family]
    common = {} if kind == "GPT2" else _COMMON
    base = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": 256}
    config = getattr(transformers, f"{kind}Config")(**(base | common | differences | changes))
    torch.manual_seed(seed)
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, name)(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "ln_" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Save the byte tokenizer and a chat template into a model folder."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    settings = {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
