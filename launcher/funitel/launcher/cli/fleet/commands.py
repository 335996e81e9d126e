"""The commands of this package: name, summary, settings, function and arguments of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

TITLE = "Models and users of a running server"
_PACKAGE = "cli.fleet"
_NAME = {"name": "Name of the model."}


@dataclass(frozen=True)
class FleetCommand:
    """One command: the names of its settings and of its function, as `module:name` in this package."""

    summary: str
    settings: str
    run: str
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings_path(self) -> str:
        """The settings, as `module:name` in the launcher."""
        return f"{_PACKAGE}.settings:{self.settings}"

    @property
    def run_path(self) -> str:
        """The function, as `module:name` in the launcher."""
        return f"{_PACKAGE}.{self.run}"


FLEET_COMMANDS: Mapping[str, FleetCommand] = {
    "launch": FleetCommand(
        "Launch a model on a running server.",
        "LaunchSettings",
        "launch:launch",
        {"model": "Catalogue name, hub repository, path on the server, or name of a registration."},
    ),
    "list": FleetCommand("List the models of a server.", "ListSettings", "models:list_all"),
    "terminate": FleetCommand("End a model of a server.", "TerminateSettings", "models:terminate", _NAME),
    "cancel": FleetCommand("Cancel the launch of a model.", "CancelSettings", "models:cancel", _NAME),
    "load": FleetCommand("Load a model that a server knows.", "LoadSettings", "launch:load", _NAME),
    "unload": FleetCommand("Free the memory of a model.", "UnloadSettings", "models:unload", _NAME),
    "sleep": FleetCommand("Free the KV memory of a model.", "SleepSettings", "models:sleep", _NAME),
    "wake": FleetCommand("Wake a model that sleeps.", "WakeSettings", "models:wake", _NAME),
    "replicas": FleetCommand("List, add or remove replicas of a model.", "ReplicasSettings", "models:replicas", _NAME),
    "register": FleetCommand(
        "Register a custom model.",
        "RegisterSettings",
        "registrations:register",
        {"file": "JSON file that describes the model."},
    ),
    "unregister": FleetCommand(
        "Remove a registration.", "UnregisterSettings", "registrations:unregister", {"name": "Name of the model."}
    ),
    "registrations": FleetCommand("List custom models.", "RegistrationsSettings", "registrations:registrations"),
    "cached": FleetCommand("List the models on the disk.", "ListCachedSettings", "cache:cached"),
    "remove": FleetCommand(
        "Delete a model from the disk.", "RemoveSettings", "cache:remove", {"name": "Name, as `cached` lists it."}
    ),
    "workers": FleetCommand("List the machines of a server.", "WorkersSettings", "models:workers"),
}
