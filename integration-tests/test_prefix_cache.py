"""A prefix computed once is found again: the same tokens, sooner, and the next turn of a chat computes what is new."""

import statistics
import time
from typing import Any

from funitel_testing.clients import client_of, generate, stream
from funitel_testing.servers import Server

FLAGS = ("--dtype", "float32", "--max-batch-total-tokens", "20000")
BLOCK = 16


def prefix_of(number: int) -> str:
    """Some 1,500 tokens that begin like no other number's."""
    return f"{number} bottles of beer. " + "The cat sat on the mat and the dog lay on the log. " * 115


async def first_token(client: Any, prompt: str) -> tuple[float, list[int]]:
    begin = time.monotonic()
    answer = await stream(client, prompt, max_new_tokens=8)
    return answer.instants[0] - begin, answer.ids


def hits(server: Server) -> int:
    return int(server.metrics()["funitel_prefix_cache_hit_tokens_total"])


async def test_a_shared_prefix_is_found(launch: Any, is_full: bool, figures: dict[str, object]) -> None:
    server: Server = launch(*FLAGS)
    misses, found = [], []
    async with client_of(server.url) as client:
        await stream(client, "warm up", max_new_tokens=8)
        for number in range(5 if is_full else 1):
            seconds, alone = await first_token(client, prefix_of(number) + "Who sat?")
            misses.append(seconds)
            before = hits(server)
            seconds, again = await first_token(client, prefix_of(number) + "Who sat?")
            found.append(seconds)
            assert again == alone
            assert hits(server) - before > 1400
            seconds, _ = await first_token(client, prefix_of(number) + "Where did the dog lie, and on what?")
            found.append(seconds)
    ratio = statistics.median(found) / statistics.median(misses)
    figures["4.2 time to first token, 1,500-token prefix, hit / miss"] = round(ratio, 3)
    assert ratio < 0.15


async def test_the_third_turn_of_a_chat_computes_what_is_new(launch: Any, figures: dict[str, object]) -> None:
    server: Server = launch(*FLAGS)
    async with client_of(server.url) as client:
        messages = [{"role": "user", "content": "Tell me something long about rivers and " + "lakes and " * 40}]
        prompt_tokens, computed = [], []
        for _ in range(3):
            body = {"messages": messages, "max_tokens": 60, "temperature": 0}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            usage = answer["usage"]
            prompt_tokens.append(usage["prompt_tokens"])
            computed.append(prompt_tokens[-1] - usage["prompt_tokens_details"]["cached_tokens"])
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    figures["4.2 prompt tokens of three turns, and those computed"] = [prompt_tokens, computed]
    # What is new: the end of the answer, which shared no full block, the closing of the turn and the next question.
    assert all(count <= 2 * BLOCK + 16 for count in computed[1:])


async def test_tenants_with_different_salts_share_nothing(launch: Any) -> None:
    server: Server = launch(*FLAGS)
    prompt = prefix_of(55)[:900]

    async def cached(**salt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1, **salt}
        usage = (await client.post("/v1/completions", json=body)).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        assert 0 <= found < usage["prompt_tokens"]
        return found

    async with client_of(server.url) as client:
        assert await cached() == 0
        whole = await cached()
        assert whole > 100
        assert [await cached(cache_salt="a"), await cached(cache_salt="b")] == [0, 0]
        assert [await cached(cache_salt="a"), await cached(cache_salt="b"), await cached()] == [whole] * 3


async def test_tokens_do_not_depend_on_the_cache(launch: Any) -> None:
    server: Server = launch(*FLAGS)
    async with client_of(server.url) as client:
        how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "seed": 11}
        first = await generate(client, prefix_of(77)[:900], **how)
        assert (await generate(client, prefix_of(77)[:900], **how)).ids == first.ids
