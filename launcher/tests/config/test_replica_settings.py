"""What each replica gets for itself."""

from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.replica_settings import environ_of_replica, further_addresses, settings_of_replica
from funitel.launcher.config.resolve import ResolvedSettings, resolve
from funitel.launcher.config.sockets import claim, free_ports
from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import SettingsError


def resolved(gpus: tuple[str, ...] = (), **settings: Any) -> ResolvedSettings:
    chosen = LauncherSettings(**({"num_replicas": 3, "num_shard": 2} | settings))
    return resolve(chosen, 2, "/tmp/path", gpus)


def test_an_only_replica_has_what_the_deployment_has() -> None:
    settings = resolved(num_replicas=1)
    assert settings_of_replica(settings, 0) == settings
    assert environ_of_replica(settings, {"CUDA_VISIBLE_DEVICES": "3"}, 0) == {"CUDA_VISIBLE_DEVICES": "3"}
    assert further_addresses(settings) == ()


def test_sockets_and_ports_differ() -> None:
    settings = resolved()
    each = [settings_of_replica(settings, replica) for replica in range(3)]
    assert [one.shard_uds_path for one in each] == ["/tmp/path", "/tmp/path-replica-1", "/tmp/path-replica-2"]
    assert len({one.master_port for one in each}) == 3
    assert further_addresses(settings) == ("unix:///tmp/path-replica-1-0", "unix:///tmp/path-replica-2-0")


def test_a_given_port_is_the_first_of_several() -> None:
    settings = resolved(master_port=4000)
    assert [settings_of_replica(settings, replica).master_port for replica in range(3)] == [4000, 4001, 4002]
    with pytest.raises(SettingsError, match=r"--master-port must be within 0..65533, given 65534"):
        resolved(master_port=65534)


def test_the_cores_are_shared_out_over_all_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(24)))
    assert (resolved().num_threads, resolved().most_threads) == (None, 4)
    assert (resolved(num_threads=7).num_threads, resolved(num_threads=7).most_threads) == (7, None)


def test_the_shards_of_a_replica_are_told_how_many_share_the_host() -> None:
    settings = resolved(cuda_memory_fraction=0.75)
    shared = settings_of_replica(settings, 1)
    assert (settings.replicas_on_host, shared.replicas_on_host, shared.cuda_memory_fraction) == (1, 3, 0.75)
    argv = Commands().shard(shared, Path("/model"), 0)
    assert argv[argv.index("--replicas-on-host") + 1] == "3"


def test_each_replica_sees_its_own_gpus() -> None:
    settings = resolved(("0", "1", "GPU-x", "3", "4", "5"))
    seen = [environ_of_replica(settings, {"A": "b"}, replica) for replica in range(3)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen] == ["0,1", "GPU-x,3", "4,5"]
    assert all(one["A"] == "b" for one in seen)
    assert environ_of_replica(resolved(), {"A": "b"}, 1) == {"A": "b"}


@pytest.mark.parametrize("num_replicas", [0, -1])
def test_less_than_one_replica_is_refused(num_replicas: int) -> None:
    with pytest.raises(SettingsError, match=f"--num-replicas must be >= 1, given {num_replicas}"):
        LauncherSettings(num_replicas=num_replicas)


def test_sockets_of_every_replica_are_claimed_and_removed(tmp_path: Any) -> None:
    base = tmp_path / "s"
    names = [f"s{middle}-{rank}" for middle in ("", "-replica-1") for rank in (0, 1)]
    for name in names:
        (tmp_path / name).touch()
    with claim(str(base), 2, 2):
        assert [path.name for path in tmp_path.iterdir()] == ["s.lock"]
        for name in names:
            (tmp_path / name).touch()
    assert list(tmp_path.iterdir()) == []


def test_the_longest_path_of_all_replicas_counts() -> None:
    base = "/tmp/" + "x" * 92
    with claim(base, 1):
        pass
    with pytest.raises(SettingsError, match="--shard-uds-path .* is too long"), claim(base, 1, 2):
        pass


def test_free_ports_differ() -> None:
    assert len(set(free_ports(50))) == 50
