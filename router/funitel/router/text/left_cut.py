"""Cut a long text from the left where only its last tokens are wanted, without changing those tokens.

The cut lies between a letter or digit and a blank. Encoding is independent on both sides of such a boundary where no
vocabulary entry spans it and the pre-tokenizer splits there whatever is around; `can_cut` checks both.
"""

import json
import re
from itertools import product

import tokenizers

from funitel.router.text.token_bound import parts_of

CHARACTERS_PER_TOKEN = 8
SLACK_TOKENS = 64
_SEARCHED_CHARACTERS = 4096  # before the place of a cut, for boundaries

_BOUNDARY = re.compile(r"(?<=[A-Za-z0-9]) (?=[A-Za-z])")
_SPANS_BOUNDARY = re.compile(r"[A-Za-z0-9][ Ġ▁]")
_NORMALIZERS = ("Prepend", "Replace", "NFC", "NFD", "NFKC", "NFKD", "Lowercase")
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation")
_SAMPLES = "aA1 \n.'é中"  # one character of each class that split patterns distinguish


def can_cut(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether `find_cut` is right for a tokenizer: BPE without tokens or pieces that span a boundary."""
    described = json.loads(tokenizer.to_str())
    pre_tokenizers = parts_of(described["pre_tokenizer"], "pretokenizers")
    types = {part["type"] for part in pre_tokenizers}
    return (
        described["model"]["type"] == "BPE"
        and all(part["type"] in _NORMALIZERS for part in parts_of(described["normalizer"], "normalizers"))
        and types <= {*_PRE_TOKENIZERS}
        and not any("(?<" in json.dumps(part.get("pattern")) for part in pre_tokenizers)
        and not any(token["rstrip"] and token["content"][-1:].isalnum() for token in described["added_tokens"])
        and not any(_SPANS_BOUNDARY.search(entry) for entry in tokenizer.get_vocab())
        and (types <= {"Metaspace"} or _splits_at_boundaries(tokenizer))
    )


def find_cut(text: str, num_tokens: int) -> tuple[int, int]:
    """Return where to cut a text of which about `num_tokens` are wanted, and how many tokens to leave unused there.

    The cut is 0 where there is no boundary, or nothing to gain.
    """
    end = max(0, len(text) - (num_tokens + SLACK_TOKENS) * CHARACTERS_PER_TOKEN)
    found = list(_BOUNDARY.finditer(text, max(0, end - _SEARCHED_CHARACTERS), end))
    if len(found) < 2:
        return 0, 0
    cut, settled = found[-2].start(), found[-1].start()  # the first piece of a text may be encoded otherwise
    return cut, len(text[cut:settled].encode()) + 2


def _splits_at_boundaries(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the pieces right of a boundary are those of the right side alone, for samples of all classes."""
    pre_tokenize = tokenizer.pre_tokenizer.pre_tokenize_str

    def pieces(text: str) -> list[str]:
        return [piece for piece, _ in pre_tokenize(text)]

    lefts = [before + last for before in ("", *_SAMPLES) for last in "aA1"]
    rights = [f" {letter}{after}{more}" for letter in "aA" for after, more in product(_SAMPLES, ("", *_SAMPLES))]
    alone = {text: pieces(text) for text in (*lefts, *rights)}
    return all(pieces(left + right)[len(alone[left]) :] == alone[right] for left in lefts for right in rights)
