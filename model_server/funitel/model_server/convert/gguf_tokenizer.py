"""Rebuild a model's tokenizer from the metadata of its GGUF file.

The file decides: which algorithm, which pre-tokenizer, which tokens are parsed in text, whether a prompt
starts with BOS. Nothing is guessed from the architecture; a rule with no row here is refused.
Source: the `tokenizer.ggml.*` keys of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import logging
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from funitel.model_server.convert.gguf_reader import GgufFile
from funitel.model_server.convert.hf_folder import sentencepiece_bpe
from funitel.proto.errors import UnsupportedModel, WeightsError

logger = logging.getLogger(__name__)

MAX_TOKEN_CHARACTERS = 1 << 10
"""Longest token; those of real vocabularies have some two hundred characters, most of them spaces."""


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text into words before merging, and what goes with it.

    `patterns` cut one after the other; none is GPT-2's own. `compose` normalises text to NFC. `ignore_merges` takes a
    word that is a token as it is. `add_bos_token` stands in for files that do not say.
    """

    patterns: tuple[str, ...] = ()
    split_digits: bool = False
    compose: bool = False
    ignore_merges: bool = False
    add_bos_token: bool = False


def _llama3_pattern(numbers: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased_pattern(ending: str, numbers: str) -> str:
    """Words by what is written large in them, capitals alone or first, each with `ending`."""
    before, large, small = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = f"{before}{large}*{small}+{ending}|{before}{large}+{small}*{ending}"
    return words + "|" + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_UP_TO_THREE = r"\p{N}{1,3}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Runs of anything but blanks, brackets, bars and the marks that end a part of a sentence, of several scripts.
_BLOOM_PATTERN = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_GPT2 = PreTokenizer()
_NEOX = PreTokenizer(compose=True)
_SINGLE_DIGITS = PreTokenizer(split_digits=True)
_CL100K = PreTokenizer(patterns=(_llama3_pattern(_UP_TO_THREE),))
_LLAMA3 = PreTokenizer(patterns=(_llama3_pattern(_UP_TO_THREE),), ignore_merges=True, add_bos_token=True)
_QWEN2 = PreTokenizer(patterns=(_llama3_pattern(r"\p{N}"),), compose=True)

_CASED = (  # letters of scripts that have capitals
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-"
    "\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e"
    "\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_CJK = "\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff"
_KANA = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
_ASCII_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3_WORDS = _ASCII_WORD + (
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SEED_WORDS = _llama3_pattern(r"\p{N}").replace(r"+[\r\n]*|", r"+|").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{N}\r\n]")
_BAILING_WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_QWEN35_WORDS = (
    _llama3_pattern(r"\p{N}").replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
)


def _kimi_pattern() -> str:
    large, small = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in ("Lu}\\p{Lt", "Ll"))
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{large}*{small}+{_CONTRACTION}|{before}{large}+{small}*{_CONTRACTION}"
    return rf"[\p{{Han}}]+|{words}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_DEEPSEEK_LLM = PreTokenizer(
    patterns=(r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_MARKS}]+", r"\s+$", f"[{_CJK}]+", r"\p{N}+")
)
_DEEPSEEK_CODER = PreTokenizer(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{_CJK}]+", r"\p{N}"))
_DEEPSEEK_V3 = PreTokenizer(patterns=(_UP_TO_THREE, f"[{_KANA}]+", _DEEPSEEK3_WORDS))
_FALCON = PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]"))
_GPT4O = PreTokenizer(patterns=(_cased_pattern(_CONTRACTION, _UP_TO_THREE),))
_BLOOM = PreTokenizer(patterns=(_BLOOM_PATTERN,))
_ONE_DIGIT = PreTokenizer(patterns=(_llama3_pattern(r"\p{N}"),))
_BAILING = PreTokenizer(patterns=(_BAILING_WORDS,))

# Source: the patterns of each family's published tokenizer.json; the names are llama.cpp's.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "a.x-4.0": _GPT2,
    "bailingmoe": _BAILING,
    "bailingmoe2": _BAILING,
    "bloom": _BLOOM,
    "chatglm-bpe": _CL100K,
    "codeshell": _SINGLE_DIGITS,
    "command-r": PreTokenizer(split_digits=True, compose=True),
    "dbrx": _CL100K,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": _DEEPSEEK_V3,
    "default": _GPT2,
    "exaone": _SINGLE_DIGITS,
    "exaone4": _GPT2,
    "falcon": _FALCON,
    "falcon-h1": _LLAMA3,
    "falcon3": _LLAMA3,
    "gigachat": _GPT2,
    "glm4": _CL100K,
    "gpt-2": _GPT2,
    "gpt-4o": _GPT4O,
    "gpt3-finnish": _BLOOM,
    "granite-docling": _GPT2,
    "grok-2": _ONE_DIGIT,
    "hunyuan": _ONE_DIGIT,
    "hunyuan-dense": _DEEPSEEK_V3,
    "jais": _GPT2,
    "joyai-llm": _DEEPSEEK_V3,
    "kanana2": _GPT4O,
    "kimi-k2": PreTokenizer(patterns=(_kimi_pattern(),)),
    "kormo": _ONE_DIGIT,
    "lfm2": _LLAMA3,
    "llada-moe": _BAILING,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "llama4": _GPT4O,
    "megrez": _ONE_DIGIT,
    "mellum": _GPT2,
    "mellum2": _SINGLE_DIGITS,
    "midm-2.0": _LLAMA3,
    "minerva-7b": _SINGLE_DIGITS,
    "minimax-m2": _GPT4O,
    "modern-bert": _GPT2,
    "mpt": _NEOX,
    "olmo": _NEOX,
    "phi-2": _GPT2,
    "pixtral": _LLAMA3,
    "poro-chat": _BLOOM,
    "qwen2": _QWEN2,
    "qwen35": PreTokenizer(patterns=(_QWEN35_WORDS,)),
    "refact": _SINGLE_DIGITS,
    "seed-coder": PreTokenizer(patterns=(_SEED_WORDS,)),
    "smaug-bpe": _CL100K,
    "smollm": _SINGLE_DIGITS,
    "solar-open": _ONE_DIGIT,
    "stablelm2": _QWEN2,
    "starcoder": _SINGLE_DIGITS,
    "superbpe": PreTokenizer(patterns=(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "tekken": PreTokenizer(patterns=(_cased_pattern("", r"\p{N}"),), ignore_merges=True, add_bos_token=True),
    "trillion": _GPT2,
    "viking": PreTokenizer(patterns=(_BLOOM_PATTERN, r"\p{N}")),
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A rebuilt tokenizer and the entries of its tokenizer_config.json."""

    tokenizer: Tokenizer
    settings: dict[str, object]


def build_tokenizer(gguf: GgufFile) -> GgufTokenizer:
    """Build the tokenizer a GGUF file describes.

    Raises: `UnsupportedModel` for an algorithm or pre-tokenizer without a rule, `WeightsError` for damage.
    """
    model = gguf.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(gguf)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(gguf)
    else:
        raise UnsupportedModel(f"{gguf.path}: tokenizer {model} is not supported; supported: gpt2, llama")
    _add_tokens(tokenizer, gguf)
    adds_bos = gguf.flag("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = gguf.flag("tokenizer.ggml.add_eos_token", False)
    _add_template(tokenizer, gguf, adds_bos, adds_eos)
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.integer(gguf.key("context_length")),
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
    }
    for name in ("bos", "eos", "unk", "pad"):
        token = _special_token(gguf, name)
        if token is not None:
            settings[f"{name}_token"] = token
    if "tokenizer.chat_template" in gguf.metadata:
        settings["chat_template"] = gguf.text("tokenizer.chat_template")
    return GgufTokenizer(tokenizer, settings)


def special_token_id(gguf: GgufFile, name: str) -> int | None:
    """Return the id of the `bos`, `eos`, `eot`, `eom`, `unk` or `pad` token, None if the file names none."""
    key = {"unk": "unknown", "pad": "padding"}.get(name, name)
    key = f"tokenizer.ggml.{key}_token_id"
    return gguf.integer(key) if key in gguf.metadata else None


def _special_token(gguf: GgufFile, name: str) -> str | None:
    token_id = special_token_id(gguf, name)
    if token_id is None:
        return None
    tokens = _tokens(gguf)
    if not 0 <= token_id < len(tokens):
        raise WeightsError(f"{gguf.path}: {name} token id {token_id} is outside the {len(tokens)} tokens")
    return str(tokens[token_id])


def _byte_level(gguf: GgufFile) -> tuple[Tokenizer, bool]:
    """Byte-level BPE by ranked merges; also whether BOS is added when the file does not say."""
    if "tokenizer.ggml.pre" not in gguf.metadata:
        logger.warning("gguf=%s names no pre-tokenizer, taking gpt-2's", gguf.path)
    name = gguf.text("tokenizer.ggml.pre", "default")
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        supported = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModel(f"{gguf.path}: pre-tokenizer {name} is not supported; supported: {supported}")
    vocab = _vocab(gguf)
    merges = [_merge(gguf, merge, vocab) for merge in gguf.items("tokenizer.ggml.merges", str)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges))
    if rule.compose:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rule.split_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.patterns))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos_token


def _merge(gguf: GgufFile, merge: str, vocab: dict[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise WeightsError(f"{gguf.path}: merge {merge!r} is not made of the file's tokens")
    return left, right


def _sentencepiece(gguf: GgufFile) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE by scores; also whether BOS is added when the file does not say."""
    tokens, types = _tokens(gguf), _token_types(gguf)
    scores = gguf.items("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise WeightsError(f"{gguf.path}: {len(scores)} token scores for {len(tokens)} tokens")
    rows = zip(tokens, scores, types, strict=True)
    score_of = {token: score for token, score, kind in rows if kind == TokenType.NORMAL}
    adds_space = gguf.flag("tokenizer.ggml.add_space_prefix", True)
    return sentencepiece_bpe(score_of, tokens, unknown=_special_token(gguf, "unk"), adds_space=adds_space), True


def _tokens(gguf: GgufFile) -> list[str]:
    """Tokens by their ids."""
    tokens = gguf.items("tokenizer.ggml.tokens", str)
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise WeightsError(f"{gguf.path}: a token has {longest} characters, at most {MAX_TOKEN_CHARACTERS} are read")
    return tokens


def _vocab(gguf: GgufFile) -> dict[str, int]:
    """Token to id; of a token listed twice the first id counts."""
    tokens = _tokens(gguf)
    return {token: token_id for token_id, token in reversed(list(enumerate(tokens)))}


def _token_types(gguf: GgufFile) -> list[int]:
    tokens, types = _tokens(gguf), gguf.items("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise WeightsError(f"{gguf.path}: {len(types)} token types for {len(tokens)} tokens")
    return types


def _add_tokens(tokenizer: Tokenizer, gguf: GgufFile) -> None:
    """Have control and user-defined tokens parsed in text; only the former stay out of decoded text."""
    for token, kind in zip(_tokens(gguf), _token_types(gguf), strict=True):
        if kind in (TokenType.UNKNOWN, TokenType.CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _add_template(tokenizer: Tokenizer, gguf: GgufFile, adds_bos: bool, adds_eos: bool) -> None:
    """Put BOS before and EOS after each text, as the file wants."""
    ends: dict[str, str | None] = {
        "bos": _special_token(gguf, "bos") if adds_bos else None,
        "eos": _special_token(gguf, "eos") if adds_eos else None,
    }
    for name, wanted in (("bos", adds_bos), ("eos", adds_eos)):
        if wanted and ends[name] is None:
            raise WeightsError(f"{gguf.path}: {name} is to be added but the file names no {name} token")
    if not any(ends.values()):
        return

    def around(sequence: str, type_id: int) -> list[str]:
        pieces = [ends["bos"], sequence, ends["eos"]]
        return [f"{piece}:{type_id}" for piece in pieces if piece is not None]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=around("$A", 0),
        pair=around("$A", 0) + around("$B", 1),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in set(ends.values()) if token is not None],
    )
