"""Settings of the commands that change the models of a running server."""

from dataclasses import dataclass
from typing import Any

from funitel.launcher.terminal_ui.http_client import check_client_tls
from funitel.model_server.settings import DTYPES, QUANTIZATIONS
from funitel.proto.settings.bounds import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE
from funitel.proto.settings.fields import check_bounds, require, setting

ENGINES, EXECUTORS = ("native", "transformers", "llama_cpp"), ("local", "worker", "ray")
MODEL_TYPES = ("LLM", "embedding", "rerank")


def given(help: str, **more: Any) -> Any:
    """A flag without an environment variable; the server decides if it is not given."""
    return setting(None, help, env=None, **more)


def switch(help: str) -> Any:
    """A flag that turns something on, without an environment variable."""
    return setting(False, help, env=None)


def _type() -> Any:
    return setting("LLM", "Type of the model.", choices=MODEL_TYPES, env=None)


def json_switch() -> Any:
    """--json."""
    return switch("Print JSON instead of text.")


@dataclass(frozen=True, kw_only=True)
class FleetClientSettings:
    """Which server."""

    url: str | None = setting(
        None,
        "URL of the server, or unix:///path of its control socket; http://127.0.0.1:3000 when not given.",
        env="FUNITEL_URL",
    )
    api_key: str | None = setting(
        None,
        "Bearer token for the server; that of a variable goes to this machine and, if it is FUNITEL_API_KEY, to the "
        "server of FUNITEL_URL.",
        keeps_variable=True,
    )
    tls_ca: str | None = given("PEM file of authorities to trust for an https server; the system's when not given.")
    tls_cert: str | None = given("PEM file of a certificate to show to the server.")
    tls_key: str | None = given("PEM file of the key of --tls-cert.")

    def __post_init__(self) -> None:
        check_client_tls(self, self.url)
        check_bounds(self)


@dataclass(frozen=True, kw_only=True)
class LaunchSettings(FleetClientSettings):
    """Launch a model on a running server, and wait until it is ready."""

    model: str
    name: str | None = given("What clients call the model; its id when not given.")
    replicas: int | None = given("Copies of the model.", bounds=AT_LEAST_ONE)
    num_shard: int | None = given("Shards of each replica.", bounds=AT_LEAST_ONE)
    quantize: str | None = given("Quantisation of the weights.", choices=QUANTIZATIONS)
    dtype: str | None = given("Precision of weights and KV.", choices=DTYPES)
    engine: str | None = given("What computes the model.", choices=ENGINES)
    executor: str | None = given("Where replicas run.", choices=EXECUTORS)
    worker: str | None = given("Machine on which it runs, as `funitel workers` lists it.")
    partition: str | None = given("How the shards divide the model, as --partition of serve.")
    layers: str | None = given("Layers of each stage, as --layers of serve.")
    ttl: float | None = given("Seconds without a request after which it is unloaded.", bounds=POSITIVE)
    pinned: bool = switch("Never unload it to make room for another.")
    request_limit: int | None = given("Requests that may run at once; more get 429.", bounds=AT_LEAST_ONE)
    priority: int | None = given("Place in the order of launches when the server starts again, highest first.")
    retries: int | None = given("Further attempts of a launch that fails.", bounds=NOT_NEGATIVE)
    set: tuple[str, ...] = setting(
        (), "Any other flag of serve, as NAME=VALUE such as max_batch_size=8, repeatable.", env=None
    )
    wait: bool = setting(True, "Wait until the model is ready, and show how far it is.", env=None)
    json: bool = json_switch()

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in self.set:
            name, equals, _ = each.partition("=")
            require(bool(name.strip() and equals), f"--set must be NAME=VALUE, given {each!r}")
        names = [flag_name(each) for each in self.set]
        twice = next((name for name in names if names.count(name) > 1), None)
        require(twice is None, f"--set gives {twice} twice: give it once")

    @property
    def flags(self) -> dict[str, str]:
        """The values of --set, by the names of the flags' fields."""
        return {flag_name(each): each.partition("=")[2] for each in self.set}


def flag_name(assignment: str) -> str:
    """The field of `--max-batch-size=8`, `max-batch-size=8` or `max_batch_size=8`."""
    return assignment.partition("=")[0].strip().removeprefix("--").replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class ListSettings(FleetClientSettings):
    """List the models of a running server."""

    json: bool = json_switch()


@dataclass(frozen=True, kw_only=True)
class TerminateSettings(FleetClientSettings):
    """End a model: its requests finish, its processes stop, and it is forgotten."""

    name: str


@dataclass(frozen=True, kw_only=True)
class CancelSettings(FleetClientSettings):
    """Cancel the launch of a model."""

    name: str


@dataclass(frozen=True, kw_only=True)
class LoadSettings(FleetClientSettings):
    """Load a model that the server knows, and wait until it is ready."""

    name: str


@dataclass(frozen=True, kw_only=True)
class UnloadSettings(FleetClientSettings):
    """Free the memory of a model; the server still knows it, and loads it for the next request."""

    name: str


@dataclass(frozen=True, kw_only=True)
class SleepSettings(FleetClientSettings):
    """Free the KV memory of a model, and keep its weights in the memory of the host."""

    name: str


@dataclass(frozen=True, kw_only=True)
class WakeSettings(FleetClientSettings):
    """Wake a model that sleeps."""

    name: str


@dataclass(frozen=True, kw_only=True)
class ReplicasSettings(FleetClientSettings):
    """List the replicas of a model, add some, or remove one."""

    name: str
    add: int | None = given("Number of replicas to add.", bounds=AT_LEAST_ONE)
    remove: int | None = given("Id of the replica to drain and stop.", bounds=NOT_NEGATIVE)
    weight: float | None = given("Weight of each replica that --add adds, beside 1.", bounds=POSITIVE)
    json: bool = json_switch()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.add is None or self.remove is None, f"give --add {self.add} or --remove {self.remove}, not both")
        require(self.weight is None or self.add is not None, f"--weight {self.weight} needs --add")


@dataclass(frozen=True, kw_only=True)
class RegisterSettings(FleetClientSettings):
    """Register a custom model, in the JSON of funitel or of Xinference."""

    file: str
    type: str = _type()
    persist: bool = setting(True, "Whether the registration outlives the server.", env=None)


@dataclass(frozen=True, kw_only=True)
class UnregisterSettings(FleetClientSettings):
    """Remove the registration of a custom model."""

    name: str
    type: str = _type()


@dataclass(frozen=True, kw_only=True)
class RegistrationsSettings(FleetClientSettings):
    """List the custom models of a type."""

    type: str = _type()
    json: bool = json_switch()


@dataclass(frozen=True, kw_only=True)
class ListCachedSettings(FleetClientSettings):
    """List the models on the disk of the server, or of this machine where none runs."""

    json: bool = json_switch()


@dataclass(frozen=True, kw_only=True)
class RemoveSettings(FleetClientSettings):
    """Delete a model from the disk of the server, or of this machine where none runs; never one in use."""

    name: str
    check: bool = switch("Show what would be deleted, and delete nothing.")
    yes: bool = switch("Delete without asking.")


@dataclass(frozen=True, kw_only=True)
class WorkersSettings(FleetClientSettings):
    """List the machines of a server with their memory and replicas."""

    json: bool = json_switch()
