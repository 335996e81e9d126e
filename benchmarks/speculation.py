"""Measure tokens per second of one stream with drafts and without, on texts that repeat and on texts that do not.

One server runs with --speculate; each request says `speculate: 0` or the server's number, in turn, so that a slow
minute of the machine meets both. Texts must be the same, or the run fails. The last line is one JSON object: by text,
tokens per second without drafts and with them, their ratio, and the share of tokens that were accepted drafts.

    python benchmarks/speculation.py [--model MODEL] [--speculate 4] [--rounds 5] [--full] [-- FLAGS OF THE SERVER]

`--full` fails where a text that repeats gains less than 1.5, or one that does not gets below 0.97.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from funitel_testing.clients import client_of
from funitel_testing.servers import Server, serving

LEAST_GAIN, LEAST_ELSE = 1.5, 0.97

CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        return self.balance
"""
RECORDS = json.dumps(
    [
        {"id": 1, "name": "Ada Lovelace", "city": "London", "active": True, "tags": ["math", "engine"]},
        {"id": 2, "name": "Alan Turing", "city": "Wilmslow", "active": True, "tags": ["logic", "code"]},
        {"id": 3, "name": "Grace Hopper", "city": "Arlington", "active": False, "tags": ["navy", "compiler"]},
    ],
    indent=1,
)
ARTICLE = (
    "The committee met in Geneva. Its chair said that 'the new rules on river transport will begin in spring' "
    "and that 'every port has to report its cargo by the end of the month'. A speaker of the ports said that 'reports "
    "by the end of the month cannot be made without new staff'. The committee will meet again in June."
)
REPEATING = {
    "code edit": f"Write this code again, but rename balance to total.\n\n{CODE}\nThe same code with total:\n\n",
    "json copy": f"Copy this JSON exactly.\n\n{RECORDS}\n\nThe copy:\n\n",
    "summary with quotes": f"{ARTICLE}\n\nSummary that quotes each speaker word for word: The committee met",
}
ELSE = {
    "story": "Write a story about a lighthouse keeper who finds a letter. It was a cold night when",
    "explanation": "Explain how photosynthesis works, step by step, for a student of biology.",
    "sampled": "Write a poem about the sea and the moon in free verse.\n\n",
}


def parameters(name: str, max_new_tokens: int) -> dict[str, object]:
    """How a text is asked for."""
    asked: dict[str, object] = {"max_new_tokens": max_new_tokens, "details": True}
    if name == "sampled":
        asked |= {"do_sample": True, "seed": 7, "temperature": 1.0}
    return asked


async def measure(client: httpx.AsyncClient, inputs: str, asked: dict[str, object]) -> tuple[str, float]:
    """The text of one stream, and its tokens per second behind the first."""
    instants, text = [], ""
    async with client.stream("POST", "/generate_stream", json={"inputs": inputs, "parameters": asked}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                instants.append(time.perf_counter())
                text = json.loads(line[5:])["generated_text"] or text
    return text, (len(instants) - 1) / max(instants[-1] - instants[0], 1e-9)


def accepted(server: Server) -> float:
    """Drafts accepted so far."""
    return server.metrics().get('funitel_draft_tokens_total{outcome="accepted"}', 0.0)


async def compare(server: Server, rounds: int, speculate: int, max_new_tokens: int) -> dict[str, dict[str, float]]:
    """The figures of every text."""
    found = {}
    async with client_of(server.url) as client:
        for name, inputs in (REPEATING | ELSE).items():
            asked = parameters(name, max_new_tokens)
            rates: dict[int, list[float]] = {0: [], speculate: []}
            texts, count = set(), 0.0
            for turn in range(2 * rounds + 2):  # the first pair warms up
                drafts = (0, speculate)[turn % 2]
                before = accepted(server)
                text, rate = await measure(client, inputs, asked | {"speculate": drafts})
                texts.add(text)
                if turn > 1:
                    rates[drafts].append(rate)
                    count += accepted(server) - before
            if len(texts) > 1:
                raise SystemExit(f"error: drafts changed the text of {name!r}")
            off, on = (statistics.median(rates[drafts]) for drafts in (0, speculate))
            share = count / (rounds * max_new_tokens)
            found[name] = {"off": round(off, 1), "on": round(on, 1), "ratio": round(on / off, 3), "accepted": share}
            print(f"{name:20} {off:8.1f} tok/s {on:8.1f} tok/s {on / off:6.2f} x, accepted {share:5.0%}", flush=True)
    return found


def main() -> None:
    """Run a server and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--speculate", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--full", action="store_true", help="hold the figures to their bounds")
    parser.add_argument("flags", nargs="*", help="of the server, behind --")
    given = parser.parse_args()
    flags = ("--model-id", given.model, "--speculate", str(given.speculate), *given.flags)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *flags) as server:
        figures = asyncio.run(compare(server, given.rounds, given.speculate, given.max_new_tokens))
    print(json.dumps(figures))
    slow = [name for name in REPEATING if figures[name]["ratio"] < LEAST_GAIN]
    slow += [name for name in ELSE if figures[name]["ratio"] < LEAST_ELSE]
    if given.full and slow:
        sys.exit(f"error: below its bound: {', '.join(slow)}")


if __name__ == "__main__":
    main()
