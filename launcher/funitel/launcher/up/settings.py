"""Settings of `funitel up` and `funitel down`.

The flags of `up` are those of `serve`, but for what one model alone has: what they say of shards holds for every model
that does not say otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

from funitel.launcher.settings import LauncherSettings
from funitel.proto.settings.bounds import Bounds
from funitel.proto.settings.fields import check_bounds, setting

ONE_MODEL = frozenset(
    "model_id revision served_model_name num_replicas shard_uds_path master_port master_addr address_file config env "
    "lora_adapters draft_model tokenizer_config_path model_spec max_input_length".split()
)
"""Flags of `serve` that `up` has not: they are for one model, or for a launcher that serves one."""

CONFIG = "config"
_STATE_DIR = (
    "Folder of the state, which the next start goes on with; ~/.local/state/funitel/PORT, or below XDG_STATE_HOME, "
    "when not given."
)
_CHANGED: Mapping[str, Any] = {"state_dir": setting(None, _STATE_DIR)}


def _inherited() -> list[tuple[str, Any, Any]]:
    hints = get_type_hints(LauncherSettings)
    found = []
    for each in fields(LauncherSettings):
        if each.name not in ONE_MODEL:
            made = _CHANGED.get(each.name) or field(default=each.default, metadata=each.metadata)
            found.append((each.name, hints[each.name], made))
    return found


_CONFIG_FIELD = setting(
    None, "TOML file of flags and of models to load, see docs/restarts.md; flags and the environment override it."
)

UpSettings: Any = make_dataclass(
    "UpSettings",
    [(CONFIG, str | None, _CONFIG_FIELD), *_inherited()],
    frozen=True,
    kw_only=True,
    namespace={
        "__doc__": "Serve many models on one port: they are launched, listed and terminated while it runs.",
        "__post_init__": lambda self: check_bounds(self),
        "__module__": __name__,
    },
)


def launcher_settings(settings: Any) -> LauncherSettings:
    """The settings of a launcher that those of `up` are; raises SettingsError."""
    given = {each.name: getattr(settings, each.name) for each in fields(settings) if each.name != CONFIG}
    return LauncherSettings(**given)


@dataclass(frozen=True, kw_only=True)
class DownSettings:
    """Stop a server that `funitel up` has started, its models included, also when its control plane is dead."""

    state_dir: str | None = setting(None, _STATE_DIR)
    port: int = setting(3000, "Port of the server.", short="-p", bounds=Bounds(minimum=0, maximum=65535))
    database: str | None = setting(None, "Database of the server, if it has one.")
    graceful_termination_timeout: int = setting(
        90, "Seconds that each process has to stop before it is killed.", short="-g", bounds=Bounds(minimum=0)
    )
    log_level: str = setting("warning", "Minimum log level: debug, info, warning, error.", env=None)

    def __post_init__(self) -> None:
        check_bounds(self)
