"""Which tokens of a text are scored, and with which context: against plain loops over the tokens."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.tools.perplexity.subject import pieces_of
from funitel.model_server.tools.perplexity.windows import TokenizedText, windows_of
from funitel.proto.errors import SettingsError


def oracle(num_tokens: int, window: int, stride: int) -> dict[int, int]:
    """The first token of the context of each scored token, by the rule as the documentation has it."""
    found: dict[int, int] = {}
    for begin in range(0, num_tokens, stride):
        end = min(begin + window, num_tokens)
        for token in range(begin + 1, end):
            found.setdefault(token, begin)  # what a window has scored, later ones do not
        if end == num_tokens:
            break
    return found


@pytest.mark.parametrize(
    ("num_tokens", "window", "stride"),
    [(1, 4, 4), (2, 4, 4), (4, 4, 4), (5, 4, 4), (6, 4, 4), (23, 8, 8), (23, 8, 3), (24, 8, 7), (9, 8, 1), (8, 8, 2)],
)
def test_tokens_are_scored_once_and_with_their_context(num_tokens: int, window: int, stride: int) -> None:
    text = TokenizedText(list(range(num_tokens)), np.ones(num_tokens, dtype=np.int64))
    found: dict[int, int] = {}
    for each in windows_of(text, window, stride):
        assert len(each.ids) <= window
        scored = each.ids[each.num_context :]
        assert each.num_bytes == len(scored) > 0
        for token in scored:
            assert token not in found
            found[token] = each.ids[0]
    assert found == oracle(num_tokens, window, stride)
    if stride < window:
        assert sorted(found) == list(range(1, num_tokens))


@pytest.mark.parametrize(
    ("num_tokens", "window", "stride"), [(1, 4, 4), (2, 4, 4), (6, 4, 4), (7, 4, 4), (23, 8, 8), (23, 8, 3), (9, 2, 1)]
)
def test_every_window_begins_with_the_tokens_that_begin_every_text(num_tokens: int, window: int, stride: int) -> None:
    sizes = np.ones(1 + num_tokens, dtype=np.int64)
    sizes[0] = 0
    found: dict[int, int] = {}
    for each in windows_of(TokenizedText([99, *range(num_tokens)], sizes, 1), window, stride):
        assert each.ids[0] == 99
        assert len(each.ids) <= window
        assert each.num_context >= 1
        scored = each.ids[each.num_context :]
        assert each.num_bytes == len(scored)
        found |= {token: each.ids[1] for token in scored if token not in found}
    assert list(found) == list(range(num_tokens))
    room = window - 1
    expected: dict[int, int] = {}
    for begin in range(0, num_tokens, min(stride, room)):
        for token in range(begin, min(begin + room, num_tokens)):
            expected.setdefault(token, begin)
    assert found == expected


def test_a_window_needs_room_behind_the_tokens_that_begin_every_text() -> None:
    text = TokenizedText([98, 99, 1], np.ones(3, dtype=np.int64), 2)
    with pytest.raises(SettingsError, match="--window 2 has no room behind the 2 tokens"):
        list(windows_of(text, 2, 2))
    assert list(windows_of(text.cut(2), 3, 3)) == []


@pytest.mark.parametrize(("length", "num_context"), [(2, 1), (9, 1), (9, 4), (9, 8)])
def test_pieces_have_logits_for_the_scored_tokens(
    length: int, num_context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.model_server.tools.perplexity.subject.max_scored_tokens", lambda size: 3)
    pieces = list(pieces_of(length, num_context, 100))
    computed = [token for begin, end, _ in pieces for token in range(begin, end)]
    assert computed == list(range(length - 1))
    scored = [token + 1 for begin, end, wanted in pieces for token in range(begin, end) if wanted == "all"]
    assert scored == list(range(num_context, length))
    assert all(end - begin <= 3 for begin, end, wanted in pieces if wanted == "all")


def test_bytes_of_tokens_are_those_of_the_text(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<s>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "a naïve € 🙂\n"
    found = TokenizedText.of(TextCodec(tmp_path), text)
    num_bytes = len(text.encode())
    assert len(found.ids) == 1 + num_bytes
    assert found.sizes[0] == 0  # of the token that the tokenizer adds
    assert found.sizes.sum() == num_bytes
    assert found.sizes[:4].tolist() == [0, 1, 1, 1]
    assert found.num_opening == found.cut(4).num_opening == 1
    assert found.cut(4).sizes.sum() == 3
