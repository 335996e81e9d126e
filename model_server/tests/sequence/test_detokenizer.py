"""Detokenizing token by token never splits a character and loses nothing; stops are found wherever they lie."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funitel.model_server.sequence.detokenizer import Detokenizer, StopMatcher, TextCodec
from funitel.proto.errors import WeightsError
from funitel_testing.tiny import EOS, save_tokenizer


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return TextCodec(folder)


@pytest.fixture(scope="session")
def demo_codec(demo_model: Path) -> TextCodec:
    return TextCodec(demo_model)


def pieces_of(codec: TextCodec, text: str) -> list[str]:
    detokenizer = Detokenizer(codec, codec.encode("prompt", add_special_tokens=False))
    pieces = [detokenizer.push(token_id) for token_id in codec.encode(text, add_special_tokens=False)]
    tail = detokenizer.flush()
    assert detokenizer.text == "".join(pieces) + tail
    assert tail == ""
    return pieces


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=40))
def test_pieces_join_to_the_text_and_hold_whole_characters(codec: TextCodec, text: str) -> None:
    if "<" in text:  # could spell an added token
        return
    pieces = pieces_of(codec, text)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize(
    "text", ["naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦 family", "x = 10\n\ty", " leading", "مرحبا"]
)
def test_the_demo_tokenizer_streams_whole_characters(demo_codec: TextCodec, text: str) -> None:
    assert "".join(pieces_of(demo_codec, text)) == text


def test_an_incomplete_character_comes_out_at_the_end(codec: TextCodec) -> None:
    ids = codec.encode("a€", add_special_tokens=False)
    detokenizer = Detokenizer(codec, [])
    assert [detokenizer.push(token_id) for token_id in ids[:-1]] == ["a", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.text == "a\ufffd"


def test_a_special_token_flushes_and_stays_out_of_the_text(codec: TextCodec) -> None:
    end = codec.token_id(EOS)
    assert end is not None
    detokenizer = Detokenizer(codec, [])
    euro = codec.encode("€", add_special_tokens=False)
    assert [detokenizer.push(i) for i in (euro[0], end, euro[0], euro[1], euro[2])] == [
        "",
        "\ufffd" + EOS,
        "",
        "",
        "€",
    ]
    assert detokenizer.text == "\ufffd€"


def test_resuming_gives_the_same_pieces(codec: TextCodec) -> None:
    ids = codec.encode("a€b", add_special_tokens=False)
    whole = Detokenizer(codec, [])
    expected = [whole.push(i) for i in ids]
    for cut in range(len(ids)):
        resumed = Detokenizer(codec, [])
        for i in ids[:cut]:
            resumed.push(i)
        assert [resumed.push(i) for i in ids[cut:]] == expected[cut:]


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
)
def test_stops_are_found_where_a_naive_search_of_the_whole_text_finds_them(stops: list[str], pieces: list[str]) -> None:
    matcher, text, found = StopMatcher(stops), "", None
    for piece in pieces:
        text += piece
        found = matcher.search(text)
        naive = sorted((text.find(stop), text.find(stop) + len(stop)) for stop in stops if stop in text)
        if naive:
            assert found is not None
            assert (found.start, found.end) == naive[0]
            assert text[found.start : found.end] == stops[found.index]
            return
        assert found is None


def test_a_special_token_can_be_a_stop() -> None:
    matcher = StopMatcher([EOS])
    assert matcher.search("text") is None
    match = matcher.search("text", special=EOS)
    assert match is not None
    assert (match.start, match.end) == (4, 4)


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no tokenizer\.json"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsError, match="not a readable tokenizer"):
        TextCodec(tmp_path)
