"""Flag beats variable beats default; what is wrong is one line and an exit code; settings become flags again."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from funitel.model_server.settings import (
    ACTIVATION_DTYPES,
    ATTENTIONS,
    DEVICES,
    DTYPES,
    ENGINES,
    KV_CACHE_DTYPES,
    MAX_LORA_RANK,
    MAX_LORAS,
    MAX_NODES,
    MAX_SPECULATE,
    MAX_SPIN_US,
    QUANTIZATIONS,
    ModelServerSettings,
)
from funitel.proto.errors import SettingsError, WeightsError
from funitel.proto.process.cores import Cores
from funitel.proto.settings.adapter_list import AdapterList
from funitel.proto.settings.batch_sizes import MAX_ROWS, BatchSizes
from funitel.proto.settings.fields import as_command, project, require, run_app, setting, to_argv
from funitel.proto.settings.options import Counts, flag_of, variable_of
from funitel.proto.settings.partition import Partition
from funitel.router.settings import PREEMPTION_MODES, REASONING_PARSERS, TOOL_CALL_PARSERS, VICTIMS, RouterSettings

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Example:
    """One setting of each kind."""

    name: str = setting("nobody", "A text.", short="-n", aliases=("--called",))
    num_rooms: int = setting(3, "A number.")
    ratio: float = setting(0.5, "A fraction.")
    limit: int | None = setting(None, "A number or nothing.")
    is_quiet: bool = setting(False, "A switch.")
    colour: str = setting("red", "A choice.", choices=("red", "green"))
    guests: tuple[str, ...] = setting((), "A list.")
    cache: str | None = setting(None, "Under another name.", env="EXAMPLE_CACHE")
    secret: str | None = setting(None, "A flag only.", env=None)

    def __post_init__(self) -> None:
        require(self.num_rooms > 0, f"--num-rooms must be > 0, given {self.num_rooms}")


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Settings with a positional argument."""

    place: str
    num_rooms: int = setting(1, "A number.")


def app_of(cls: type[T], found: list[T], arguments: dict[str, str] | None = None) -> typer.Typer:
    """A command line that puts what it reads into `found`."""
    app = typer.Typer(add_completion=False)
    app.command()(as_command(cls, found.append, arguments))
    return app


def parse(
    cls: type[T], argv: Sequence[str], environ: Mapping[str, str] | None = None, arguments: dict[str, str] | None = None
) -> T:
    """Read settings from `argv` and from nothing of the environment but `environ`."""
    found: list[T] = []
    env: dict[str, str | None] = dict.fromkeys(os.environ) | dict(environ or {})
    result = CliRunner().invoke(app_of(cls, found, arguments), list(argv), env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return found[0]


# Where values come from


@pytest.mark.parametrize(
    ("argv", "environ", "field", "value"),
    [
        ([], {}, "name", "nobody"),
        ([], {"FUNITEL_NAME": "variable"}, "name", "variable"),
        (["--name", "flag"], {"FUNITEL_NAME": "variable"}, "name", "flag"),
        (["--name=flag"], {}, "name", "flag"),
        (["-n", "short"], {"FUNITEL_NAME": "variable"}, "name", "short"),
        (["--called", "alias"], {"FUNITEL_NAME": "variable"}, "name", "alias"),
        ([], {"FUNITEL_NUM_ROOMS": "7"}, "num_rooms", 7),
        (["--num-rooms", "8"], {"FUNITEL_NUM_ROOMS": "7"}, "num_rooms", 8),
        (["--ratio", "0.25"], {}, "ratio", 0.25),
        ([], {}, "limit", None),
        ([], {"FUNITEL_LIMIT": "9"}, "limit", 9),
        ([], {}, "is_quiet", False),
        (["--is-quiet"], {}, "is_quiet", True),
        ([], {"FUNITEL_IS_QUIET": "true"}, "is_quiet", True),
        ([], {"FUNITEL_IS_QUIET": "false"}, "is_quiet", False),
        (["--colour", "green"], {}, "colour", "green"),
        ([], {"FUNITEL_COLOUR": "green"}, "colour", "green"),
        ([], {}, "guests", ()),
        (["--guests", "Ann", "--guests", "Bob"], {}, "guests", ("Ann", "Bob")),
        ([], {"FUNITEL_GUESTS": "Ann"}, "guests", ("Ann",)),
        (["--guests", "Ann"], {"FUNITEL_GUESTS": "Bob"}, "guests", ("Ann",)),
        ([], {"EXAMPLE_CACHE": "/there"}, "cache", "/there"),
        ([], {"CACHE": "/elsewhere"}, "cache", None),
        ([], {"SECRET": "unread"}, "secret", None),
        (["--secret", "read"], {}, "secret", "read"),
    ],
)
def test_flag_beats_variable_beats_default(argv: list[str], environ: dict[str, str], field: str, value: object) -> None:
    assert getattr(parse(Example, argv, environ), field) == value


def test_a_field_without_default_can_be_positional() -> None:
    arguments = {"place": "Where."}
    assert parse(Placed, ["here", "--num-rooms", "2"], arguments=arguments) == Placed(place="here", num_rooms=2)


def test_names_of_flags_and_variables() -> None:
    assert flag_of("max_batch_size") == "--max-batch-size"
    variables = {field.name: variable_of(field) for field in dataclasses.fields(Example)}
    assert variables["num_rooms"] == "FUNITEL_NUM_ROOMS"
    assert variables["cache"] == "EXAMPLE_CACHE"
    assert variables["secret"] is None


# What is wrong


def run(app: typer.Typer, argv: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command line as a console script does; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["example", *argv])
    with pytest.raises(SystemExit) as ended:
        run_app(app)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    ("argv", "environ", "code", "words"),
    [
        (["--no-such-flag"], {}, 2, ["No such option: --no-such-flag"]),
        (["--num-rooms", "many"], {}, 2, ["--num-rooms", "valid integer"]),
        ([], {"FUNITEL_NUM_ROOMS": "many"}, 2, ["FUNITEL_NUM_ROOMS", "valid integer"]),
        (["--colour", "blue"], {}, 2, ["--colour", "blue", "red", "green"]),
        (["--num-rooms"], {}, 2, ["--num-rooms"]),
        (["surplus"], {}, 2, ["surplus"]),
        (["--num-rooms", "0"], {}, 1, ["--num-rooms must be > 0, given 0"]),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(
    argv: list[str],
    environ: dict[str, str],
    code: int,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in (f"FUNITEL_{field.name.upper()}" for field in dataclasses.fields(Example)):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found: list[Example] = []
    assert run(app_of(Example, found), argv, monkeypatch) == code
    output = capsys.readouterr()
    assert (found, output.out) == ([], "")
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    for word in words:
        assert word in output.err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (WeightsError("model.safetensors is\ncut short"), 1, "error: model.safetensors is cut short\n"),
        (SettingsError("these contradict each other"), 1, "error: these contradict each other\n"),
        (typer.Exit(3), 3, ""),
        (typer.Abort(), 130, ""),
    ],
)
def test_how_a_command_ends(
    error: Exception, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = typer.Typer(add_completion=False)

    @app.command()
    def fail() -> None:
        raise error

    assert run(app, [], monkeypatch) == code
    assert capsys.readouterr().err == said


def test_a_command_that_returns_ends_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUNITEL_NAME", raising=False)
    assert run(app_of(Example, []), [], monkeypatch) == 0


def test_our_own_mistakes_are_one_line_and_a_traceback_at_debug_level(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["example"])
    app = typer.Typer(add_completion=False)

    @app.command()
    def broken() -> None:
        raise ZeroDivisionError("one\ntwo")

    with caplog.at_level("DEBUG", "funitel"), pytest.raises(SystemExit) as ended:
        run_app(app)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: ZeroDivisionError: one two\n"
    assert caplog.records[0].exc_info is not None


# Settings of children


def test_argv_leaves_out_what_was_not_given() -> None:
    assert to_argv(Example(), skip=["name", "num_rooms", "ratio", "colour"]) == []
    given = Example(limit=0, is_quiet=True, guests=("Ann", "Bob"))
    assert to_argv(given, skip=["name", "num_rooms", "ratio", "colour"]) == [
        *("--limit", "0"),
        "--is-quiet",
        *("--guests", "Ann"),
        *("--guests", "Bob"),
    ]


def test_a_child_gets_the_fields_it_shares() -> None:
    assert project(Example(num_rooms=4), Placed, place="here") == Placed(place="here", num_rooms=4)
    assert project(Example(num_rooms=4), Placed, place="here", num_rooms=5).num_rooms == 5


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12)
COUNT = st.integers(1, 10**9)
ROUTER: dict[str, st.SearchStrategy[Any]] = {
    "tokenizer_name": TEXT,
    "served_model_name": st.none() | TEXT,
    "tokenizer_config_path": st.none() | TEXT,
    "master_shard_uds_path": TEXT,
    "master_shard_address": st.none() | TEXT,
    "shard_connect_timeout": st.integers(0, 10**6),
    "shard_return_timeout": st.integers(0, 10**6),
    "listen_fd": st.lists(st.integers(0, 1000), max_size=2).map(tuple),
    "ready_fd": st.none() | st.integers(0, 1000),
    "accepts_early": st.booleans(),
    "keeper": st.none() | TEXT,
    "generation": st.integers(0, 10**6),
    "replica_address": st.lists(st.sampled_from(["unix:///tmp/a-0", "tcp://host:80"]), max_size=2, unique=True).map(
        tuple
    ),
    "pipeline_steps": st.integers(1, 3),
    "revision": st.none() | TEXT,
    "hostname": st.none() | TEXT,
    "default_hostname": st.none() | TEXT,
    "port": st.integers(0, 40000),
    "prometheus_port": st.none() | st.integers(40001, 65535),
    "max_concurrent_requests": COUNT,
    "max_best_of": COUNT,
    "max_stored_responses": st.integers(0, 10**6),
    "max_stored_response_bytes": COUNT,
    "batch_dir": st.none() | TEXT,
    "max_batch_requests": COUNT,
    "max_batch_file_bytes": COUNT,
    "max_audio_bytes": COUNT,
    "max_audio_seconds": st.floats(1, 86_400),
    "max_stop_sequences": st.integers(0, 100),
    "default_stop": st.lists(TEXT, max_size=3).map(tuple),
    "default_stop_token_ids": st.none()
    | st.lists(COUNT, min_size=1, max_size=3).map(lambda ids: Counts(str(ids)[1:-1])),
    "max_top_n_tokens": st.integers(0, 100),
    "max_logprobs": st.integers(0, 100),
    "strict_fields": st.booleans(),
    "openai_errors": st.booleans(),
    "share_prefixes": st.booleans(),
    "prefix_cache_ttl": st.none() | st.floats(0.001, 1e8),
    "preemption_mode": st.sampled_from(PREEMPTION_MODES),
    "preemption_victim": st.sampled_from(VICTIMS),
    "max_input_tokens": st.none() | st.integers(1, 1000),
    "max_total_tokens": st.none() | st.integers(1001, 5000),
    "max_batch_prefill_tokens": st.integers(1, 10_000),
    "max_batch_total_tokens": st.none() | st.integers(10_000, 10**9),
    "max_batch_size": st.none() | COUNT,
    "waiting_served_ratio": st.floats(0, 1e6),
    "max_waiting_tokens": st.integers(0, 10**9),
    "step_timeout_s": st.floats(0.001, 86_400),
    "target_itl_ms": st.none() | st.floats(0.001, 600_000),
    "target_ttft_ms": st.none() | st.floats(0.001, 86_400_000),
    "max_client_batch_size": COUNT,
    "max_client_texts": COUNT,
    "disable_grammar_support": st.booleans(),
    "tool_call_parser": st.sampled_from(TOOL_CALL_PARSERS),
    "reasoning_parser": st.sampled_from(REASONING_PARSERS),
    "chat_special_tokens": st.booleans(),
    "validation_workers": COUNT,
    "payload_limit": st.none() | COUNT,
    "max_connections": st.none() | COUNT,
    "max_header_bytes": COUNT,
    "max_total_body_bytes": COUNT,
    "max_unread_bytes": COUNT,
    "max_total_unread_bytes": COUNT,
    "max_resume_seconds": st.integers(0, 86_400),
    "max_resume_bytes": COUNT,
    "header_timeout_seconds": st.floats(0.001, 86_400),
    "body_timeout_seconds": st.floats(0.001, 86_400),
    "idle_timeout_seconds": st.floats(0.001, 86_400),
    "unread_timeout_seconds": st.floats(0.001, 86_400),
    "shutdown_delay": st.floats(0, 86_400),
    "max_queued_tokens": st.none() | COUNT,
    "api_key": TEXT,
    "api_key_file": st.none() | TEXT,
    "max_wrong_keys": st.integers(0, 10_000),
    "ban_seconds": st.floats(0.001, 86_400),
    "protect_all_routes": st.booleans(),
    "tls_cert": TEXT,
    "tls_key": TEXT,
    "tls_client_ca": st.none() | TEXT,
    "shard_tls_cert": st.none(),  # all three, where there is a shard on TCP
    "shard_tls_key": st.none(),
    "shard_tls_ca": st.none(),
    "cors_allow_origin": st.lists(TEXT, max_size=3).map(tuple),
    "allowed_media_domains": st.lists(st.sampled_from(["example.com", "*.example.com:81", "[::1]"])).map(tuple),
    "max_image_fetch_size": COUNT,
    "media_fetch_timeout_s": st.floats(0.001, 86_400),
    "allow_private_media_addresses": st.booleans(),
    "max_media_items": COUNT,
    "max_media_pixels": COUNT,
    "media_processed_cache_mb": COUNT,
    "allowed_host": st.lists(TEXT, max_size=3).map(tuple),
    "aip_predict_route": st.none() | TEXT.map("/{}".format),
    "aip_health_route": st.none() | TEXT.map("/{}".format),
    "git_sha": st.none() | TEXT,
    "docker_label": st.none() | TEXT,
    "json_output": st.booleans(),
    "log_level": TEXT,
    "otlp_endpoint": st.none() | TEXT,
    "otlp_service_name": TEXT,
    "otlp_decode_tokens": COUNT,
    "memory_bandwidth": st.none() | st.floats(0.001, 1e6),
    "lora_adapters": st.none() | st.just(AdapterList("owner/one,two=owner/two@main,three=/three")),
    "max_loras": COUNT,
    "lora_folder": st.none() | TEXT,
    "control_socket": st.none() | TEXT,
    "no_model": st.just(False),  # true needs a control socket
    "wait_for_load": st.floats(0, 86_400),
    "console": st.booleans(),
    "users": st.booleans(),
    "debug_routes": st.just(False),  # true needs a key or loopback
    "compute_type": st.none() | TEXT,
    "exit_with_parent": st.none() | st.integers(1, 2**22),
    "deployment_file": st.none() | TEXT,
}
SHARD: dict[str, st.SearchStrategy[Any]] = {
    "model_id": st.just("/models/it"),
    "revision": st.none() | TEXT,
    "cache_dir": st.none() | TEXT,
    "model_spec": st.none() | TEXT,
    "sharded": st.just(True),
    "rank": st.integers(0, 3),
    "world_size": st.just(4),
    "local_rank": st.none() | st.integers(0, 3),
    "partition": st.sampled_from(["0&1;2&3", "0;1;2;3", "3;0;1;2", "0&1&2&3", "1&3;0&2"]).map(Partition) | st.none(),
    "layers": st.none(),  # it has to fit the partition: tried by itself
    "expert_parallel": st.booleans(),
    "gpu_layers": st.none(),  # one shard alone has parts: tried by itself
    "layer_parts": st.none(),
    "master_addr": TEXT,
    "master_port": st.integers(0, 65535),
    "uds_path": TEXT,
    "listen": st.none() | TEXT,
    "shard_tls_cert": st.none(),  # all three, with "listen"
    "shard_tls_key": st.none(),
    "shard_tls_ca": st.none(),
    "device": st.sampled_from(DEVICES),
    "dtype": st.none() | st.sampled_from(DTYPES),
    "quantize": st.none() | st.sampled_from(QUANTIZATIONS),
    "quantize_tensors": st.none() | TEXT,
    "activation_dtype": st.sampled_from(ACTIVATION_DTYPES),
    "kv_cache_dtype": st.none() | st.sampled_from(KV_CACHE_DTYPES),
    "rope_scaling": st.sampled_from([None, "linear"]),
    "rope_factor": st.none() | st.floats(0.01, 1024),
    "block_size": COUNT,
    "cpu_offload_gb": st.floats(0, 1000),
    "kv_host_gb": st.floats(0, 1000),
    "media_cache_gb": st.none() | st.floats(0, 1000),
    "kv_disk_gb": st.floats(0, 1000),
    "kv_disk_dir": st.none() | TEXT,
    "attention": st.none() | st.sampled_from(ATTENTIONS),
    "cuda_graphs": st.none() | st.frozensets(st.integers(1, MAX_ROWS)).map(BatchSizes),
    "cuda_memory_fraction": st.none() | st.floats(0, 1, exclude_min=True),
    "replicas_on_host": COUNT,
    "num_threads": st.none() | COUNT,
    "most_threads": st.none(),  # and a number where "num_threads" is none
    "thread_spin_us": st.none() | st.integers(0, MAX_SPIN_US),
    "engine": st.none() | st.sampled_from(ENGINES),
    "trust_remote_code": st.booleans(),
    "cores": st.none() | st.frozensets(st.integers(0, 300), min_size=1).map(Cores),
    "memory_node": st.none() | st.integers(0, MAX_NODES - 1),
    "prefill_chunking": st.booleans(),
    "prefix_caching": st.booleans(),
    "enable_prefill_logprobs": st.booleans(),
    "disable_forced_spans": st.booleans(),
    "max_lora_rank": st.integers(0, MAX_LORA_RANK),
    "reserved_loras": st.integers(0, MAX_LORAS),
    "speculate": st.integers(1, MAX_SPECULATE),  # as "draft_model" needs
    "draft_model": st.none() | TEXT,
    "watermark_gamma": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "watermark_delta": st.floats(-100, 100),
    "json_output": st.booleans(),
    "logger_level": TEXT,
    "otlp_endpoint": st.none() | TEXT,
    "otlp_service_name": TEXT,
    "folder_fd": st.none() | st.integers(0, 1000),
    "exit_with_parent": st.none() | st.integers(1, 2**22),
    "deployment_file": st.none() | TEXT,
}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.builds(RouterSettings, **ROUTER))
def test_router_settings_survive_the_command_line(given: RouterSettings) -> None:
    assert parse(RouterSettings, to_argv(given)) == given


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.builds(ModelServerSettings, **SHARD)
    | st.builds(ModelServerSettings, **SHARD | {"num_threads": st.none(), "most_threads": COUNT})
)
def test_shard_settings_survive_the_command_line(given: ModelServerSettings) -> None:
    argv = [given.model_id, *to_argv(given, skip=["model_id"])]
    assert parse(ModelServerSettings, argv, arguments={"model_id": "The model."}) == given


@pytest.mark.parametrize(("cls", "tried"), [(RouterSettings, ROUTER), (ModelServerSettings, SHARD)])
def test_every_setting_is_tried(cls: type[Any], tried: dict[str, object]) -> None:
    assert tried.keys() == {field.name for field in dataclasses.fields(cls)}
