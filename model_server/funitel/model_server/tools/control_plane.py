"""The tools that a control plane runs: the models on the disk, and whether a file is a spec."""

from pathlib import Path

from funitel.model_server.settings import CheckSpecSettings
from funitel.model_server.spec.json_file import read_spec
from funitel.model_server.tools.cache.command import list_cached, remove_cached

__all__ = ["check_spec", "list_cached", "remove_cached"]


def check_spec(settings: CheckSpecSettings) -> str:
    """Check that a file describes a model that can be; raises SettingsError, which names the field."""
    read_spec(Path(settings.path))
    return f"ok: {settings.path} describes a model"
