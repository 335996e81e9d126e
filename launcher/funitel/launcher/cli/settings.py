"""Settings of the command-line clients."""

from dataclasses import dataclass
from typing import Any

from funitel.launcher.terminal_ui.http_client import check_client_tls
from funitel.model_server.settings.catalogue import model_names
from funitel.proto.settings.bounds import AT_LEAST_ONE, Bounds
from funitel.proto.settings.fields import check_bounds, require, setting

MIN_INTERVAL, MAX_INTERVAL = 0.1, 3600.0


def _given(help: str, **more: Any) -> Any:
    """A flag without an environment variable; the server decides if it is not given."""
    return setting(None, help, env=None, **more)


def _api_key() -> Any:
    return setting(
        None,
        "Bearer token for the server; that of a variable goes to this machine and, if it is FUNITEL_API_KEY, to the "
        "server of FUNITEL_URL.",
        keeps_variable=True,
    )


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Settings common to chat and generate."""

    url: str | None = setting(
        None,
        "URL of the server; when not given, http://127.0.0.1:3000, or a temporary server that is started.",
        env="FUNITEL_URL",
    )
    model_id: str | None = _given(
        "Model to use; a running server is used only if it serves this model.", complete=model_names
    )
    api_key: str | None = _api_key()
    tls_ca: str | None = _given("PEM file of authorities to trust for an https server; the system's when not given.")
    tls_cert: str | None = _given("PEM file of a certificate to show to the server.")
    tls_key: str | None = _given("PEM file of the key of --tls-cert.")
    max_tokens: int = setting(1024, "Maximum of tokens in an answer.", env=None, bounds=AT_LEAST_ONE)
    temperature: float | None = _given("Sampling temperature; 0 means greedy.", bounds=Bounds(minimum=0, maximum=100))
    top_p: float | None = _given("Sample from the likeliest tokens with this total probability.")
    seed: int | None = _given("The same seed gives the same answer.", bounds=Bounds(minimum=0, maximum=2**64 - 1))

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
    """Stream one completion of a prompt to stdout."""

    prompt: str
    max_tokens: int = setting(256, "Maximum of tokens in the completion.", env=None, bounds=AT_LEAST_ONE)
    top_k: int | None = _given("Sample from this number of the likeliest tokens.", bounds=AT_LEAST_ONE)
    stop: tuple[str, ...] = setting((), "Text that ends the completion, repeatable.", env=None)
    json: bool = setting(False, "Write one JSON object at the end instead of streamed text.", env=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(all(self.stop), "--stop must not be empty")


@dataclass(frozen=True, kw_only=True)
class TopSettings:
    """Show running and waiting sequences of a server, its KV pool and its last steps; q quits."""

    url: str | None = setting(
        None,
        "URL of a server; http://127.0.0.1:3000 when not given.",
        env="FUNITEL_URL",
    )
    api_key: str | None = _api_key()
    tls_ca: str | None = _given("PEM file of authorities to trust for an https server; the system's when not given.")
    tls_cert: str | None = _given("PEM file of a certificate to show to the server.")
    tls_key: str | None = _given("PEM file of the key of --tls-cert.")
    interval: float = setting(1.0, "Seconds between two updates.", env=None)
    once: bool = setting(False, "Print the state once.", env=None)
    json: bool = setting(False, "Print JSON, one object a line, instead of text.", env=None)

    def __post_init__(self) -> None:
        check_client_tls(self, self.url)
        require(
            MIN_INTERVAL <= self.interval <= MAX_INTERVAL,
            f"--interval must be within {MIN_INTERVAL:g}..{MAX_INTERVAL:g}, given {self.interval:g}",
        )
