"""A small random Whisper in Hugging Face layout, with a tokenizer of bytes, and what transformers makes of sounds."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from funitel.model_server.executor.executor import Executor
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.step import (
    MediaInput,
    MediaKind,
    MediaSpan,
    SamplingParams,
    SequenceStart,
    StoppingParams,
    WarmupLimits,
)

NUM_BYTES = 256
LANGUAGES = ("en", "de", "fr")
NAMES = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
IDS = {name: NUM_BYTES + place for place, name in enumerate(NAMES)}
END, START, NO_TIMESTAMPS = IDS["<|endoftext|>"], IDS["<|startoftranscript|>"], IDS["<|notimestamps|>"]
FIRST_TIMESTAMP = NO_TIMESTAMPS + 1
NUM_TIMESTAMPS = 1501
VOCAB_SIZE = FIRST_TIMESTAMP + NUM_TIMESTAMPS
SPACE = 220
# All text but printable ASCII, so that transcripts can be read; and special tokens, as released checkpoints do.
SUPPRESSED = (
    1,
    2,
    7,
    8,
    *range(94, SPACE),
    *range(SPACE + 1, NUM_BYTES),
    START,
    IDS["<|translate|>"],
    IDS["<|startofprev|>"],
    IDS["<|nospeech|>"],
)
RATE = 16_000
NUM_FEATURES = 1500


def save_tiny_whisper(folder: Path, seed: int = 1, *, num_mel_bins: int = 80, **changes: Any) -> Path:
    """Save a random Whisper with weights large enough that its tokens vary; returns `folder`."""
    config = transformers.WhisperConfig(
        vocab_size=VOCAB_SIZE,
        num_mel_bins=num_mel_bins,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=6,
        encoder_ffn_dim=80,
        decoder_ffn_dim=60,
        max_source_positions=1500,
        max_target_positions=64,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **changes,
    )
    torch.manual_seed(seed)
    model = transformers.WhisperForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.add_(noise * 0.2)
            elif "embed_tokens" in name:
                parameter.copy_(noise * 0.08)
                parameter[: END + 1] *= 5  # or timestamps, of which there are many, would be all that it writes
            elif name.endswith("decoder.embed_positions.weight"):
                parameter.copy_(noise * 1.5)
            elif "conv" in name or "encoder.layers" in name:
                parameter.copy_(noise * 0.25)
            elif "encoder.embed_positions" not in name:
                parameter.copy_(noise * 0.4)
    model.generation_config = transformers.GenerationConfig(
        alignment_heads=[[0, 0]],
        begin_suppress_tokens=[SPACE, END],
        bos_token_id=END,
        decoder_start_token_id=START,
        eos_token_id=END,
        is_multilingual=True,
        lang_to_id={f"<|{language}|>": IDS[f"<|{language}|>"] for language in LANGUAGES},
        max_initial_timestamp_index=50,
        max_length=64,
        no_timestamps_token_id=NO_TIMESTAMPS,
        pad_token_id=END,
        prev_sot_token_id=IDS["<|startofprev|>"],
        return_timestamps=False,
        suppress_tokens=list(SUPPRESSED),
        task_to_id={"transcribe": IDS["<|transcribe|>"], "translate": IDS["<|translate|>"]},
    )
    model.save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "tokenizer_class": "WhisperTokenizer"})
    )
    transformers.WhisperFeatureExtractor(feature_size=num_mel_bins).save_pretrained(folder)
    return folder


def _tokenizer() -> Tokenizer:
    """Every byte a token, then the special tokens, then timestamps, which are not special in Whisper's either."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    times = [f"<|{place * 0.02:.2f}|>" for place in range(NUM_TIMESTAMPS)]
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in times])
    return tokenizer


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Tones that come and go, and noise: [seconds * RATE] float32 within -1..1."""
    noise = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tones = sum(
        np.sin(2 * np.pi * pitch * times) * np.sin(2 * np.pi * beat * times) ** 2
        for pitch, beat in zip(noise.uniform(80, 4000, 5), noise.uniform(0.1, 2, 5), strict=True)
    )
    found: np.ndarray = (tones / 6 + noise.normal(0, 0.02, len(times))).astype(np.float32).clip(-1, 1)
    return found


def mel_of(folder: Path, samples: np.ndarray, **how: Any) -> torch.Tensor:
    """Features by transformers: [1, mel bins, frames], padded to 30 s where `how` says nothing."""
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    mel: torch.Tensor = extractor(samples, sampling_rate=RATE, return_tensors="pt", **how).input_features
    return mel


def load_whisper(folder: Path) -> Any:
    """The model by transformers, in float32."""
    return transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def generate(folder: Path, mel: torch.Tensor, num_opening: int, **how: Any) -> list[int]:
    """The completion of one sound by transformers, behind so many tokens of the decoder, up to its end."""
    model = load_whisper(folder)
    with torch.inference_mode():
        found = model.generate(
            mel,
            do_sample=False,
            num_beams=1,
            force_unique_generate_call=True,
            return_dict_in_generate=True,
            **how,
        )
    ids: list[int] = found["sequences"][0].tolist()[num_opening:]
    return ids[: ids.index(END) + 1] if END in ids else ids


# On a shard


BLOCK_SIZE = 16
BLOCKS_EACH = -(-(NUM_FEATURES + 64) // BLOCK_SIZE)


def whisper_executor(folder: Path, **settings: Any) -> Executor:
    """Load and warm up one rank, with a pool for eight sequences."""
    chosen = {"device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "num_threads": 1} | settings
    executor, _ = load_generator(ModelServerSettings(model_id=str(folder), **chosen), folder)
    warm = SequenceStart(
        request_id=0, sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=1), inputs="x" * 20
    )
    executor.warmup([warm], WarmupLimits(max_prefill_tokens=2000, max_batch_total_tokens=8 * BLOCKS_EACH * BLOCK_SIZE))
    return executor


def hear(executor: Executor, mel: torch.Tensor) -> bytes:
    """Have a sound encoded; returns its key."""
    values = mel[0].numpy().astype("<f4").tobytes()
    key = hashlib.sha256(values).digest()
    shape = tuple(mel.shape[1:])
    media = MediaInput(key=key, kind=MediaKind.AUDIO, shape=shape, values=values, num_features=NUM_FEATURES)
    executor.encode_media(media).result()
    return key


def transcription(
    request_id: int, key: bytes, opening: Sequence[int], max_new_tokens: int = 448, **sampling: Any
) -> SequenceStart:
    """A sequence that hears a sound, with blocks of its own, picked by its id."""
    first = 1 + BLOCKS_EACH * (request_id % 8)
    return SequenceStart(
        request_id=request_id,
        input_ids=(*(END,) * NUM_FEATURES, *opening),
        sampling=SamplingParams(**sampling),
        stopping=StoppingParams(max_new_tokens=max_new_tokens),
        blocks=tuple(range(first, first + BLOCKS_EACH)),
        media=(MediaSpan(key, 0, NUM_FEATURES),),
    )
