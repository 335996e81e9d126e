"""Every setting of the clients."""

from dataclasses import dataclass
from typing import Any

from funitel.launcher.terminal_ui.http_client import check_client_tls
from funitel.proto.settings.bounds import AT_LEAST_ONE, Bounds
from funitel.proto.settings.fields import check_bounds, require, setting

LEAST_INTERVAL, MOST_INTERVAL = 0.1, 3600.0


def _given(help: str, **more: Any) -> Any:
    """A flag without a variable that is left to the server unless given."""
    return setting(None, help, env=None, **more)


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """What both clients can be told."""

    url: str | None = _given(
        "Server to ask; the one on port 3000 of this machine, or one started for the occasion, when not given."
    )
    model_id: str | None = _given("Model to ask: a server that runs is asked only if it serves it.")
    api_key: str | None = setting(None, "Bearer token that the server wants.")
    tls_ca: str | None = _given(
        "PEM file of authorities that an https server is trusted by; the system's when not given."
    )
    tls_cert: str | None = _given("PEM file of a certificate to show to the server.")
    tls_key: str | None = _given("PEM file of the key of --tls-cert.")
    max_tokens: int = setting(1024, "Most tokens of an answer.", env=None, bounds=AT_LEAST_ONE)
    temperature: float | None = _given(
        "How freely tokens are drawn; 0 takes the likeliest.", bounds=Bounds(least=0, most=100)
    )
    top_p: float | None = _given("Draw among the likeliest tokens that have this probability together.")
    seed: int | None = _given("The same seed gives the same answer.", bounds=Bounds(least=0, most=2**64 - 1))

    def __post_init__(self) -> None:
        check_client_tls(self, self.url)
        check_bounds(self)
        require(self.top_p is None or 0 < self.top_p <= 1, f"--top-p must be within (0, 1], given {self.top_p}")


@dataclass(frozen=True, kw_only=True)
class ChatSettings(ClientSettings):
    """Chat with a model in the terminal, or line by line from a pipe."""

    system: str | None = _given("System prompt.")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(ClientSettings):
    """Write one completion of a prompt to stdout, as it comes."""

    prompt: str
    max_tokens: int = setting(256, "Most tokens of the completion.", env=None, bounds=AT_LEAST_ONE)
    top_k: int | None = _given("Draw among so many of the likeliest tokens.", bounds=AT_LEAST_ONE)
    stop: tuple[str, ...] = setting((), "Text that ends the completion, repeatable.", env=None)
    json: bool = setting(False, "Write one JSON object at the end instead of text as it comes.", env=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(all(self.stop), "--stop must not be empty")


@dataclass(frozen=True, kw_only=True)
class TopSettings:
    """Show who runs and who waits on a server, its pool and its last steps; q leaves."""

    url: str | None = _given("Server to show, started with --debug-routes; the one on port 3000 when not given.")
    api_key: str | None = setting(None, "Bearer token that the server wants.")
    tls_ca: str | None = _given(
        "PEM file of authorities that an https server is trusted by; the system's when not given."
    )
    tls_cert: str | None = _given("PEM file of a certificate to show to the server.")
    tls_key: str | None = _given("PEM file of the key of --tls-cert.")
    interval: float = setting(1.0, "Seconds between two looks.", env=None)
    once: bool = setting(False, "Look once, and print it.", env=None)
    json: bool = setting(False, "Print JSON, one object a line, instead of text.", env=None)

    def __post_init__(self) -> None:
        check_client_tls(self, self.url)
        require(
            LEAST_INTERVAL <= self.interval <= MOST_INTERVAL,
            f"--interval must be within {LEAST_INTERVAL:g}..{MOST_INTERVAL:g}, given {self.interval:g}",
        )
