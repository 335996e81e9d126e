"""A pool that is too small fails nobody and stays full; long prompts and running streams share the machine."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from funitel_testing.clients import client_of, generate, stream
from funitel_testing.pool_load import IMPOSSIBLE, beside_streams, eight_streams, quarter_of_the_pool
from funitel_testing.servers import Server, run_launcher
from funitel_testing.tiny import save_tiny

FLOOR = 4  # tokens by which a prompt advances under a target that cannot be held


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose context is larger than the pool."""
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


async def test_prompts_advance_under_a_target_that_cannot_be_held(launch: Any, model: Path) -> None:
    server: Server = launch("--model-id", str(model), "--max-batch-total-tokens", "65536", *IMPOSSIBLE)
    async with client_of(server.url) as client, eight_streams(client, 5, count=1):
        before = server.metrics()
        answer = await stream(client, "y" * 800, max_new_tokens=2)
        after = server.metrics()
    assert len(answer.ids) == 2
    steps = after["funitel_steps_total"] - before["funitel_steps_total"]
    assert steps >= 800 / FLOOR, "more than the least was computed although the target was missed by far"
    missed = "--target-itl-ms 0.001 cannot be held"
    log = await asyncio.to_thread(server.wait_log, missed)
    told = [line for line in log.splitlines() if missed in line]
    assert len(told) == 1
    assert f"prompts advance by {FLOOR} tokens a step" in told[0]


# One quarter of the pool ----------------------------------------------------------------------------------------------


async def test_a_quarter_of_the_pool_is_enough(
    launch: Any, model: Path, is_full: bool, figures: dict[str, object]
) -> None:
    small = await quarter_of_the_pool(launch, ("--model-id", str(model)), 160, "tiny model", figures)
    await what_cannot_fit_is_refused(small)


async def test_a_quarter_of_the_pool_is_enough_for_the_demo_model(
    launch: Any, is_full: bool, figures: dict[str, object]
) -> None:
    if not is_full:
        pytest.skip("the long form of the test above")
    await quarter_of_the_pool(launch, (), 240, "demo model", figures)


async def what_cannot_fit_is_refused(server: Server) -> None:
    """A request larger than the pool is refused by every route, with both numbers; one that just fits is served."""
    async with client_of(server.url) as client:
        pool = (await client.get("/info")).json()["max_total_tokens"]
        prompt, most = "x" * (pool - 100), 101
        message = [{"role": "user", "content": prompt}]
        native = {"inputs": prompt, "parameters": {"max_new_tokens": most}}
        bodies: dict[str, Any] = {
            "/": native,
            "/generate": native,
            "/generate_stream": native,
            "/v1/completions": {"prompt": prompt, "max_tokens": most},
            "/v1/chat/completions": {"messages": message, "max_tokens": most},
            "/v1/responses": {"input": prompt, "max_output_tokens": most},
            "/v1/messages": {"model": "any", "messages": message, "max_tokens": most},
            "/invocations": native,
            "/vertex": {"instances": [{"messages": message, "max_tokens": most}]},
        }
        for path, body in bodies.items():
            answer = await client.post(path, json=body)
            assert answer.status_code in (400, 422), (path, answer.status_code, answer.text)
            numbers = rf"must be <= {pool}\. Given: (\d+) `\w+` tokens and {most} `"
            given = re.search(numbers, answer.text)
            assert given is not None, (path, answer.text)
            assert int(given[1]) >= len(prompt)
        fits = await generate(client, prompt, max_new_tokens=100, ignore_eos=True)
        assert len(fits.ids) == 100
        assert server.metrics()["tgi_queue_size"] == 0


def test_d14_a_pool_that_does_not_fit_is_refused_with_the_largest_that_does(model: Path) -> None:
    ended = run_launcher("--model-id", str(model), "--max-batch-total-tokens", str(2**32 - 1))
    assert ended.code != 0
    assert re.search(r"needs more memory than there is: at most [1-9]\d+ tokens fit in the \d+ MB", ended.last_line)


async def test_d14_a_pool_that_was_accepted_holds_the_longest_requests_that_it_has_room_for(
    launch: Any, model: Path
) -> None:
    flags = ("--max-batch-total-tokens", "2048", "--max-total-tokens", "500", "--prefix-caching", "false")
    server: Server = launch("--model-id", str(model), *flags)
    async with client_of(server.url) as client:
        asked = [(f"{number}" * 300, {"max_new_tokens": 200, "ignore_eos": True}) for number in range(8)]
        alone = [await generate(client, prompt, **how) for prompt, how in asked]
        found = await asyncio.gather(*(generate(client, prompt, **how) for prompt, how in asked))
    assert [len(answer.ids) for answer in found] == [200] * 8
    assert [answer.ids for answer in found] == [answer.ids for answer in alone]
    assert not server.error_lines()


# Long prompts beside streams ------------------------------------------------------------------------------------------


async def test_a_long_prompt_among_eight_streams(launch: Any, is_full: bool, figures: dict[str, object]) -> None:
    """The default keeps both promises; a tighter and a looser target move the balance to either side."""
    if not is_full:
        pytest.skip("measures; the mechanism is tested above and in router/tests/scheduler/cost/test_step_cost.py")
    table: dict[str, dict[str, float]] = {}
    server: Server = launch("--max-batch-total-tokens", "48000")
    table["default"] = await beside_streams(server, 7000)
    usual = table["default"]["gap p50 without"]
    for factor in (1.6, 5.0):
        target = round(factor * usual)
        server = launch("--max-batch-total-tokens", "48000", "--target-itl-ms", str(target))
        table[f"--target-itl-ms {target}"] = await beside_streams(server, 7000)
    for setting, row in table.items():
        figures[f"4.3 {setting}"] = ", ".join(f"{name} {value:.2f}" for name, value in row.items())
    tight, loose = (table[name] for name in list(table)[1:])
    assert table["default"]["p99 ratio"] < 3
    assert table["default"]["first token ratio"] < 3
    assert tight["gap p50 with"] < table["default"]["gap p50 with"] < loose["gap p50 with"]
    assert tight["first token beside"] > table["default"]["first token beside"] > loose["first token beside"]
