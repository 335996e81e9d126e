"""SIGHUP puts another model and other settings in the place of those that serve, under load, and no request fails."""

import asyncio
import signal
from contextlib import suppress
from pathlib import Path

import httpx

from funitel_testing.clients import Answer, client_of, generate, stream
from funitel_testing.servers import serving, wait_until
from funitel_testing.tiny import VOCAB_SIZE, save_tiny

FAILED = "the upgrade has failed"


def _served(url: str) -> tuple[str, int]:
    """The model and the limit that the server tells of."""
    info = httpx.get(f"{url}/info").json()
    return info["model_id"], info["max_stop_sequences"]


def _status_of_two_stops(url: str) -> int:
    two_stops = {"inputs": "x", "parameters": {"stop": ["a", "b"], "max_new_tokens": 1}}
    return httpx.post(f"{url}/generate", json=two_stops).status_code


async def _ask(client: httpx.AsyncClient, index: int, tokens: int) -> Answer:
    ask = generate if index % 4 == 0 else stream
    return await ask(client, f"{index} bottles of beer on the wall. " * (1 + index % 3), max_new_tokens=tokens)


async def _ids(url: str, indices: range, tokens: int) -> list[list[int]]:
    async with client_of(url) as client:
        return [answer.ids for answer in await asyncio.gather(*(_ask(client, i, tokens) for i in indices))]


async def test_another_model_and_limit_take_over_under_load(tmp_path: Path, figures: dict[str, object]) -> None:
    folders = [
        save_tiny("llama", tmp_path / name, max_position_embeddings=1024, eos_token_id=VOCAB_SIZE, seed=seed)
        for seed, name in enumerate(("old", "new"))
    ]
    file = tmp_path / "settings"
    file.write_text(f"MODEL_ID={folders[0]}\nMAX_STOP_SEQUENCES=2\n")
    flags = ("--dtype", "float32", "--max-batch-total-tokens", "16384")
    with serving(tmp_path, "--config", str(file), *flags) as server:
        assert _served(server.url) == (str(folders[0]), 2)
        assert _status_of_two_stops(server.url) == 200
        footprint = server.footprint()
        old = await _ids(server.url, range(6), 250)
        running = asyncio.create_task(_ids(server.url, range(6), 250))
        is_over = asyncio.Event()

        async def keep_asking() -> list[list[int]]:
            """One short request after the other, on a connection that is kept and on new ones."""
            found = []
            async with client_of(server.url) as kept:
                while not is_over.is_set():
                    found.append((await _ask(kept, 1, 4)).ids)
                    found += await _ids(server.url, range(1, 2), 4)
            return found

        asking = asyncio.create_task(keep_asking())
        try:
            await asyncio.sleep(0.2)
            file.write_text(f"MODEL_ID={folders[1]}\nMAX_STOP_SEQUENCES=1\n")
            server.process.send_signal(signal.SIGHUP)
            said = "the deployment before the upgrade has ended"
            await asyncio.to_thread(server.wait_log, said, 90)
        finally:
            is_over.set()
        found = await asking
        assert await running == old, "what had begun ended on the weights it began with"
        new = await _ids(server.url, range(6), 250)
        assert new != old
        assert {tuple(ids) for ids in found} == {tuple(old[1][:4]), tuple(new[1][:4])}
        assert found[-1] == new[1][:4]
        assert _served(server.url) == (str(folders[1]), 1)
        assert _status_of_two_stops(server.url) == 422, "the new limit holds"
        assert len(server.shard_pids()) == 1
        assert server.error_lines() == []
        assert "Traceback" not in server.log.read_text()
        figures["upgrade under load: requests during it, and failed"] = {"asked": len(found) + 6, "failed": 0}
        file.write_text(f"MODEL_ID={folders[0]}\nMAX_STOP_SEQUENCES=some\n")
        server.process.send_signal(signal.SIGHUP)
        refused = f"{FAILED}, the current deployment goes on: {file}, line 2: MAX_STOP_SEQUENCES: "
        await asyncio.to_thread(server.wait_log, refused, 60)
        file.write_text(f"MODEL_ID={folders[1]}\n")
        broken = folders[1] / "config.json"
        with suppress(FileNotFoundError):
            broken.rename(folders[1] / "elsewhere")
        server.process.send_signal(signal.SIGHUP)
        await asyncio.to_thread(wait_until, lambda: server.log.read_text().count(FAILED) == 2, 60)
        assert _served(server.url) == (str(folders[1]), 1)
        assert await _ids(server.url, range(2), 5) == [ids[:5] for ids in new[:2]]
    footprint.wait_gone()
