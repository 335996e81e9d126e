"""Small random encoder-decoders in Hugging Face layout with the byte tokenizer, and what transformers writes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from funitel_testing.tiny import EOS, VOCAB_SIZE, byte_tokenizer

EOS_ID, PAD_ID = 256, 1  # padding is no token of its own: M2M100 has positions behind its id
LANGUAGE_ID, OTHER_LANGUAGE_ID = 259, 260
LANGUAGE, OTHER_LANGUAGE = "eng_Latn", "fra_Latn"  # as NLLB calls its tokens
T5_START = 257

_T5: dict[str, Any] = {
    "d_model": 48,
    "d_kv": 16,
    "d_ff": 100,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": T5_START,
    "n_positions": 64,
}
# Uneven on purpose: other heads, layers and units in each stack; transformers wants the fewer layers in the decoder.
_BART: dict[str, Any] = {
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 100,
    "decoder_ffn_dim": 60,
    "max_position_embeddings": 64,
    "decoder_start_token_id": EOS_ID,
    "bos_token_id": 258,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", _T5),
    "t5_gated": ("T5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("Bart", _BART | {"forced_eos_token_id": EOS_ID}),
    "mbart": ("MBart", _BART | {"scale_embedding": True, "forced_eos_token_id": EOS_ID}),
    "m2m_100": ("M2M100", _BART | {"scale_embedding": True}),
}
_SIZES = {"shared": 0.05, "embed_positions": 1.5}  # of weights, by a part of their names
FORCED_LANGUAGE = ("mbart", "m2m_100")  # completions begin with the code of a language


def save_tiny_seq2seq(family: str, folder: Path, seed: int = 1, **changes: Any) -> Path:
    """Save a random encoder-decoder of `family` with weights large enough that its tokens vary; returns `folder`."""
    kind, differences = FAMILIES[family]
    common = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    config = getattr(transformers, f"{kind}Config")(**(common | differences | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    if differences.get("tie_word_embeddings") is False:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.add_(noise * 0.2)
            else:  # a small table, or a tied head says again what it has just said
                parameter.copy_(noise * next((size for part, size in _SIZES.items() if part in name), 0.4))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias) * 0.05)
    if family in FORCED_LANGUAGE:
        model.generation_config.forced_bos_token_id = LANGUAGE_ID
    model.save_pretrained(folder)
    tokenizer = _with_languages() if family in FORCED_LANGUAGE else byte_tokenizer()
    start = f"{LANGUAGE} " if family in FORCED_LANGUAGE else ""
    tokenizer.post_processor = TemplateProcessing(
        single=f"{start}$A {EOS}",
        special_tokens=[(EOS, EOS_ID), *([(LANGUAGE, LANGUAGE_ID)] if start else [])],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return folder


def _with_languages() -> Tokenizer:
    """The byte tokenizer with two languages in place of fillers."""
    content = json.loads(byte_tokenizer().to_str())
    names = {LANGUAGE_ID: LANGUAGE, OTHER_LANGUAGE_ID: OTHER_LANGUAGE}
    for token in content["added_tokens"]:
        if token["id"] in names:
            token |= {"content": names[token["id"]], "special": True}
    return Tokenizer.from_str(json.dumps(content))


def generate(folder: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int, **how: Any) -> list[list[int]]:
    """Completions by transformers, by its settings `how`, of all prompts in one padded batch; each up to its end."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[PAD_ID] * (longest - len(prompt))] for prompt in prompts])
    mask = torch.tensor([[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in prompts])
    found = model.generate(ids, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, **how)
    completions = []
    for row in found[:, 1:].tolist():
        end = row.index(EOS_ID) + 1 if EOS_ID in row else max_new_tokens
        completions.append(row[:end])
    return completions


def decoder_logprobs(folder: Path, prompt: Sequence[int], decoder_ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocab_size] of what follows each token the decoder has got: transformers, float64."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        answer = model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([decoder_ids]))
    logprobs: torch.Tensor = answer.logits[0].log_softmax(-1)
    return logprobs
