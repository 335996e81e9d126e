"""Faults of the network: hosts that do not reach each other, names that do not resolve."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path

from funitel_testing.faults.scenes import BOUND, BOUND_SECONDS, ByHand, standing
from funitel_testing.faults.table import Cost, Fault

SHORT_CUT_SECONDS = 3.0  # well below the bound
LONG_CUT_SECONDS = 3 * BOUND_SECONDS
NAMES = ("shard-a.test", "shard-b.test")
HOSTS = Path("/etc/hosts")


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True, timeout=20)


class FarHost:
    """A network namespace of its own, one cable away: another host as far as TCP can tell."""

    def __init__(self) -> None:
        number = os.getpid() % 250
        self.name = f"funitel-{os.getpid()}"
        self.address = f"10.213.{number}.2"
        near, self._far = f"fn{os.getpid()}", f"ff{os.getpid()}"
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", near, "type", "veth", "peer", "name", self._far, "netns", self.name)
            _ip("address", "add", f"10.213.{number}.1/30", "dev", near)
            _ip("link", "set", near, "up")
            self._inside("address", "add", f"{self.address}/30", "dev", self._far)
            self._inside("link", "set", "lo", "up")
            self.join()
        except BaseException:
            self.remove()
            raise

    @property
    def entrance(self) -> tuple[str, ...]:
        """The command line that runs another there."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """Drop every packet silently."""
        self._inside("link", "set", self._far, "down")

    def join(self) -> None:
        """Let packets through again."""
        self._inside("link", "set", self._far, "up")

    def _inside(self, *words: str) -> None:
        _ip("-n", self.name, *words)

    def remove(self) -> None:
        """Take it away, cable and all."""
        _ip("netns", "delete", self.name)


@cache
def _no_far_host() -> str:
    try:
        FarHost().remove()
    except (OSError, subprocess.SubprocessError):
        return "no network namespace can be made here"
    return ""


class TwoHosts(ByHand):
    """A router and a shard here, a replica far away."""

    def __init__(self, model: Path, folder: Path, far: FarHost) -> None:
        super().__init__(model, folder, hosts=(far.address, "127.0.0.1"), inside=(far.entrance, ()), router_flags=BOUND)
        self.far = far


@contextmanager
def _two_hosts(model: Path, folder: Path) -> Iterator[TwoHosts]:
    far = FarHost()
    try:
        found = TwoHosts(model, folder, far)
        try:
            found.until_whole()
            yield found
        finally:
            with suppress(subprocess.SubprocessError):
                far.join()
            found.close()
    finally:
        far.remove()


async def _cut_shortly(scene: TwoHosts) -> None:
    scene.far.cut()
    await asyncio.sleep(SHORT_CUT_SECONDS)
    scene.far.join()


async def _cut_for_long(scene: TwoHosts) -> None:
    scene.far.cut()
    await asyncio.sleep(LONG_CUT_SECONDS)
    scene.far.join()


# Names --------------------------------------------------------------------------------------------------------------


@cache
def _no_own_names() -> str:
    if subprocess.run(("unshare", "--mount", "true"), capture_output=True).returncode:
        return "no mount namespace can be made here"
    return ""


class Named(ByHand):
    """Replicas that the router knows by names, which can be made to mean nothing."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._names = folder / "hosts"
        self.name()
        own_names = f'mount --bind {self._names} {HOSTS} && exec "$@"'
        super().__init__(
            model,
            folder,
            hosts=NAMES,
            addresses=("127.0.0.1", "127.0.0.1"),
            router_inside=("unshare", "--mount", "sh", "-c", own_names, "sh"),
            router_flags=("--otlp-endpoint", "http://collector.test:4317"),
        )

    def name(self) -> None:
        """Let the names mean this host."""
        self._names.write_text(HOSTS.read_text() + "".join(f"127.0.0.1 {name}\n" for name in NAMES))

    def forget(self) -> None:
        """Let them mean nothing."""
        self._names.write_text("")


def _named(model: Path, folder: Path) -> AbstractContextManager[Named]:
    return standing(Named(model, folder))


async def _forget_and_kill(scene: Named) -> None:
    """Let names fail, and a replica with them, which is started again at once."""
    scene.forget()
    scene.shards[0].process.kill()
    scene.shards[0].process.wait()
    scene.shards[0].start_again()
    await asyncio.sleep(SHORT_CUT_SECONDS)
    scene.name()


FAULTS = (
    Fault(
        name=f"no network to the host of a replica for {SHORT_CUT_SECONDS:g} s, less than the bound",
        cost=Cost.NOTHING,
        why="its streams pause; TCP sends again what was not received",
        scene=_two_hosts,
        strike=_cut_shortly,
        obstacle=_no_far_host,
    ),
    Fault(
        name=f"no network to the host of a replica for {LONG_CUT_SECONDS:g} s, more than the bound",
        cost=Cost.NOTHING,
        why="the other replica goes on with what it had, and it joins again",
        scene=_two_hosts,
        strike=_cut_for_long,
        obstacle=_no_far_host,
        is_brief=False,
    ),
    Fault(
        name="the names of replicas and of the trace collector do not resolve, and a replica is killed",
        cost=Cost.NOTHING,
        why="connections outlive the names they were made by; spans are dropped",
        scene=_named,
        strike=_forget_and_kill,
        obstacle=_no_own_names,
        is_brief=False,
    ),
)
