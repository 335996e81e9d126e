"""Small random encoders in Hugging Face layout, one per family and head, with a tokenizer of words."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from funitel_testing.words import VOCAB_SIZE, word_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {"type_vocab_size": 2},
    "DistilBert": {"dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 3},
    "MPNet": {"pad_token_id": 1},
    "Roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "XLMRoberta": {"pad_token_id": 1, "type_vocab_size": 1},
}


def save_tiny_encoder(family: str, kind: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a random encoder; `kind` is "Model", "ForSequenceClassification" or "ForMaskedLM". Returns `folder`."""
    settings = {name: value for name, value in _COMMON.items() if family != "DistilBert" or "num_" not in name}
    config = getattr(transformers, f"{family}Config")(**(settings | FAMILIES[family] | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, family + kind)(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.1 * noise if "norm" in name.lower() and name.endswith("weight") else 0.2 * noise)
    model.save_pretrained(folder)
    word_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]", "pad_token": "[PAD]"}))
    return folder
