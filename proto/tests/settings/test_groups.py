"""Every setting has one group, and the table of groups names nothing else."""

from dataclasses import fields
from typing import Any

import pytest

from funitel.launcher.bench.settings import BenchSettings
from funitel.launcher.cli.fleet import settings as fleet
from funitel.launcher.cli.keys import GroupKeySettings, NewKeySettings
from funitel.launcher.cli.settings import ChatSettings, GenerateSettings, TopSettings
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.up.settings import DownSettings
from funitel.launcher.worker.settings import WorkerSettings
from funitel.model_server.settings import ARGUMENTS
from funitel.proto.settings.groups import COMMON, GROUP_OF, GROUPS
from funitel.router.settings import RouterSettings

LAUNCHER: tuple[type[Any], ...] = (
    LauncherSettings,
    ChatSettings,
    GenerateSettings,
    TopSettings,
    BenchSettings,
    NewKeySettings,
    GroupKeySettings,
    DownSettings,
    WorkerSettings,
)
FLEET: tuple[type[Any], ...] = tuple(
    each for each in vars(fleet).values() if isinstance(each, type) and issubclass(each, fleet.FleetClientSettings)
)
PROGRAMS = (*LAUNCHER, *FLEET, RouterSettings, *ARGUMENTS)
OF_THE_MODEL = {"engine", "partition", "layers"}  # in the group of the flag of serve
OF_EVERY_PROGRAM = {"help", "version"}


def names(cls: type[Any]) -> set[str]:
    return {field.name for field in fields(cls) if "setting" in field.metadata}


@pytest.mark.parametrize("cls", PROGRAMS, ids=lambda cls: cls.__name__)
def test_every_setting_has_a_group(cls: type[Any]) -> None:
    assert names(cls) - GROUP_OF.keys() - OF_THE_MODEL == set()


def test_the_table_names_settings_once_and_nothing_else() -> None:
    rows = [name for group in GROUPS for name in (*group.common, *group.others)]
    assert sorted(rows) == sorted(set(rows))
    known = set().union(*map(names, PROGRAMS))
    assert set(rows) - OF_EVERY_PROGRAM <= known
    assert known - OF_THE_MODEL <= set(rows)
    assert set(rows) >= COMMON
    assert len({group.name for group in GROUPS}) == len({group.title for group in GROUPS}) == len(GROUPS)
