"""Settings: frozen dataclasses, rendered as typer commands."""
