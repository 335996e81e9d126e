"""Tokenizers of every kind, trained on a few sentences."""

import json
from collections.abc import Callable, Mapping
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The sea is deep, and the sea is blue; birds fly over it slowly.\n\nIt's 1234 o'clock: don't fly at 10.5 km/h!",
    "def depth(sea):\n    return sea.depth * 2  # twice\n\n\tif not sea:\n\t\traise ValueError('no sea')",
    "Les oiseaux volent à l'été, où la mer est bleue. 海は深い。鳥は飛ぶ。 Море синее.",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|start|>", "<|end|>"]


def _trained(tokenizer: Tokenizer, **options: object) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False, **options)
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    return tokenizer


def _byte_level(*before: pre_tokenizers.PreTokenizer, use_regex: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def _llama2() -> Tokenizer:
    """One piece, blanks as ▁, bytes for what is unknown, and a token before."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trained = _trained(tokenizer)
    vocabulary = trained.get_vocab()
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    merges = [merge for merge in _merges(trained) if "".join(merge) in vocabulary]
    found = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<0x00>")
    )
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.add_special_tokens(SPECIAL)
    start = vocabulary["<|start|>"]
    found.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", start)])
    return found


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def _words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _normalized() -> Tokenizer:
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _without_some_bytes() -> Tokenizer:
    """As published tokenizers may be: bytes that were not in their corpus are dropped."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _trained(tokenizer, initial_alphabet=[])


MAKE: Mapping[str, Callable[[], Tokenizer]] = {
    "gpt2": _byte_level,
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "llama3": lambda: _byte_level(pre_tokenizers.Split(Regex(LLAMA3), "isolated"), use_regex=False),
    "dropping": _without_some_bytes,
    "nfc": _normalized,
    "llama2": _llama2,
    "wordpiece": _words,
    "unigram": _unigram,
}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """The tokenizer of a kind; do not change it."""
    return MAKE[kind]()
