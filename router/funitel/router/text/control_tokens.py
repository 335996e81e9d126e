"""Encode a rendered chat so that what a client wrote as control tokens is ordinary text.

The template's tokens keep their meaning and everything else is encoded as ever: a second tokenizer over the same model
has secret names for its control tokens, which take the place of the template's tokens in a prompt. No text of a client
can be one of them.
"""

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import tokenizers

from funitel.router.text.control_text import ControlText, any_of

_STRUCTURE = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)  # of tokens that a tokenizer does not call special
_NAME_LENGTH = 12  # of 6400 characters each: not to be guessed


def control_text(tokenizer: tokenizers.Tokenizer, *templates: str | None) -> ControlText:
    """The control tokens of a tokenizer, with the sources of its chat templates.

    An added token that is neither special nor written like one nor known to a template is vocabulary, such as a run of
    spaces or an HTML tag.
    """
    source = "".join(filter(None, templates))
    structure, notation = [], []
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        if len(text.strip()) < 2:
            continue
        if token.special or _STRUCTURE.fullmatch(text):
            structure.append(text)
        elif text in source or _counterpart(text) in source:
            notation.append(text)
    return ControlText(tuple(structure), tuple(notation))


def _counterpart(text: str) -> str:
    """`</think>` for `<think>`, and the other way round."""
    return text.replace("/", "", 1) if text[1:2] == "/" else f"{text[:1]}/{text[1:]}"


@dataclass(frozen=True, slots=True)
class GuardedText:
    """A prompt with secret names in place of its control tokens, to be encoded by the guard's tokenizer."""

    text: str
    _names: Sequence[tuple[int, int, int]]  # where a name begins and ends, and where its token ends in the prompt

    def offsets(self, encoded: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Where tokens begin and end in the prompt, in characters, by where they do in `text`."""
        begins = [begin for begin, _, _ in self._names]
        return [(self._place(start, begins), self._place(stop, begins)) for start, stop in encoded]

    def _place(self, place: int, begins: Sequence[int]) -> int:
        number = bisect_left(begins, place)  # a place where a name begins is not within it
        if number == 0:
            return place
        _, end, original_end = self._names[number - 1]
        return original_end + place - end


class ControlTokenGuard:
    """Encodes prompts of which some spans are ordinary text: `tokenizer` the text of `guarded`, `ids` the result.

    Safe to use from several threads.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, control: ControlText) -> None:
        """Share the model of a tokenizer, or change a copy of it where it makes control tokens of characters."""
        texts = (*control.structure, *control.notation)
        self._names = dict(zip(texts, _secret_names(len(texts)), strict=True))
        self._pattern = any_of(texts)
        self._original = tokenizer
        self._contents = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
        self.tokenizer = self._twin(tokenizer)
        self._ids = {
            new: id
            for id, text in self._contents.items()
            if (new := self.tokenizer.token_to_id(self._names.get(text, text))) is not None
        }
        self.is_always_needed = self._may_normalize_to_control(tokenizer)  # even without plain spans

    def guarded(self, text: str, plain: Sequence[Sequence[int]]) -> GuardedText:
        """Put names for the control tokens of a prompt.

        Args:
            text: the prompt.
            plain: spans of it in characters, in order, that are ordinary text whatever they spell.
        """
        pieces: list[str] = []
        names: list[tuple[int, int, int]] = []
        length = end = 0
        for token in self._template_tokens(text, plain):
            before, name = text[end : token.start()], self._names[token[0]]
            start = length + len(before)
            length, end = start + len(name), token.end()
            pieces += (before, name)
            names.append((start, length, end))
        return GuardedText("".join((*pieces, text[end:])), names)

    def ids(self, encoded: Sequence[int]) -> list[int]:
        """The model's ids of tokens that `tokenizer` made."""
        known = self._ids
        return [known.get(id, id) for id in encoded]

    def _template_tokens(self, text: str, plain: Sequence[Sequence[int]]) -> Iterator[re.Match[str]]:
        """Control tokens outside of all spans."""
        starts = self._normalized_starts(text, plain) if self.is_always_needed else None
        begin = 0
        for start, stop in chain(plain, ((len(text), len(text)),)):
            found = self._pattern.finditer(text, begin, start)
            yield from (token for token in found if starts is None or token.start() in starts)
            begin = stop

    def _normalized_starts(self, text: str, plain: Sequence[Sequence[int]]) -> set[int]:
        """Where the original tokenizer finds them: a normalizer may hide some, as in Llama 2's first files."""
        without = list(text)
        for start, stop in plain:
            without[start:stop] = "\ue000" * (stop - start)
        encoding = self._original.encode("".join(without), add_special_tokens=False)
        contents = self._contents
        tokens = zip(encoding.ids, encoding.offsets, strict=True)
        return {start + text[start:stop].find(contents[id]) for id, (start, stop) in tokens if id in contents}

    def _twin(self, tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        renamed = _renamed_model(tokenizer, self._names)
        if renamed is None:
            twin = tokenizers.Tokenizer(tokenizer.model)
        else:
            twin = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "model": renamed}))
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            setattr(twin, part, getattr(tokenizer, part))
        # New ids begin above all that the tokenizer has, so that `ids` takes no other token for one of these.
        num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
        fillers = _secret_names(num_ids - twin.get_vocab_size())
        twin.add_tokens([tokenizers.AddedToken(filler, normalized=False) for filler in fillers])
        twin.add_tokens(
            [
                tokenizers.AddedToken(
                    self._names.get(token.content, token.content),
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized and self._survives(token.content, tokenizer.normalizer),
                    special=False,
                )
                for _, token in sorted(tokenizer.get_added_tokens_decoder().items())
            ]
        )
        return twin

    def _survives(self, text: str, normalizer: Any) -> bool:
        """Whether the name of a token, if it has one, is in the text that a normalizer makes of it."""
        name = self._names.get(text)
        return name is None or normalizer is None or name in normalizer.normalize_str(name)

    def _may_normalize_to_control(self, tokenizer: tokenizers.Tokenizer) -> bool:
        """Whether a text that no control token is written like may be normalized to one."""
        tokens = tokenizer.get_added_tokens_decoder().values()
        if repr(tokenizer.normalizer) in ("None", "Sequence(normalizers=[])"):
            return False
        return any(token.normalized and token.content in self._names for token in tokens)


def _secret_names(count: int) -> list[str]:
    """So many texts that nothing else contains, of characters that no normalizer changes."""
    return ["".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(_NAME_LENGTH)) for _ in range(count)]


def _renamed_model(tokenizer: tokenizers.Tokenizer, names: Mapping[str, str]) -> dict[str, Any] | None:
    """The model of a tokenizer with other names for some tokens; None where it makes none of them of characters."""
    if not any(tokenizer.model.token_to_id(text) is not None for text in names):
        return None
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    vocab = model["vocab"]
    if model["type"] == "BPE":
        merges = [merge for merge in model["merges"] if names.keys().isdisjoint((*merge, "".join(merge)))]
        if len(merges) == len(model["merges"]) and not model["ignore_merges"]:
            return None
        model["merges"] = merges
    if isinstance(vocab, list):  # Unigram
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    else:
        model["vocab"] = {names.get(text, text): id for text, id in vocab.items()}
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return model
