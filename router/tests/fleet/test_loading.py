"""Loads on demand: one for all requests that wait, held within bounds, ended by what the control plane says."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_control import FakeControl, FakeFleet, fake_fleet
from fakes import FakeEngine, eventually

from funitel.router.fleet.control import LoadRefused
from funitel.router.fleet.loading import Loads

LOAD = "/v1/fleet/load"


def registered(*names: str, **fields: Any) -> Any:
    def prepare(control: FakeControl) -> None:
        control.add("warm", replicas=1)
        for name in names:
            control.add(name, **fields)

    return prepare


async def held(fleet: FakeFleet, name: str, count: int = 1) -> None:
    async def is_held() -> bool:
        return len(fleet.app.state.models._models[name].waiting) == count

    await eventually(is_held, f"{count} wait for {name}")


def message(answer: httpx.Response) -> str:
    text: str = answer.json()["error"]["message"]
    return text


async def test_100_requests_for_one_model_are_one_load(tmp_path: Path) -> None:
    def make(address: str) -> FakeEngine:
        return FakeEngine(max_requests=200)

    async with fake_fleet(tmp_path, prepare=registered("cold"), make=make) as fleet:
        asked = [asyncio.create_task(fleet.generate("cold")) for _ in range(100)]
        await held(fleet, "cold", 100)
        fleet.control.load("cold")
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {200}
        assert fleet.control.told(LOAD) == [{"model": "cold"}]
        assert [each["model"] for each in await fleet.control.heard("/v1/fleet/attached", 2)] == ["warm", "cold"]


async def test_what_another_router_has_admitted_waits_with_however_many_and_without_a_wait(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, prepare=registered("cold"), wait_for_load=0) as fleet:
        models = fleet.app.state.models
        model, loads = models._models["cold"], Loads(models, fleet.app.state.control, 0.0)
        asked = [asyncio.ensure_future(loads.attached(model, 0, was_admitted=True)) for _ in range(2)]
        await held(fleet, "cold", 2)
        fleet.control.load("cold")
        async with asyncio.timeout(5):
            assert await asyncio.gather(*asked) == [model.service] * 2
        await loads.close()


async def test_more_than_may_wait_are_refused(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, prepare=registered("cold"), max_concurrent_requests=3) as fleet:
        asked = [asyncio.create_task(fleet.generate("cold")) for _ in range(3)]
        await held(fleet, "cold", 3)
        refused = await fleet.generate("cold")
        assert refused.status_code == 429
        assert "at most 3 requests wait" in message(refused)
        fleet.control.load("cold")
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


async def test_a_limit_of_the_model_bounds_those_that_wait_and_those_that_run(tmp_path: Path) -> None:
    engines = {"max_requests": 1, "pause": 0.05}
    async with fake_fleet(
        tmp_path, prepare=registered("cold", request_limit=1), make=lambda _: FakeEngine(**engines)
    ) as fleet:
        first = asyncio.create_task(fleet.generate("cold"))
        await held(fleet, "cold")
        assert (await fleet.generate("cold")).status_code == 429
        fleet.control.load("cold")
        await fleet.attached("cold")
        assert fleet.service("cold").settings.max_concurrent_requests == 1
        assert (await first).status_code == 200
        both = await asyncio.gather(fleet.generate("cold"), fleet.generate("cold"))
        assert sorted(answer.status_code for answer in both) == [200, 429]


@pytest.mark.parametrize("wait", [True, False])
async def test_a_server_that_does_not_wait_answers_503_and_loads(tmp_path: Path, wait: bool) -> None:
    settings = {"wait_for_load": 0.0} if wait else {}
    prepare = registered("cold", expected_load_seconds=12.3)
    async with fake_fleet(tmp_path, prepare=prepare, **settings) as fleet:
        fleet.control.wait = wait
        fleet.control.push()
        await asyncio.sleep(0.05)
        answer = await fleet.generate("cold")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "13")
        assert message(answer) == "the model 'cold' is not loaded; its load has begun: it is registered"
        assert answer.json()["error"]["code"] == "model_not_loaded"
        assert fleet.control.told(LOAD) == [{"model": "cold"}]
        fleet.control.load("cold")
        await fleet.attached("cold")
        assert (await fleet.generate("cold")).status_code == 200


async def test_the_wait_ends_after_its_time(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, prepare=registered("cold"), wait_for_load=0.2) as fleet:
        answer = await fleet.generate("cold")
        assert answer.status_code == 503
        assert "is not loaded after 0.2 s" in message(answer)
        late = await fleet.client.post(
            "/v1/completions", json={"model": "cold", "prompt": "Hi"}, headers={"x-request-timeout": "0.1"}
        )
        assert late.status_code == 504
        assert not fleet.app.state.models._models["cold"].waiting


async def test_a_model_that_fails_ends_what_waits_and_can_be_tried_again(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, prepare=registered("cold")) as fleet:
        asked = [asyncio.create_task(fleet.generate("cold")) for _ in range(3)]
        await held(fleet, "cold", 3)
        entry = fleet.control.models["cold"]
        entry["state"] = "loading"
        fleet.control.push()
        entry |= {"state": "failed", "error": "no such file"}
        fleet.control.push()
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 503
            assert message(answer) == "the model 'cold' could not be loaded: no such file"
        again = asyncio.create_task(fleet.generate("cold"))
        await fleet.control.heard(LOAD, 2)
        await asyncio.sleep(0.1)
        assert not again.done()  # the failure of the load before says nothing of this one
        fleet.control.load("cold")
        assert (await again).status_code == 200


async def test_a_failure_that_shows_no_other_state_counts_after_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.router.fleet.loading.STALE_SECONDS", 0.2)
    prepare = registered("cold", state="failed", error="no such file")
    async with fake_fleet(tmp_path, prepare=prepare) as fleet:
        answer = await fleet.generate("cold")
        assert (answer.status_code, message(answer)) == (503, "the model 'cold' could not be loaded: no such file")


async def test_a_failed_model_that_tells_when_to_come_again_is_not_loaded(tmp_path: Path) -> None:
    prepare = registered("cold", state="failed", error="no such file", retry_after=30.0)
    async with fake_fleet(tmp_path, prepare=prepare) as fleet:
        answer = await fleet.generate("cold")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
        assert not fleet.control.told(LOAD)


@pytest.mark.parametrize(("status", "path"), [(507, "/v1/completions"), (404, "/v1/completions"), (507, "/generate")])
async def test_a_refused_load_is_what_the_control_plane_says(tmp_path: Path, status: int, path: str) -> None:
    async with fake_fleet(tmp_path, prepare=registered("cold")) as fleet:
        fleet.control.answers["POST", LOAD] = status, {"error": "it needs 3 GiB, 2 GiB are free"}
        answer = await fleet.client.post(path, json={"model": "cold", "prompt": "Hi", "inputs": "Hi"})
        assert answer.status_code == status
        if status == 507:
            assert "it needs 3 GiB, 2 GiB are free" in answer.text


async def test_a_model_that_is_removed_ends_what_waits(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, prepare=registered("cold", "other")) as fleet:
        asked = asyncio.create_task(fleet.generate("cold"))
        await held(fleet, "cold")
        del fleet.control.models["cold"]
        fleet.control.push()
        answer = await asked
        assert (answer.status_code, message(answer)) == (404, "the model 'cold' was removed")


async def test_a_sleeping_model_is_woken(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, prepare=registered("cold", state="sleeping")) as fleet:
        fleet.control.on_load = fleet.control.load
        assert (await fleet.generate("cold")).status_code == 200
        assert fleet.control.told(LOAD) == [{"model": "cold"}]


async def test_a_client_that_leaves_waits_no_more(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, prepare=registered("cold")) as fleet:
        left = asyncio.Event()
        asked = asyncio.create_task(raw(fleet, b'{"model": "cold", "prompt": "Hi"}', left))
        await held(fleet, "cold")
        left.set()
        await asked
        assert not fleet.app.state.models._models["cold"].waiting
        fleet.control.load("cold")
        await fleet.attached("cold")
        assert not fleet.engine("cold").requests


async def raw(fleet: FakeFleet, body: bytes, left: asyncio.Event) -> None:
    """One request of a client that leaves."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    rest = {"http_version": "1.1", "scheme": "http", "root_path": "", "server": ("localhost", 80), "client": None}
    await fleet.app(scope | rest, receive, send)


async def test_a_load_that_a_new_control_plane_does_not_know_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.router.fleet.loading.REPEAT_SECONDS", 0.1)
    async with fake_fleet(tmp_path, prepare=registered("cold")) as fleet:
        asked = asyncio.create_task(fleet.generate("cold"))
        await fleet.control.heard(LOAD)
        await fleet.control.stop()
        await fleet.control.start()
        await fleet.control.heard(LOAD, 2)
        fleet.control.load("cold")
        assert (await asked).status_code == 200


async def test_a_load_waits_for_a_control_plane_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funitel.router.fleet.loading.RETRY_SECONDS", 0.05)
    async with fake_fleet(tmp_path, prepare=registered("cold")) as fleet:
        await fleet.control.stop()
        asked = asyncio.create_task(fleet.generate("cold"))
        await held(fleet, "cold")
        assert (await fleet.generate("warm")).status_code == 200  # which goes on meanwhile
        fleet.control.on_load = fleet.control.load
        await fleet.control.start()
        assert (await asked).status_code == 200


async def test_a_drain_ends_what_waits_for_a_model(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, prepare=registered("cold")) as fleet:
        asked = asyncio.create_task(fleet.generate("cold"))
        await held(fleet, "cold")
        fleet.app.state.models.drain.begin()
        answer = await asked
        assert answer.status_code == 503
        assert "shutting down" in answer.text


async def test_the_body_of_what_waits_is_received_once_and_used(tmp_path: Path) -> None:
    def prepare(control: FakeControl) -> None:
        control.add("only")

    async with fake_fleet(tmp_path, prepare=prepare) as fleet:
        asked = asyncio.create_task(fleet.generate("whatever", prompt="Hello"))
        await held(fleet, "only")
        fleet.control.load("only")
        answer = await asked
        assert answer.json()["usage"]["prompt_tokens"] == 6


async def test_who_comes_after_the_first_has_left_hears_of_the_failure_too(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, prepare=registered("cold")) as fleet:
        await fleet.control.stop()
        left = asyncio.Event()
        first = asyncio.create_task(raw(fleet, b'{"model": "cold", "prompt": "Hi"}', left))
        await held(fleet, "cold")
        left.set()
        await first
        second = asyncio.create_task(fleet.generate("cold"))
        await held(fleet, "cold")
        await fleet.control.start()
        await fleet.control.heard(LOAD)
        entry = fleet.control.models["cold"]
        entry["state"] = "loading"
        fleet.control.push()
        await asyncio.sleep(0.05)
        entry |= {"state": "failed", "error": "no such file"}
        fleet.control.push()
        answer = await asyncio.wait_for(second, 5)
        assert (answer.status_code, message(answer)) == (503, "the model 'cold' could not be loaded: no such file")


async def test_a_server_that_does_not_wait_says_of_no_load_that_it_has_begun_unless_it_has(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, prepare=registered("cold"), wait_for_load=0.0) as fleet:
        await fleet.control.stop()
        for _ in range(3):
            answer = await fleet.generate("cold")
            assert answer.status_code == 503
            assert "the control plane does not answer" in message(answer)
        await fleet.control.start()
        assert "its load has begun" in message(await fleet.generate("cold"))
        assert fleet.control.told(LOAD) == [{"model": "cold"}]


async def test_a_request_that_comes_with_the_refusal_of_another_asks_anew(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, prepare=registered("cold")) as fleet:
        fleet.control.answers["POST", LOAD] = 507, {"error": "it needs 3 GiB, 2 GiB are free"}
        models = fleet.app.state.models
        model, loads = models._models["cold"], Loads(models, fleet.app.state.control, 600.0)
        first = asyncio.create_task(loads.attached(model, 9))
        await asyncio.sleep(0)
        [waiting] = model.waiting

        async def second() -> None:
            with pytest.raises(LoadRefused):
                await waiting
            await loads.attached(model, 9)

        async with asyncio.timeout(5):
            with pytest.raises(LoadRefused):
                await second()
        with pytest.raises(LoadRefused):
            await first
        assert len(fleet.control.told(LOAD)) == 2
        await loads.close()
