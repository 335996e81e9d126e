"""What is remembered of pictures: no picture is encoded twice, none is taken for another, and each is counted."""

import asyncio
import base64
import itertools
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from funitel_testing.clients import client_of
from funitel_testing.servers import PLAIN, Server
from funitel_testing.soundness import refusal_of
from funitel_testing.vision_models import VisionOracle, picture, save_vision
from funitel_testing.vision_requests import content_of, data_url

LIMITS = ("--dtype", "float32", "--max-batch-total-tokens", "8192", "--max-input-tokens", "600", "--max-total-tokens")
FAMILY = "llava_next"  # pictures of different sizes have different numbers of tokens
BLOCK = 16
MAX_TOKENS = 8
ENCODED = r"^funitel_\w*encod\w*_total"  # the counters that may say how many items were encoded
FIRST, SECOND = picture(60, 45, 11), picture(60, 45, 12)
Part = str | Image.Image


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model that sees."""
    return save_vision(FAMILY, tmp_path_factory.mktemp(FAMILY) / "model")


@pytest.fixture(scope="module")
def oracle_of(model: Path) -> VisionOracle:
    """What transformers makes of prompts for it."""
    return VisionOracle(FAMILY, model)


@pytest.fixture
def server(launch: Any, model: Path) -> Server:
    """A server without keys."""
    running: Server = launch("--model-id", str(model), *LIMITS, "700")
    return running


def post(server: Server, path: str, body: dict[str, Any], key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60, verify=PLAIN)


def turn(role: str, *parts: Part) -> dict[str, Any]:
    return {"role": role, "content": content_of(parts)}


def asked(oracle: VisionOracle, messages: Sequence[tuple[str, Sequence[Part]]]) -> tuple[str, list[Image.Image]]:
    """The prompt that the template of the small models makes of messages, and the pictures in it."""
    text = ""
    for role, parts in messages:
        words = "".join(part if isinstance(part, str) else oracle.row.marker for part in parts)
        text += f"[{role}] {words}\n"
    return f"{text}[assistant]", [part for _, parts in messages for part in parts if isinstance(part, Image.Image)]


def chat(server: Server, *messages: dict[str, Any], key: str = "", **fields: Any) -> dict[str, Any]:
    """A greedy answer."""
    body = {"messages": list(messages), "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True} | fields
    answer = post(server, "/v1/chat/completions", body, key)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids_of(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def cached_of(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that were not computed."""
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


_SEEDS = itertools.count(900)  # of pictures that no test has shown before


class Encoded:
    """The counter of encoded items among all samples: that which grows by one for each new picture."""

    def __init__(self, server: Server) -> None:
        self._server = server
        names: set[str] | None = None
        for _ in range(2):
            before = self._samples()
            chat(server, turn("user", "New: ", picture(50, 40, next(_SEEDS))))
            after = self._samples()
            grown = {name for name, value in after.items() if value - before.get(name, 0) == 1}
            names = grown if names is None else names & grown
        assert names, f"no counter of encoded items: {sorted(self._samples())}"
        self._names = sorted(names)

    def _samples(self) -> dict[str, float]:
        return {name: value for name, value in self._server.metrics().items() if re.match(ENCODED, name)}

    def count(self) -> int:
        """Items encoded until now."""
        (value,) = {self._samples()[name] for name in self._names}
        return int(value)


# Nothing twice ----------------------------------------------------------------------------------------------------


def test_a_second_turn_encodes_nothing(server: Server, oracle_of: VisionOracle) -> None:
    encoded = Encoded(server)
    before = encoded.count()
    first = chat(server, turn("user", "What is this? ", FIRST))
    assert encoded.count() - before == 1
    said = first["choices"][0]["message"]["content"]
    messages = [("user", ("What is this? ", FIRST)), ("assistant", (said,)), ("user", ("And then?",))]
    second = chat(server, *(turn(role, *parts) for role, parts in messages))
    assert ids_of(second) == oracle_of.generate(*asked(oracle_of, messages), MAX_TOKENS)
    picture_tokens = first["usage"]["prompt_tokens"] - len("[user] What is this? \n[assistant]")
    assert cached_of(second) > picture_tokens, "the picture was computed again"
    assert encoded.count() - before == 1
    messages += [("assistant", ("well",)), ("user", ("And this? ", SECOND))]
    third = chat(server, *(turn(role, *parts) for role, parts in messages))
    assert encoded.count() - before == 2
    assert ids_of(third) == oracle_of.generate(*asked(oracle_of, messages), MAX_TOKENS)


def test_a_picture_of_another_conversation_is_not_encoded_again(server: Server, oracle_of: VisionOracle) -> None:
    """The text before it differs, so all tokens are computed, but not the picture's features."""
    shown = picture(60, 45, 30)
    encoded = Encoded(server)
    chat(server, turn("user", "One. ", shown))
    before = encoded.count()
    again = chat(server, turn("user", "Two, which begins in another way. ", shown))
    assert cached_of(again) == 0
    assert encoded.count() == before
    question = [("user", ("Two, which begins in another way. ", shown))]
    assert ids_of(again) == oracle_of.generate(*asked(oracle_of, question), MAX_TOKENS)


def test_the_same_pixels_in_another_file_are_the_same_picture(server: Server) -> None:
    """What counts is what the processor makes of it."""
    shown = picture(60, 45, 31)
    encoded = Encoded(server)
    first = chat(server, turn("user", "Same. ", shown))
    before = encoded.count()
    parts = content_of(["Same. ", shown])
    file = base64.b64decode(data_url(shown).partition(",")[2])
    comment = b"tEXtk\0ab"
    other = file[:-12] + b"\0\0\0\x04" + comment + zlib.crc32(comment).to_bytes(4, "big") + file[-12:]
    parts[1]["image_url"]["url"] = f"data:image/png;base64,{base64.b64encode(other).decode()}"
    answer = post(
        server,
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": parts}], "max_tokens": MAX_TOKENS, "temperature": 0}
        | {"return_token_ids": True},
    )
    assert answer.status_code == 200, answer.text
    assert ids_of(answer.json()) == ids_of(first)
    assert encoded.count() == before


async def test_one_picture_of_many_requests_at_once_is_encoded_once(server: Server, oracle_of: VisionOracle) -> None:
    shown = picture(60, 45, 32)
    encoded = Encoded(server)
    before = encoded.count()
    body = {"max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    async with client_of(server.url) as client:
        answers = await asyncio.gather(
            *(
                client.post("/v1/chat/completions", json=body | {"messages": [turn("user", f"{number} ", shown)]})
                for number in range(8)
            )
        )
    assert encoded.count() - before == 1
    for number, answer in enumerate(answers):
        prompt = asked(oracle_of, [("user", (f"{number} ", shown))])
        assert ids_of(answer.json()) == oracle_of.generate(*prompt, MAX_TOKENS), number


# Nothing for another ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reversed", [False, True])
def test_pictures_with_the_same_text_are_never_mixed(
    is_reversed: bool, server: Server, oracle_of: VisionOracle
) -> None:
    """Both are of one size, so their prompts are the same tokens."""
    order = [SECOND, FIRST] if is_reversed else [FIRST, SECOND]
    question = f"Which of the two is it, now {is_reversed}? "  # not in the cache yet
    expected = {}
    for shown in order:
        text, images = asked(oracle_of, [("user", (question, shown))])
        expected[id(shown)] = oracle_of.generate(text, images, MAX_TOKENS)
    tokens = [oracle_of.inputs(*asked(oracle_of, [("user", (question, shown))]))["input_ids"] for shown in order]
    assert tokens[0].tolist() == tokens[1].tolist()
    assert expected[id(FIRST)] != expected[id(SECOND)], "the oracle sees no difference"
    found = []
    for shown in order * 3:
        answer = chat(server, turn("user", question, shown))
        assert ids_of(answer) == expected[id(shown)]
        found.append(cached_of(answer))
    before = len(f"[user] {question}")  # what both share
    assert max(found[:2]) <= before
    assert min(found[2:]) > before, "nothing of a picture was found again"


def test_pictures_in_another_order_are_another_prompt(server: Server, oracle_of: VisionOracle) -> None:
    for pair in ((FIRST, SECOND), (SECOND, FIRST), (FIRST, FIRST), (SECOND, SECOND), (FIRST, SECOND)):
        parts = ("Compare: ", pair[0], " with ", pair[1])
        answer = chat(server, turn("user", *parts))
        assert ids_of(answer) == oracle_of.generate(*asked(oracle_of, [("user", parts)]), MAX_TOKENS)


async def test_pictures_with_the_same_text_at_once(server: Server, oracle_of: VisionOracle) -> None:
    shown = [picture(60, 45, 40 + number) for number in range(6)]
    expected = [oracle_of.generate(*asked(oracle_of, [("user", ("At once: ", each))]), MAX_TOKENS) for each in shown]
    body = {"max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    async with client_of(server.url) as client:
        for _ in range(2):
            answers = await asyncio.gather(
                *(
                    client.post("/v1/chat/completions", json=body | {"messages": [turn("user", "At once: ", each)]})
                    for each in shown
                )
            )
            assert [ids_of(answer.json()) for answer in answers] == expected


def test_salts_share_nothing(server: Server) -> None:
    question = turn("user", "Salted, and long enough for a block. ", FIRST)
    plain = [cached_of(chat(server, question)) for _ in range(2)]
    salted = [cached_of(chat(server, question, cache_salt=salt)) for salt in ("a", "b", "a", "b")]
    assert plain[0] == 0
    assert plain[1] > 3 * BLOCK
    assert salted == [0, 0, plain[1], plain[1]]


def test_keys_share_nothing(launch: Any, model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    server: Server = launch("--model-id", str(model), *LIMITS, "700", "--api-key-file", str(keys))
    question = turn("user", "Of one key, and long enough for a block. ", FIRST)
    answers = [chat(server, question, key=key) for key in ("first", "second", "first", "second")]
    found = [cached_of(answer) for answer in answers]
    assert found[:2] == [0, 0]
    assert found[2] == found[3] > 3 * BLOCK
    assert len({tuple(ids_of(answer)) for answer in answers}) == 1


# Each is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(60, 45), (28, 28), (200, 30), (30, 200), (7, 300)])
def test_usage_counts_what_the_processor_makes(size: tuple[int, int], server: Server, oracle_of: VisionOracle) -> None:
    parts = ("How many? ", picture(*size, 50), " and ", picture(*size, 51))
    expected = oracle_of.inputs(*asked(oracle_of, [("user", parts)]))["input_ids"].shape[1]
    assert chat(server, turn("user", *parts))["usage"]["prompt_tokens"] == expected
    body = {"messages": [turn("user", *parts)], "max_tokens": 1, "stream": True}
    streamed = post(server, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert f'"prompt_tokens":{expected}' in streamed.text.replace(" ", "")
    message = {"role": "user", "content": [_for_responses(part) for part in content_of(parts)]}
    response = post(server, "/v1/responses", {"input": [message], "max_output_tokens": 1})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["input_tokens"] == expected


def _for_responses(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    return {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}


def _for_anthropic(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    data = part["image_url"]["url"].partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_anthropics_usage_counts_pictures(server: Server, oracle_of: VisionOracle) -> None:
    parts = ("Of Anthropic: ", picture(90, 40, 60))
    expected = oracle_of.inputs(*asked(oracle_of, [("user", parts)]))["input_ids"].shape[1]
    messages = [{"role": "user", "content": [_for_anthropic(part) for part in content_of(parts)]}]
    for _ in range(2):  # the second time from the cache
        answer = post(server, "/v1/messages", {"model": "m", "max_tokens": 1, "messages": messages})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected
    counted = post(server, "/v1/messages/count_tokens", {"model": "m", "messages": messages})
    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] == expected


def test_pictures_count_for_the_limit_of_a_prompt(server: Server, oracle_of: VisionOracle) -> None:
    """The text alone is far from it."""
    parts: list[Part] = ["Many: "]
    while oracle_of.inputs(*asked(oracle_of, [("user", parts)]))["input_ids"].shape[1] <= 600:
        parts.append(picture(60, 45, 70 + len(parts)))
    count = oracle_of.inputs(*asked(oracle_of, [("user", parts)]))["input_ids"].shape[1]
    fitting = chat(server, turn("user", *parts[:-1]))
    assert fitting["usage"]["prompt_tokens"] <= 600
    answer = post(server, "/v1/chat/completions", {"messages": [turn("user", *parts)], "max_tokens": 1})
    assert answer.status_code == 422, answer.text
    line = refusal_of(answer)
    assert "600" in line, line
    assert str(count) in line, line
    messages = [{"role": "user", "content": [_for_anthropic(part) for part in content_of(parts)]}]
    of_anthropic = post(server, "/v1/messages", {"model": "m", "max_tokens": 1, "messages": messages})
    assert of_anthropic.status_code == 400, of_anthropic.text
    assert "600" in refusal_of(of_anthropic)


def test_a_prompt_that_is_cut_is_refused_or_whole(server: Server) -> None:
    """Truncation would cut a picture in two."""
    body = {"inputs": f"See ![]({data_url(FIRST)}) well", "parameters": {"max_new_tokens": 1, "truncate": 20}}
    answer = post(server, "/generate", body)
    assert 400 <= answer.status_code < 500, answer.text
    assert re.search("truncate|inputs", refusal_of(answer))
