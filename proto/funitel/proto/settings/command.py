"""A typer command that reads settings from the environment, without values that other software left there."""

import os
from typing import Any

from typer.core import TyperCommand

from funitel.proto.settings.variables import disregarded, overlaid


class SettingsCommand(TyperCommand):
    """The command class of `fields.as_command`: variables that `variables.disregarded` names are not read."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with overlaid(os.environ, dict.fromkeys(disregarded(os.environ))):
            return self.parse_settings(ctx, args)

    def parse_settings(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the flags, and the variables that count."""
        return super().parse_args(ctx, args)
