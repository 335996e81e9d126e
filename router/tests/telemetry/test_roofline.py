"""What decoding steps had to read, against the time they took."""

from pathlib import Path

import pytest
from fake_shards import fake_shards
from fakes import FakeEngine, Serve
from prometheus_client import CollectorRegistry, generate_latest

from funitel.proto.errors import SettingsError
from funitel.proto.step import ShardMemory, StepResult
from funitel.router.connect import connect
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.telemetry.roofline import Roofline
from funitel_testing.servers import samples_of

MS = 1_000_000  # nanoseconds


def roofline(roof: float | None = None) -> tuple[Roofline, CollectorRegistry]:
    registry = CollectorRegistry()
    made = Roofline(registry)
    made.roof = roof
    return made, registry


def shown(registry: CollectorRegistry) -> dict[str, float]:
    return samples_of(generate_latest(registry).decode())


def step(milliseconds: int) -> StepResult:
    return StepResult((), None, forward_ns=milliseconds * MS)


def test_a_step_reads_the_weights_and_what_its_sequences_have_computed() -> None:
    made, registry = roofline(roof=40e9)
    made.set_reads(0, 100_000_000, 1000.0)
    for _ in range(10):
        made.observe(0, 20_000, [step(4)])
    found = shown(registry)
    assert found['funitel_decode_read_bytes_total{rank="0"}'] == pytest.approx(10 * 120e6)
    assert found['funitel_decode_read_seconds_total{rank="0"}'] == pytest.approx(0.04)
    assert found['funitel_decode_bandwidth_bytes_per_second{rank="0"}'] == pytest.approx(30e9)
    assert found['funitel_decode_bandwidth_share{rank="0"}'] == pytest.approx(0.75)
    assert found["funitel_memory_bandwidth_bytes_per_second"] == 40e9


def test_without_a_roof_there_is_no_share() -> None:
    made, registry = roofline()
    made.set_reads(0, 100_000_000, 0.0)
    made.observe(0, 0, [step(5)])
    assert not [name for name in shown(registry) if "share" in name or "memory_bandwidth" in name]


def test_what_was_long_ago_does_not_count_as_recent() -> None:
    made, registry = roofline()
    made.set_reads(0, 100_000_000, 0.0)
    for _ in range(50):
        made.observe(0, 0, [step(50)])
    for _ in range(500):
        made.observe(0, 0, [step(5)])
    assert shown(registry)['funitel_decode_bandwidth_bytes_per_second{rank="0"}'] == pytest.approx(20e9, rel=0.02)


def test_ranks_of_replicas_are_numbered_through_and_steps_without_a_time_say_nothing() -> None:
    metrics = Metrics()
    metrics.child(0, 2)
    second = metrics.child(1, 2)
    second.set_reads(1, 100, 0.0)
    second.observe_decode(0, [step(0), step(1)])
    second.observe_decode(0, [step(1), step(0)])
    second.set_memory(1, ShardMemory(7, 9))
    found = samples_of(metrics.exposition().decode())
    assert found['funitel_decode_read_bytes_total{rank="3"}'] == 100
    assert found['funitel_memory_bytes{kind="peak",rank="3"}'] == 9
    second.retire()
    assert samples_of(metrics.exposition().decode())['funitel_memory_bytes{kind="peak",rank="3"}'] == 0


async def test_the_page_of_metrics_tells_what_shards_hold_now(serve: Serve, tmp_path: Path) -> None:
    async with fake_shards(tmp_path) as (shard,):
        flags = {"master_shard_uds_path": f"{tmp_path}/shard-0", "memory_bandwidth": 31.1}
        async with serve(FakeEngine(), connect=connect, **flags) as client:
            shard.resident_bytes = 1234
            found = samples_of((await client.get("/metrics")).text)
            assert found['funitel_memory_bytes{kind="resident",rank="0"}'] == 1234
            assert found["funitel_memory_bandwidth_bytes_per_second"] == pytest.approx(31.1e9)
            shard.is_well.clear()  # it hangs: the page comes all the same
            assert (await client.get("/metrics")).status_code == 200
            shard.is_well.set()


@pytest.mark.parametrize("given", [0.0, -1.0, 1e7, float("nan")])
def test_a_roof_has_bounds(given: float) -> None:
    with pytest.raises(SettingsError, match="--memory-bandwidth must be > 0 and <= 1000000, given"):
        RouterSettings(memory_bandwidth=given)
