"""The stream of snapshots breaks and returns; what was said last holds meanwhile, and is answered again."""

import asyncio
from pathlib import Path

import httpx
import pytest
from fake_control import FakeControl, fake_fleet
from fakes import FakeEngine, eventually

from funitel.proto.errors import NotReady, SettingsError
from funitel.router.app import build_app
from funitel.router.fleet.control import ControlSocket
from funitel.router.fleet.snapshot import FleetSnapshot
from funitel.router.fleet.watch import RECONNECT_SECONDS, watch
from funitel.router.settings import RouterSettings

ATTACHED, ACTIVITY = "/v1/fleet/attached", "/v1/fleet/activity"


async def test_models_go_on_while_the_control_plane_is_away(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta") as fleet:
        await fleet.control.heard(ATTACHED, 2)
        engine = fleet.engine("alpha")
        for _ in range(2):
            await fleet.control.stop()
            assert (await fleet.generate("alpha")).status_code == 200
            assert (await fleet.client.get("/health")).status_code == 200
            assert [each["id"] for each in (await fleet.client.get("/v1/models")).json()["data"]] == ["alpha", "beta"]
            fleet.control.asked.clear()
            await fleet.control.start()
            told = await fleet.control.heard(ATTACHED, 2)
            assert sorted(each["model"] for each in told) == ["alpha", "beta"]
            activity = await fleet.control.heard(ACTIVITY)
            assert sorted(activity[0]["models"]) == ["alpha", "beta"]
        assert fleet.engine("alpha") is engine


async def test_a_line_that_is_no_snapshot_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta") as fleet:
        fleet.control.models["alpha"]["replicas"] = "none"
        fleet.control.push()

        async def is_logged() -> bool:
            return "no snapshot" in caplog.text

        await eventually(is_logged, "logged")
        assert (await fleet.generate("alpha")).status_code == 200


async def test_activity_is_reported_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funitel.router.fleet.activity.REPORT_SECONDS", 0.05)
    async with fake_fleet(tmp_path, "alpha", "beta", make=lambda _: FakeEngine(pause=0.05)) as fleet:
        fleet.control.add("cold")
        fleet.control.push()
        await asyncio.sleep(0.2)
        fleet.control.asked.clear()
        waits = asyncio.create_task(fleet.generate("cold"))
        await fleet.generate("alpha")
        await asyncio.sleep(0.2)
        said = [each["models"] for each in fleet.control.told(ACTIVITY)]
        of_alpha = [each["alpha"] for each in said if "alpha" in each]
        assert {"running": 1, "waiting": 0, "idle_s": 0.0, "requests": 1} in of_alpha
        assert (of_alpha[-1]["running"], of_alpha[-1]["requests"]) == (0, 1)
        assert not any("beta" in each for each in said)
        assert any(each.get("cold", {}).get("waiting") == 1 for each in said)
        count = len(fleet.control.told(ACTIVITY))
        await asyncio.sleep(0.2)
        assert len(fleet.control.told(ACTIVITY)) == count
        waits.cancel()


async def test_health_waits_for_the_control_plane(tmp_path: Path) -> None:
    app = build_app(
        RouterSettings(control_socket=str(tmp_path / "none.sock"), no_model=True),
        FakeEngine().connect,
        connect_replicas=FakeEngine().connect,  # type: ignore[arg-type]
    )
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/health/live")).status_code == 200
            answer = await client.post("/v1/completions", json={"model": "alpha", "prompt": "Hi"})
            assert answer.status_code == 503
            assert "waiting for the control plane" in answer.text
            assert not app.state.models.is_started


async def test_a_loss_is_logged_but_no_late_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    control = FakeControl(path=tmp_path / "late.sock", folder=tmp_path)
    taken: list[FleetSnapshot] = []
    watching = asyncio.create_task(watch(ControlSocket(str(control.path)), taken.append, lambda: None))
    for count in (1, 2, 3):
        await asyncio.sleep(2 * RECONNECT_SECONDS)  # not there at first, away afterwards
        await control.start()

        async def is_taken(count: int = count) -> bool:
            return len(taken) >= count

        await eventually(is_taken, "taken")
        await control.stop()
    watching.cancel()
    assert caplog.messages.count("the control plane answers again") == 2
    assert "stay as they are" in caplog.messages[0]


async def test_a_socket_that_nobody_listens_on_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="the control plane does not answer"):
        await ControlSocket(str(tmp_path / "none.sock")).ask("GET", "/v1/models")


def test_a_router_without_a_model_needs_a_control_plane() -> None:
    with pytest.raises(SettingsError, match="--no-model needs --control-socket"):
        RouterSettings(no_model=True)
