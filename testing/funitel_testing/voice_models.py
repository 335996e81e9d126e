"""Small random models for sounds in prompts, in Hugging Face layout, and what transformers makes of sounds."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from funitel_testing.sound_files import wav
from funitel_testing.tiny import EOS, VOCAB_SIZE
from funitel_testing.tiny_whisper import RATE

NUM_MEL_BINS = 80
WINDOW_FRAMES = 3000
_SPECIALS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "[AUDIO]", "[BEGIN_AUDIO]")
_SPECIALS += ("<|audio|>", "<|audio>", "<audio|>")
_IDS = {text: 257 + place for place, text in enumerate(_SPECIALS)}
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
Part = str | np.ndarray
"""A text, or samples at 16 kHz."""


@dataclass(frozen=True, slots=True)
class VoiceFamily:
    """One family: transformers' name of it, its tower, and what a template has for a sound."""

    kind: str
    text_kind: str
    marker: str
    around: str
    tower: Mapping[str, Any]
    outer: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    extractor: str = "WhisperFeatureExtractor"

    @property
    def architecture(self) -> str:
        """That config.json names."""
        return f"{self.kind}ForConditionalGeneration"

    @property
    def template(self) -> str:
        """A chat template of the usual kind: a content is a text, or a list of parts of which sounds are marked."""
        return (
            "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}{% if part.type == 'audio' %}"
            + self.around
            + "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
            + "[assistant]"
        )

    def prompt(self, parts: Sequence[Part]) -> str:
        """What the template makes of a message of the user."""
        text = "".join(part if isinstance(part, str) else self.around for part in parts)
        return f"[user] {text}\n[assistant]"


VOICE_FAMILIES: Mapping[str, VoiceFamily] = {
    "qwen2_audio": VoiceFamily(
        kind="Qwen2Audio",
        text_kind="qwen2",
        marker="<|AUDIO|>",
        around="<|audio_bos|><|AUDIO|><|audio_eos|>",
        tower={
            **{"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2},
            **{"encoder_ffn_dim": 48, "num_mel_bins": NUM_MEL_BINS},
        },
        outer={"audio_token_index": _IDS["<|AUDIO|>"]},
    ),
    "voxtral": VoiceFamily(
        kind="Voxtral",
        text_kind="llama",
        marker="[AUDIO]",
        around="[BEGIN_AUDIO][AUDIO]",
        tower={  # 30 features of a window
            **{"model_type": "voxtral_encoder", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"intermediate_size": 1600, "num_mel_bins": NUM_MEL_BINS},
        },
        outer={"audio_token_id": _IDS["[AUDIO]"]},
    ),
    "gemma4": VoiceFamily(
        kind="Gemma4",
        text_kind="gemma4_text",
        marker="<|audio|>",
        around="<|audio|>",
        tower={
            **{"model_type": "gemma4_audio", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"subsampling_conv_channels": [128, 4], "output_proj_dims": 24},
        },
        outer={
            **{"audio_token_id": _IDS["<|audio|>"], "boa_token_id": _IDS["<|audio>"]},
            **{"eoa_token_index": _IDS["<audio|>"], "vision_config": None},
            # Beyond the vocabulary: transformers gives one that is generated another embedding.
            **{"image_token_id": VOCAB_SIZE, "video_token_id": VOCAB_SIZE + 1},
        },
        text={
            **{"sliding_window": 24, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "pad_token_id": 0},
            **{"num_kv_shared_layers": 0, "use_bidirectional_attention": "vision", "global_head_dim": 8},
        },
        extractor="Gemma4AudioFeatureExtractor",
    ),
}
"""By `model_type`."""


def voice_tokenizer() -> Tokenizer:
    """One token for each byte, the end, and what stands for sounds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (EOS, *_SPECIALS)])
    return tokenizer


def save_voice(family: str, folder: Path, seed: int = 0, *, as_published: bool = True) -> Any:
    """Save a random model whose texts vary with the sound, with all that a server needs; returns the model.

    `as_published`: tensors have the names of the checkpoints of the hub.
    """
    row = VOICE_FAMILIES[family]
    config = getattr(transformers, f"{row.kind}Config")(
        text_config={**_TEXT, **row.text, "model_type": row.text_kind, "tie_word_embeddings": False},
        audio_config=dict(row.tower),
        tie_word_embeddings=False,
        **row.outer,
    )
    config.eos_token_id = 256
    torch.manual_seed(seed)
    model = getattr(transformers, row.architecture)(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * (0.3 if parameter.dim() > 1 else 0.1))
    model.save_pretrained(folder, save_original_format=as_published)
    voice_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": row.template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    how = {"feature_size": NUM_MEL_BINS} if row.extractor == "WhisperFeatureExtractor" else {}
    features = getattr(transformers, row.extractor)(**how).to_dict()
    for computed in ("mel_filters", "window"):
        features.pop(computed, None)
    features["processor_class"] = f"{row.kind}Processor"
    (folder / "preprocessor_config.json").write_text(json.dumps(features, default=np.ndarray.tolist))
    return model


class VoiceOracle:
    """What transformers makes of sounds, with the model of a folder of `save_voice`."""

    def __init__(self, family: str, folder: Path) -> None:
        self.row = VOICE_FAMILIES[family]
        self.model = getattr(transformers, self.row.architecture).from_pretrained(folder, dtype=torch.float32).eval()
        self.extractor = getattr(transformers, self.row.extractor).from_pretrained(folder)
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), eos_token=EOS, pad_token=EOS
        )

    def inputs(self, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
        """What the family's processor makes of a message of the user, as the template has it."""
        sounds = [part for part in parts if not isinstance(part, str)]
        text = self.row.prompt(parts)
        if not sounds:
            return {"input_ids": torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])}
        make = {"Qwen2Audio": self._qwen, "Voxtral": self._voxtral, "Gemma4": self._gemma}[self.row.kind]
        return make(text, sounds)

    def _qwen(self, text: str, sounds: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        processor = transformers.Qwen2AudioProcessor(self.extractor, self.tokenizer)
        made = processor(text=text, audio=list(sounds), sampling_rate=RATE, return_tensors="pt", padding=True)
        return {name: made[name] for name in ("input_ids", "input_features", "feature_attention_mask")}

    @torch.inference_mode()
    def _voxtral(self, text: str, sounds: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Features of its processor; tokens, which mistral-common makes, are as many as the model's features."""
        extract = transformers.VoxtralProcessor._retrieve_input_features
        how = dict(transformers.VoxtralProcessor.audio_kwargs)
        windows = how.pop("max_source_positions")
        whole = [extract(SimpleNamespace(feature_extractor=self.extractor), [each], windows, **how) for each in sounds]
        counts = [len(self.model.get_audio_features(each, return_dict=True).pooler_output) for each in whole]
        for count in counts:
            text = text.replace(f"{self.row.around}", f"[BEGIN_AUDIO]{'<AUDIO>' * count}", 1)
        ids = self.tokenizer.encode(text.replace("<AUDIO>", "[AUDIO]"), add_special_tokens=False)
        return {"input_ids": torch.tensor([ids]), "input_features": torch.cat(whole)}

    def _gemma(self, text: str, sounds: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Features of its extractor; the text is that of its processor, which cannot be made without one of images."""
        made = self.extractor(list(sounds), return_tensors="pt")
        tokens = SimpleNamespace(boa_token="<|audio>", audio_token="<AUDIO>", eoa_token="<audio|>")
        for place in range(len(sounds)):
            own = transformers.Gemma4Processor.replace_audio_token(tokens, made, place)
            text = text.replace(self.row.marker, own, 1)
        ids = self.tokenizer.encode(text.replace("<AUDIO>", self.row.marker), add_special_tokens=False)
        inputs = {name: made[name] for name in ("input_features", "input_features_mask")}
        return {"input_ids": torch.tensor([ids]), **inputs}

    @torch.inference_mode()
    def generate(self, parts: Sequence[Part], max_new_tokens: int) -> list[int]:
        """Greedy completion."""
        inputs = self.inputs(parts)
        how = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": 256}
        found = self.model.generate(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]), **how)
        return [int(token) for token in found[0, inputs["input_ids"].shape[1] :]]

    @torch.inference_mode()
    def hear(self, parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the text model is given in the place of embeddings [tokens, hidden], and logits behind each token."""
        inputs, heard = self.inputs(parts), {}
        hook = self.model.model.language_model.register_forward_pre_hook(
            lambda _, args, given: heard.update(given), with_kwargs=True
        )
        logits = self.model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"])).logits[0]
        hook.remove()
        return heard["inputs_embeds"][0], logits


def content_of(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The content of a message of OpenAI's; sounds as WAV."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "input_audio", "input_audio": {"data": base64_of(part), "format": "wav"}}
        for part in parts
    ]


def base64_of(samples: np.ndarray) -> str:
    """A WAV file, as text."""
    return base64.b64encode(wav(samples, kind="float32")).decode()
