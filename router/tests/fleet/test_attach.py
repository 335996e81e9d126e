"""Replicas that the control plane names are attached, watched and let go, and it is told so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import write_adapter
from fake_control import FakeControl, FakeFleet, fake_fleet
from fake_shards import FakeShard, fake_shards
from fakes import FakeEngine, eventually

from funitel.router.connect import connect

ATTACHED, RELEASED = "/v1/fleet/attached", "/v1/fleet/released"


async def test_what_is_attached_is_told_with_its_seconds(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha") as fleet:
        [told] = await fleet.control.heard(ATTACHED)
        assert (told["model"], told["replica"]) == ("alpha", 0)
        assert 0 <= told["seconds"] < 10


async def test_a_model_that_drains_finishes_its_streams_and_is_released(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta", make=lambda _: FakeEngine(pause=0.05)) as fleet:
        stream = asyncio.create_task(fleet.generate("alpha", stream=True))

        async def runs() -> bool:
            return bool(fleet.engine("alpha").tasks)

        await eventually(runs, "runs")
        engine = fleet.engine("alpha")
        fleet.control.unload("alpha")

        async def is_gone() -> bool:
            return fleet.service("alpha") is None

        await eventually(is_gone, "gone")
        assert not engine.is_closed
        assert not fleet.control.told(RELEASED)
        again = asyncio.create_task(fleet.generate("alpha"))  # waits for its next load
        answer = await stream
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"stop"' in answer.text
        assert await fleet.control.heard(RELEASED) == [{"model": "alpha", "replica": 0}]
        assert engine.is_closed
        fleet.control.load("alpha")
        assert (await again).status_code == 200
        assert fleet.engine("alpha") is not engine


async def test_a_model_that_is_removed_in_mid_stream_finishes_the_stream(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta", make=lambda _: FakeEngine(pause=0.05)) as fleet:
        stream = asyncio.create_task(fleet.generate("alpha", stream=True))
        await asyncio.sleep(0.08)
        del fleet.control.models["alpha"]
        fleet.control.push()
        await asyncio.sleep(0.05)
        listed = (await fleet.client.get("/v1/requests")).json()["data"]
        assert len(listed) == 1  # those of models that end are found, too
        answer = await stream
        assert answer.text.endswith("data: [DONE]\n\n")
        assert await fleet.control.heard(RELEASED) == [{"model": "alpha", "replica": 0}]
        assert (await fleet.generate("beta")).status_code == 200


async def test_what_a_removed_model_releases_is_not_that_of_another_model_of_its_name(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta", make=lambda _: FakeEngine(pause=0.1)) as fleet:
        stream = asyncio.create_task(fleet.generate("alpha", stream=True))
        await asyncio.sleep(0.08)
        engine = fleet.engine("alpha")
        del fleet.control.models["alpha"]
        fleet.control.push()
        await asyncio.sleep(0.05)
        fleet.control.add("alpha", replicas=1)
        fleet.control.push()
        await fleet.control.heard(ATTACHED, 3)
        assert (await stream).status_code == 200

        async def is_closed() -> bool:
            return engine.is_closed

        await eventually(is_closed, "closed")
        await asyncio.sleep(0.1)
        assert not fleet.control.told(RELEASED)
        assert fleet.engine("alpha") is not engine


async def test_what_drains_and_was_never_attached_is_released_at_once(tmp_path: Path) -> None:
    def prepare(control: FakeControl) -> None:
        control.add("alpha", state="draining")["replicas"] = [control.replica("alpha", 3, "draining")]

    async with fake_fleet(tmp_path, prepare=prepare) as fleet:
        assert await fleet.control.heard(RELEASED) == [{"model": "alpha", "replica": 3}]
        fleet.control.push()
        await asyncio.sleep(0.1)
        assert len(fleet.control.told(RELEASED)) == 1


async def test_a_replica_that_cannot_be_attached_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.router.fleet.attach.RETRY_SECONDS", 0.1)
    refused = ["unix:///alpha-0"]
    async with fake_fleet(tmp_path, broken=lambda address: address in refused) as fleet:
        fleet.control.add("alpha", replicas=1)
        fleet.control.push()
        [told, *_] = await fleet.control.heard(ATTACHED)
        assert told == {"model": "alpha", "replica": 0, "error": "no shard answers at unix:///alpha-0"}
        await fleet.control.heard(ATTACHED, 3)
        refused.clear()
        await fleet.attached("alpha")
        assert (await fleet.generate("alpha")).status_code == 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"no_such_setting": 1}, "the router has no setting 'no_such_setting'"),
        ({"max_best_of": "many"}, "the router's setting 'max_best_of' cannot be 'many'"),
        ({"max_best_of": 0}, "--max-best-of"),
    ],
)
async def test_settings_that_are_none_are_told(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    async with fake_fleet(tmp_path) as fleet:
        fleet.control.add("alpha", replicas=1)["router"] |= fields
        fleet.control.push()
        [told] = await fleet.control.heard(ATTACHED)
        assert words in told["error"]
        assert (await fleet.client.get("/health")).status_code == 200


async def test_settings_of_a_model_are_its_own(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, max_best_of=3, max_stop_sequences=9) as fleet:
        router = {"max_best_of": 5, "max_input_tokens": 50, "max_total_tokens": 60, "reasoning_parser": "none"}
        fleet.control.add("alpha", replicas=1)["router"] |= router
        fleet.control.push()
        await fleet.attached("alpha")
        settings = fleet.service("alpha").settings
        assert (settings.max_best_of, settings.max_stop_sequences, settings.max_input_tokens) == (5, 9, 50)
        assert (settings.served_model_name, settings.master_url) == ("alpha", "unix:///alpha-0")


async def test_a_replica_is_given_up_when_it_is_not_wanted_any_more(tmp_path: Path) -> None:
    began = asyncio.Event()

    async def hang(*_: Any, **__: Any) -> Any:
        began.set()
        await asyncio.Event().wait()

    async with fake_fleet(tmp_path, connect=hang) as fleet:
        fleet.control.add("alpha", replicas=1)
        fleet.control.push()
        await began.wait()
        fleet.control.unload("alpha")
        assert await fleet.control.heard(RELEASED) == [{"model": "alpha", "replica": 0}]
        assert fleet.service("alpha") is None


async def test_what_was_said_of_a_replica_before_is_not_said_after_what_is_true_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.router.fleet.attach.RETRY_SECONDS", 0.1)
    refused = ["unix:///alpha-0"]
    async with fake_fleet(tmp_path, broken=lambda address: address in refused) as fleet:
        fleet.control.answers["POST", ATTACHED] = 200, {}
        fleet.control.add("alpha", replicas=1)
        fleet.control.push()
        await fleet.control.heard(ATTACHED)
        await fleet.control.stop()
        fleet.control.asked.clear()
        await asyncio.sleep(0.3)
        refused.clear()
        await fleet.attached("alpha")
        await fleet.control.start()
        await fleet.control.heard(ATTACHED)
        await asyncio.sleep(0.5)
        assert not [told for told in fleet.control.told(ATTACHED) if "error" in told]


async def test_what_is_released_is_said_again_to_a_control_plane_that_has_begun_anew(tmp_path: Path) -> None:
    def prepare(control: FakeControl) -> None:
        control.add("alpha", state="draining")["replicas"] = [control.replica("alpha", 3, "draining")]

    async with fake_fleet(tmp_path, prepare=prepare) as fleet:
        await fleet.control.heard(RELEASED)
        await fleet.control.stop()
        await fleet.control.start()
        assert await fleet.control.heard(RELEASED, 2) == [{"model": "alpha", "replica": 3}] * 2


async def test_the_shards_of_what_is_given_up_while_its_adapters_are_loaded_are_let_go(tmp_path: Path) -> None:
    write_adapter(tmp_path / "sql")
    began = asyncio.Event()

    class Slow(FakeEngine):
        async def load_adapter(self, *_: Any, **__: Any) -> None:
            began.set()
            await asyncio.Event().wait()

    async with fake_fleet(tmp_path, make=lambda _: Slow(takes_adapters=True)) as fleet:
        fleet.control.add("alpha", replicas=1)["router"]["lora_adapters"] = f"sql={tmp_path / 'sql'}"
        fleet.control.push()
        await began.wait()
        fleet.control.unload("alpha")
        await fleet.control.heard(RELEASED)
        assert fleet.engine("alpha").is_closed


# Over real engines and fake shards -----------------------------------------------------------------------------------


@asynccontextmanager
async def two_replicas(tmp_path: Path) -> AsyncIterator[tuple[FakeFleet, list[list[FakeShard]]]]:
    """A model with one replica that is attached and one that is there; its first replica has the number 4."""
    async with AsyncExitStack() as stack:
        shards, folders = [], [tmp_path / "r4", tmp_path / "r5"]
        for folder in folders:
            folder.mkdir()
            shards.append(await stack.enter_async_context(fake_shards(folder)))

        def prepare(control: FakeControl) -> None:
            control.add("alpha", replicas=1)["replicas"] = [at(control, folders[0], 4)]
            control.add("other")

        fleet = await stack.enter_async_context(
            fake_fleet(tmp_path, prepare=prepare, connect=connect, max_batch_prefill_tokens=32)
        )
        yield fleet, shards


def at(control: FakeControl, folder: Path, place: int) -> dict[str, Any]:
    return control.replica("alpha", place) | {"address": f"unix://{folder}/shard-0"}


def serving(fleet: FakeFleet) -> list[tuple[int, float]]:
    return [(each.replica_id, each.weight) for each in fleet.service("alpha").engine.replicas]


async def test_replicas_join_and_leave_while_requests_run(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (fleet, shards):
        expected = (await fleet.generate("alpha", temperature=0)).json()["choices"][0]["text"]
        running, failed = True, []

        async def client() -> None:
            while running:
                answer = await fleet.generate("alpha", temperature=0)
                if answer.status_code != 200 or answer.json()["choices"][0]["text"] != expected:
                    failed.append(answer.text)

        clients = [asyncio.create_task(client()) for _ in range(3)]
        replicas = fleet.control.models["alpha"]["replicas"]
        replicas.append(at(fleet.control, tmp_path / "r5", 5) | {"weight": 0.5})
        fleet.control.push()
        told = await fleet.control.heard(ATTACHED, 2)
        assert [each["replica"] for each in told] == [4, 5]
        assert serving(fleet) == [(4, 1.0), (5, 0.5)]
        replicas[0]["weight"] = 0.25
        fleet.control.push()

        async def has_weight() -> bool:
            return serving(fleet)[0] == (4, 0.25)

        await eventually(has_weight, "the weight")
        replicas[0]["state"] = "draining"
        fleet.control.push()
        assert await fleet.control.heard(RELEASED) == [{"model": "alpha", "replica": 4}]
        assert serving(fleet) == [(5, 0.5)]
        running = False
        await asyncio.gather(*clients)
        assert not failed


async def test_a_lost_replica_stays_and_is_told_again_once_it_is_back(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (fleet, shards):
        await fleet.control.heard(ATTACHED)
        service = fleet.service("alpha")
        for shard in shards[0]:
            await shard.die()
        fleet.control.models["alpha"]["replicas"][0]["state"] = "lost"
        fleet.control.push()
        asked = asyncio.create_task(fleet.generate("alpha"))
        await asyncio.sleep(0.2)
        assert not asked.done()  # it waits for the replica, as behind any router
        assert fleet.service("alpha") is service
        socket = tmp_path / "r4" / "shard-0"

        async def is_free() -> bool:
            return not socket.exists()

        await eventually(is_free, "the old one has ended")
        async with fake_shards(tmp_path / "r4"):
            fleet.control.models["alpha"]["replicas"][0]["state"] = "ready"
            fleet.control.push()
            assert (await asked).status_code == 200
            told = await fleet.control.heard(ATTACHED, 2)
            assert [each["replica"] for each in told] == [4, 4]
            assert not fleet.control.told(RELEASED)


async def test_requests_end_when_the_shards_do_not_wait_for_them(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (fleet, shards):
        [shard] = shards[0]
        shard.pause.clear()
        asked = asyncio.create_task(fleet.generate("alpha"))
        await asyncio.sleep(0.1)
        fleet.control.unload("alpha")
        await asyncio.sleep(0.1)
        await shard.die()
        fleet.control.models["alpha"]["replicas"] = []
        fleet.control.push()
        answer = await asked
        assert answer.status_code in (424, 500)
        assert await fleet.control.heard(RELEASED) == [{"model": "alpha", "replica": 4}]


@asynccontextmanager
async def while_one_joins(tmp_path: Path) -> AsyncIterator[tuple[FakeFleet, list[list[FakeShard]]]]:
    """The model of `two_replicas` with both replicas, and a third one whose shards do not answer."""
    async with two_replicas(tmp_path) as (fleet, shards):
        replicas = fleet.control.models["alpha"]["replicas"]
        replicas.append(at(fleet.control, tmp_path / "r5", 5))
        fleet.control.push()
        await fleet.control.heard(ATTACHED, 2)
        replicas.append(at(fleet.control, tmp_path / "r6", 6))
        fleet.control.push()
        await asyncio.sleep(0.1)
        yield fleet, shards


async def test_a_replica_leaves_while_another_one_joins(tmp_path: Path) -> None:
    async with while_one_joins(tmp_path) as (fleet, _):
        fleet.control.models["alpha"]["replicas"][0]["state"] = "draining"
        fleet.control.push()
        assert await fleet.control.heard(RELEASED) == [{"model": "alpha", "replica": 4}]
        assert [place for place, _ in serving(fleet)] == [5]


async def test_a_replica_that_is_back_is_told_while_another_one_joins(tmp_path: Path) -> None:
    async with while_one_joins(tmp_path) as (fleet, _):
        for state in ("lost", "ready"):
            fleet.control.models["alpha"]["replicas"][0]["state"] = state
            fleet.control.push()
            await asyncio.sleep(0.1)
        told = await fleet.control.heard(ATTACHED, 3)
        assert [each["replica"] for each in told] == [4, 5, 4]


async def test_weights_that_need_a_replica_that_joins_are_taken_over_once_it_has(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (fleet, _):
        replicas = fleet.control.models["alpha"]["replicas"]
        replicas[0]["weight"] = 0.0
        replicas.append(at(fleet.control, tmp_path / "r5", 5) | {"state": "starting"})
        fleet.control.push()
        await asyncio.sleep(0.1)
        assert serving(fleet) == [(4, 1.0)]  # it is the only one
        replicas[1]["state"] = "ready"
        fleet.control.push()
        await fleet.control.heard(ATTACHED, 2)

        async def has_weights() -> bool:
            return serving(fleet) == [(4, 0.0), (5, 1.0)]

        await eventually(has_weights, "the weights")
