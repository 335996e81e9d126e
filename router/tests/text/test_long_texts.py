"""Long texts: bounds that are proven, cuts that change no token, and processes with limits."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes import byte_tokenizer, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import CORPUS, MAKE, tokenizer_of

from funitel.proto.errors import InvalidRequest, Overloaded
from funitel.router.core.journal import KeptJournal
from funitel.router.core.request_context import request_context
from funitel.router.text import encode, encode_pool
from funitel.router.text.encode import EncodeCalls
from funitel.router.text.encode_pool import BRIEF_CHARACTERS, SHORT_CHARACTERS
from funitel.router.text.left_cut import can_cut, find_cut
from funitel.router.text.token_bound import TokenBound
from funitel.router.text.tokenizer import Tokenizer, TooManyTokens

HAS_BOUND = {"dropping", "gpt2", "smollm", "llama3", "nfc", "llama2"}
PIECES = st.sampled_from([*"aA1 \n\t.,'é中́~", "the sea", " is", "birds", "  ", "<|end|>", "12", "\x04~Z7", *CORPUS])
TEXTS = st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=80)


def count(kind: str, text: str) -> int:
    return len(tokenizer_of(kind).encode(text, add_special_tokens=False))


@pytest.mark.parametrize("kind", MAKE)
def test_a1_a_bound_is_where_it_is_proven(kind: str) -> None:
    assert (TokenBound.of(tokenizer_of(kind)) is not None) == (kind in HAS_BOUND)


@pytest.mark.parametrize("kind", sorted(HAS_BOUND))
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, limit=st.integers(0, 40))
def test_a1_no_text_that_fits_is_refused_by_its_length(kind: str, text: str, limit: int) -> None:
    bound = TokenBound.of(tokenizer_of(kind))
    assert bound is not None
    beyond = bound.tokens_beyond(text, limit)
    assert beyond is None or limit < beyond <= count(kind, text)


def test_a1_digits_and_letters_that_cannot_fit_are_refused_by_their_length() -> None:
    bound = TokenBound.of(tokenizer_of("smollm"))
    assert bound is not None
    assert bound.tokens_beyond("1" * 1000, 999) == 1000, "each digit is a token"
    assert bound.tokens_beyond("1 " * 1000, 999) == 1000
    assert bound.tokens_beyond("a" * 10_000, 300) is not None
    assert bound.tokens_beyond(" " * 10_000, 10_000) is None
    assert bound.tokens_beyond("a" * 300, 300) is None


@pytest.mark.parametrize(
    ("kind", "expected"), [("wordpiece", False), ("unigram", False), *[(kind, True) for kind in sorted(HAS_BOUND)]]
)
def test_a1_texts_are_cut_for_tokenizers_that_split_at_boundaries(kind: str, expected: bool) -> None:
    assert can_cut(tokenizer_of(kind)) == expected


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("special", [False, True])
@settings(max_examples=25, deadline=None)
@given(pieces=st.lists(PIECES, min_size=5, max_size=40), keep_last=st.integers(1, 60))
def test_a1_the_last_tokens_are_those_of_the_whole_text(
    kind: str, special: bool, pieces: list[str], keep_last: int
) -> None:
    text = "".join(pieces) * 40
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "MIN_CUT_CHARACTERS", 0)
        patch.setattr("funitel.router.text.left_cut.SLACK_TOKENS", 0)
        patch.setattr("funitel.router.text.left_cut.CHARACTERS_PER_TOKEN", 2)
        found = EncodeCalls(tokenizer_of(kind)).prompt(text, special, None, 1000, keep_last)
    assert found == tokenizer_of(kind).encode(text, add_special_tokens=special).ids[-keep_last:]


def test_a1_a_cut_leaves_most_of_a_long_text_out() -> None:
    text = CORPUS[0] * 2000
    cut, _ = find_cut(text, 50)
    assert len(text) - cut < 10_000
    assert find_cut("1" * 200_000, 50) == (0, 0), "digits have no boundary"


# In processes


@pytest.fixture
async def tokenizer(tmp_path: Path) -> AsyncIterator[Tokenizer]:
    found = Tokenizer.load(str(write_model(tmp_path)), None, 2, has_several_keys=True)
    yield found
    await found.close()


LONG = "The sea is deep, é. " * 2000


async def test_a1_a_long_text_is_encoded_in_a_process_as_a_short_one_in_a_thread(tokenizer: Tokenizer) -> None:
    whole = byte_tokenizer().encode(LONG)
    assert len(LONG) > SHORT_CHARACTERS
    assert list(await tokenizer.encode(LONG)) == whole.ids
    assert list(await tokenizer.encode(LONG, keep_last=7)) == whole.ids[-7:]
    assert await tokenizer.count(LONG) == len(whole.ids) - 1, "without the special token"
    rows = json.loads(await tokenizer.listed(LONG))
    assert [row["id"] for row in rows] == whole.ids
    assert rows[-1]["stop"] == len(LONG.encode())
    assert len(tokenizer.pool._processes._processes) == 1


async def test_a1_a_text_with_too_many_tokens_is_refused_with_their_number(tokenizer: Tokenizer) -> None:
    with pytest.raises(TooManyTokens) as caught:
        await tokenizer.encode("é" * 30_000, max_tokens=50_000)
    assert (caught.value.words, caught.value.is_exact) == ("60001", True)
    with pytest.raises(TooManyTokens) as caught:
        await tokenizer.encode("1" * 30_000, max_tokens=20_000)
    assert caught.value.words == "at least 30000"


async def test_a1_the_loop_goes_on_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    await tokenizer.encode(LONG)  # the process is there
    work = asyncio.create_task(tokenizer.encode("sea" * 600_000, max_tokens=10**6, keep_last=5))
    used, gaps = time.process_time(), 0
    while not work.done():
        await asyncio.sleep(0.001)
        gaps += 1
    assert len(await work) == 5
    assert gaps > 20
    assert time.process_time() - used < 0.5, "another process did the work"


async def test_a1_a_text_that_takes_too_much_is_refused_and_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_pool, "CPU_LIMIT_SECONDS", 0.05)
    tokenizer = Tokenizer.load(str(write_model(tmp_path)), None, 1)
    with request_context("1") as context:
        with pytest.raises(
            InvalidRequest, match="^`inputs` cannot be tokenized: it takes more than 0.05 s of processor"
        ):
            await tokenizer.encode("sea" * 600_000, keep_last=5)
    assert context.encoded_tokens == 450_000
    assert len(await tokenizer.encode(LONG, max_tokens=10**6)) > 0, "the next one gets a process"
    await tokenizer.close()


async def test_a1_what_is_encoded_counts_for_its_key(tokenizer: Tokenizer) -> None:
    with request_context("1") as context:
        await tokenizer.encode("short")
        assert context.encoded_tokens == 0
        num_tokens = len(await tokenizer.encode(LONG))
        assert context.encoded_tokens == num_tokens
        with pytest.raises(TooManyTokens):
            await tokenizer.encode("1" * 30_000, max_tokens=20_000)
        assert context.encoded_tokens == num_tokens + 30_000


async def encoding_for(tokenizer: Tokenizer, owner: bytes, text: str = LONG) -> None:
    with request_context("1") as context:
        context.owner = owner
        try:
            await tokenizer.encode(text, max_tokens=10**7)
        except Overloaded:
            assert context.encoded_tokens == 0, "a key is not charged for what nothing was done for"
            raise


async def test_a1_a_key_with_many_long_texts_leaves_a_process_to_others(tokenizer: Tokenizer) -> None:
    many = [asyncio.create_task(encoding_for(tokenizer, b"a", LONG * 10)) for _ in range(12)]
    await asyncio.sleep(0)
    await encoding_for(tokenizer, b"b")
    assert sum(task.done() for task in many) < 12
    await asyncio.gather(*many)


async def test_a1_a_key_with_too_much_that_waits_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_pool, "MAX_WAITING_CHARACTERS", 3 * len(LONG))
    many = [asyncio.create_task(encoding_for(tokenizer, b"a")) for _ in range(8)]
    results = await asyncio.gather(*many, encoding_for(tokenizer, b"b"), return_exceptions=True)
    assert [isinstance(result, Overloaded) for result in results] == [False] * 3 + [True] * 5 + [False]


async def test_a1_what_another_router_has_admitted_is_not_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_pool, "MAX_WAITING_CHARACTERS", 0)
    with request_context("id") as context:
        context.journal = KeptJournal("a", {}, lambda _: None, is_replayed=True)
        await tokenizer.count(LONG, "inputs")
        context.journal = KeptJournal("a", {}, lambda _: None)
        with pytest.raises(Overloaded):
            await tokenizer.count(LONG, "inputs")


async def test_a1_texts_of_clients_that_leave_take_no_process_from_others(tokenizer: Tokenizer) -> None:
    """A text that a process works on is encoded to its end; those that wait are withdrawn."""
    await encoding_for(tokenizer, b"a")
    gone = [asyncio.create_task(encoding_for(tokenizer, b"a", LONG * 20)) for _ in range(12)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    assert all(task.cancelled() for task in gone)
    assert len(tokenizer.pool._processes._waiting) == 0
    assert not tokenizer.pool._waiting_characters
    assert sum(process.keys[b"a"] > 0 for process in tokenizer.pool._processes._processes) <= 1
    await encoding_for(tokenizer, b"b")


async def test_a_text_is_not_to_blame_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control group may have no room for one: 503, not the 422 of a text that no tokenizer can represent."""
    tokenizer = Tokenizer.load(str(write_model(tmp_path)), None, 2)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer.pool._threads, "submit", refuse)
        with pytest.raises(Overloaded, match="no thread can be started to tokenize a text"):
            await tokenizer.encode("a" * (BRIEF_CHARACTERS + 1))
        assert await tokenizer.encode("a" * BRIEF_CHARACTERS)  # without a thread
    assert await tokenizer.encode("a" * (BRIEF_CHARACTERS + 1))
    await tokenizer.close()
