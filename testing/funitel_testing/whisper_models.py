"""A small random Whisper in Hugging Face layout, sounds for it, and what transformers writes of them.

Its tokenizer has a token for each byte and the special tokens of OpenAI's; suppressed are all but letters, digits and
some signs, so that texts are plain ones.
"""

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

RATE = 16000  # samples in a second
WINDOW_SECONDS = 30
LANGUAGES = ("en", "de", "fr", "zh")
LANGUAGE_NAMES = {code: name for name, code in TO_LANGUAGE_CODE.items() if code in LANGUAGES}
EOS, START = "<|endoftext|>", "<|startoftranscript|>"
_TASKS = ("<|translate|>", "<|transcribe|>")
_CONTROL = ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
SPECIALS = (EOS, START, *(f"<|{code}|>" for code in LANGUAGES), *_TASKS, *_CONTROL)
NUM_TIMESTAMPS = WINDOW_SECONDS * 50 + 1
TIMESTAMPS = tuple(f"<|{place * 0.02:.2f}|>" for place in range(NUM_TIMESTAMPS))
IDS = {token: 256 + place for place, token in enumerate((*SPECIALS, *TIMESTAMPS))}
VOCAB = 256 + len(IDS)
FIRST_TIMESTAMP = IDS[TIMESTAMPS[0]]
MAX_TOKENS = 64  # positions of the decoder
_WRITTEN = string.ascii_letters + string.digits + " ,.'-!?"
MEL_BINS = 80


def whisper_tokenizer() -> Tokenizer:
    """One token per byte, then the special tokens and the timestamps, in the order of OpenAI's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TIMESTAMPS])
    start = (START, "<|notimestamps|>")
    tokenizer.post_processor = TemplateProcessing(
        single=f"{' '.join(start)} $A {EOS}", special_tokens=[(token, IDS[token]) for token in (*start, EOS)]
    )
    return tokenizer


def suppressed() -> list[int]:
    """Tokens that are never written: bytes that are no plain text, and special tokens that begin something."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    kept = {"Ġ" if letter == " " else letter for letter in _WRITTEN}
    others = [place for place, letter in enumerate(alphabet) if letter not in kept]
    return [*others, IDS[START], *(IDS[token] for token in (*_TASKS, *_CONTROL[:3]))]


def save_tiny_whisper(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a random multilingual Whisper whose texts vary with the sound, with all a server needs; returns `folder`."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "num_mel_bins": MEL_BINS,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_source_positions": WINDOW_SECONDS * 50,
        "max_target_positions": MAX_TOKENS,
        "bos_token_id": IDS[EOS],
        "eos_token_id": IDS[EOS],
        "pad_token_id": IDS[EOS],
        "decoder_start_token_id": IDS[START],
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    torch.manual_seed(seed)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**(sizes | changes))).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("decoder.layer_norm.weight"):
                # Of both signs, or the tied head says again what it has just said; large, so that it is sure of its
                # texts, and none of them is tried again at a higher temperature.
                parameter.copy_(noise * 2.0)
            elif name.endswith("decoder.layer_norm.bias"):
                parameter.zero_()
            elif "layer_norm" in name:
                parameter.add_(noise * 0.1)
            elif "embed_tokens" in name:
                parameter.copy_(noise * 0.6)
                parameter[FIRST_TIMESTAMP:] *= 0.3  # together likelier than each letter only now and then
            elif "embed_positions" in name and "decoder" in name:
                parameter.copy_(noise)
            elif "encoder_attn" in name:  # it looks at few places, or all sounds are alike
                parameter.copy_(noise * (1.0 if "_proj.weight" in name else 0.1))
            elif "encoder.embed_positions" not in name:  # those are sines
                parameter.copy_(noise * (0.3 if parameter.dim() > 1 else 0.1))
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=IDS[EOS],
        eos_token_id=IDS[EOS],
        pad_token_id=IDS[EOS],
        decoder_start_token_id=IDS[START],
        max_length=MAX_TOKENS,
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": IDS[f"<|{code}|>"] for code in LANGUAGES},
        task_to_id={"transcribe": IDS["<|transcribe|>"], "translate": IDS["<|translate|>"]},
        no_timestamps_token_id=IDS["<|notimestamps|>"],
        prev_sot_token_id=IDS["<|startofprev|>"],
        suppress_tokens=suppressed(),
        begin_suppress_tokens=[sorted(pre_tokenizers.ByteLevel.alphabet()).index("Ġ"), IDS[EOS]],
        max_initial_timestamp_index=50,
        return_timestamps=False,
    )
    model.save_pretrained(folder)
    whisper_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "WhisperTokenizer",
        "bos_token": EOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "unk_token": EOS,
        "model_max_length": 1024,
        "return_attention_mask": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    features = transformers.WhisperFeatureExtractor(feature_size=MEL_BINS).to_dict()
    features.pop("mel_filters", None)
    features["processor_class"] = "WhisperProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(features, default=list, indent=2))
    return folder


@dataclass(frozen=True)
class Heard:
    """What transformers makes of a sound: its tokens with the special ones, and segments as (start, end, text)."""

    language: str
    tokens: tuple[int, ...]
    text: str
    segments: tuple[tuple[float, float, str], ...]


class WhisperOracle:
    """The answers of transformers for a folder of `save_tiny_whisper`, greedy and without a second try."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @torch.inference_mode()
    def hear(
        self,
        sound: np.ndarray,
        *,
        language: str | None = None,
        task: str = "transcribe",
        is_timed: bool = True,
        prompt: str = "",
    ) -> Heard:
        """Write down a sound [samples] of RATE; longer ones than a window need `is_timed`.

        Without `language` it is that which the first window is taken for. `prompt` is text that comes before.
        """
        is_long = len(sound) > WINDOW_SECONDS * RATE
        how = {"truncation": False, "padding": "longest"} if is_long else {}
        features = self.extractor(sound, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **how)
        inputs = {"input_features": features.input_features, "attention_mask": features.attention_mask}
        window = features.input_features[..., : WINDOW_SECONDS * 100]
        detected = int(self.model.detect_language(input_features=window)[0])
        code = language or str(self.tokenizer.id_to_token(detected)).strip("<|>")
        if prompt:
            ids = [IDS["<|startofprev|>"], *self.tokenizer.encode(f" {prompt.strip()}", add_special_tokens=False).ids]
            inputs["prompt_ids"] = torch.tensor(ids)
        found = self.model.generate(
            **inputs,
            language=code,
            task=task,
            return_timestamps=is_timed,
            return_segments=True,
            do_sample=False,
            condition_on_prev_tokens=False,
        )
        segments = []
        if is_timed:
            for each in found["segments"][0]:
                segments.append((float(each["start"]), float(each["end"]), self.text(each["tokens"].tolist())))
        tokens = found["sequences"][0].tolist()
        return Heard(code, tuple(tokens), self.text(tokens), tuple(segments))

    def text(self, tokens: list[int]) -> str:
        """Their text without special tokens and timestamps."""
        return self.tokenizer.decode([token for token in tokens if token < 256])


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Gliding tones with noise and pauses, [seconds x RATE] float32 between -1 and 1, as 16 bit would have them."""
    random = np.random.default_rng(seed)
    count = int(seconds * RATE)
    pieces: list[np.ndarray] = []
    while sum(len(piece) for piece in pieces) < count:
        length = int(random.uniform(0.2, 1.5) * RATE)
        begin, end = random.uniform(80, 4000, 2)
        phase = 2 * np.pi * np.cumsum(np.linspace(begin, end, length)) / RATE
        loudness = random.choice([0.0, 0.1, 0.3, 0.6])
        pieces.append(loudness * np.sin(phase) + random.normal(0, 0.01, length))
    whole = np.concatenate(pieces)[:count]
    return (np.round(whole.clip(-1, 1) * 32767) / 32768).astype(np.float32)
