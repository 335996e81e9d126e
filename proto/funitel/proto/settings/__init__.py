"""Settings as frozen dataclasses rendered as typer commands."""
