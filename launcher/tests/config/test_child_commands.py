"""What children are told, as flags that their own commands accept."""

import os
from pathlib import Path
from typing import Any, TypeVar

import pytest
import typer
from typer.testing import CliRunner

from funitel.launcher.config.child_commands import Commands, download_environ, router_environ, shard_environ
from funitel.launcher.config.resolve import ResolvedSettings, fit_to_model, resolve
from funitel.launcher.settings import LauncherSettings
from funitel.model_server.settings import DownloadSettings, ModelServerSettings
from funitel.proto.settings.adapter_list import AdapterList
from funitel.proto.settings.fields import as_command
from funitel.router.settings import RouterSettings

T = TypeVar("T")
COMMANDS = Commands(model_server=("server",), router=("router",))
FOLDER = Path("/models/tiny")


def parsed(cls: type[T], argv: list[str], positional: dict[str, str] | None = None) -> T:
    """Parse `argv` as the child would, with nothing in its environment."""
    seen: list[T] = []
    app = typer.Typer()
    app.command()(as_command(cls, seen.append, positional))
    result = CliRunner().invoke(app, argv, env=dict.fromkeys(os.environ))
    assert result.exit_code == 0, result.output
    return seen[0]


def shard(settings: ResolvedSettings, rank: int = 0) -> ModelServerSettings:
    program, command, *argv = COMMANDS.shard(settings, FOLDER, rank)
    assert (program, command) == ("server", "serve")
    return parsed(ModelServerSettings, argv, {"model_id": ""})


def router(settings: ResolvedSettings) -> RouterSettings:
    program, *argv = COMMANDS.route(settings, FOLDER)
    assert program == "router"
    return parsed(RouterSettings, argv)


def test_a_shard_gets_its_rank_and_the_shared_settings() -> None:
    settings = resolved(dtype="float32", block_size=32, log_level="debug", json_output=True)
    told = shard(settings, rank=1)
    assert (told.model_id, told.rank, told.world_size, told.sharded) == (str(FOLDER), 1, 2, True)
    assert (told.dtype, told.block_size, told.logger_level, told.json_output) == (
        "float32",
        32,
        "debug",
        True,
    )
    assert (told.uds_path, told.master_port) == ("/tmp/path", settings.master_port)
    assert told.exit_with_parent == os.getpid()


def test_shards_leave_memory_for_adapters_where_some_can_be_loaded() -> None:
    assert shard(resolved(max_loras=3)).reserved_loras == 0
    assert shard(resolved(max_loras=3, lora_folder="/adapters")).reserved_loras == 3
    assert shard(resolved(max_loras=3, lora_adapters=AdapterList("sql=/a"))).reserved_loras == 3


@pytest.mark.parametrize("is_on", [True, False])
def test_switches_arrive_as_they_are(is_on: bool) -> None:
    told = shard(resolved(prefill_chunking=is_on, enable_prefill_logprobs=is_on))
    assert told.prefill_chunking is is_on
    assert told.enable_prefill_logprobs is is_on


@pytest.mark.parametrize("value", ["0", "false", "1", "true"])
def test_prefill_chunking_is_read_from_tgis_variable(value: str) -> None:
    seen: list[LauncherSettings] = []
    app = typer.Typer()
    app.command()(as_command(LauncherSettings, seen.append))
    assert CliRunner().invoke(app, [], env={"PREFILL_CHUNKING": value}).exit_code == 0
    assert seen[0].prefill_chunking is (value in ("1", "true"))


def test_the_router_gets_the_model_folder_under_the_clients_name() -> None:
    told = router(resolved(model_id="org/tiny", cors_allow_origin=("https://a", "https://b"), port=3001))
    assert (told.tokenizer_name, told.served_model_name) == (str(FOLDER), "org/tiny")
    assert told.master_shard_uds_path == "/tmp/path-0"
    assert told.cors_allow_origin == ("https://a", "https://b")
    assert (told.port, told.exit_with_parent) == (3001, os.getpid())


def test_the_router_has_a_keeper_in_place_of_sockets() -> None:
    settings = resolved(keeper=True)
    argv = COMMANDS.route(settings, FOLDER, keeper="/tmp/path.keeper", generation=3, deployment_file="/tmp/file")
    assert "--listen-fd" not in argv
    told = parsed(RouterSettings, argv[1:])
    assert (told.keeper, told.generation, told.deployment_file) == ("/tmp/path.keeper", 3, "/tmp/file")
    assert router(settings).keeper is None, "the flag of the launcher is another one"


def test_the_keeper_is_told_its_sockets_and_how_long_connections_wait() -> None:
    settings = resolved(adopt_timeout=2.5, log_level="debug", json_output=True)
    flags = ("--adopt-timeout", "2.5", "--log-level", "debug")
    sockets = ("--socket", "/tmp/s", "--listen-fd", "7", "8")
    ends = ("--exit-with-parent", str(os.getpid()), "--deployment-file", "/tmp/f", "--json-output")
    _, *argv = Commands(keeper=("keeper",)).keep(settings, "/tmp/s", [7, 8], deployment_file="/tmp/f")
    assert argv == [*sockets, *flags, *ends]
    _, *argv = Commands(keeper=("keeper",)).keep(LauncherSettings(), "/tmp/s", [7, 8], outlives=True)
    assert "--exit-with-parent" not in argv


def test_the_router_is_told_how_long_a_request_waits_for_its_model() -> None:
    assert router(resolved(wait_for_load=2.5)).wait_for_load == 2.5


def test_the_router_alone_gets_the_adapters() -> None:
    listed = AdapterList("sql=/adapters/sql,owner/poet@v1")
    settings = resolved(lora_adapters=listed, max_loras=3, lora_folder="/adapters")
    told = router(settings)
    assert (told.lora_adapters, told.max_loras, told.lora_folder) == (listed, 3, "/adapters")
    for inherited in (shard_environ, lambda *given: router_environ(*given[:2])):
        assert "LORA_ADAPTERS" not in inherited(settings, {"LORA_ADAPTERS": "sql=/adapters/sql"}, 0)


def test_the_api_key_travels_in_the_routers_environment_only() -> None:
    settings = resolved(api_key="sesame")
    environ = {"PATH": "/bin", "API_KEY": "older"}
    told = router_environ(settings, environ)
    assert (told["FUNITEL_API_KEY"], "API_KEY" in told) == ("sesame", False)
    assert "sesame" not in " ".join(COMMANDS.route(settings, FOLDER))
    for inherited in (shard_environ(settings, environ, 0), download_environ(settings, environ)):
        assert "API_KEY" not in inherited
    assert router_environ(resolved(), {"PATH": "/bin", "API_KEY": "x", "FUNITEL_API_KEY": "y"}) == {"PATH": "/bin"}


def test_the_download_is_told_where_and_what() -> None:
    settings = LauncherSettings(model_id="org/tiny", revision="main", cache_dir="/cache", json_output=True)
    program, command, *argv = COMMANDS.download(settings)
    assert (program, command) == ("server", "download-weights")
    told = parsed(DownloadSettings, argv, {"model_id": ""})
    assert told == DownloadSettings(
        model_id="org/tiny",
        revision="main",
        cache_dir="/cache",
        json_output=True,
        logger_level="info",
        exit_with_parent=os.getpid(),
    )


def test_a_shards_environment_is_the_users_with_torch_settled() -> None:
    environ = {"PATH": "/bin", "LOG_LEVEL": "debug", "RANK": "9"}
    settings = resolved(num_threads=3, master_addr="node-a")
    assert shard_environ(settings, environ, 1) == {
        "PATH": "/bin",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "node-a",
        "MASTER_PORT": str(settings.master_port),
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def test_the_users_wait_policy_wins() -> None:
    assert shard_environ(resolved(), {"OMP_WAIT_POLICY": "ACTIVE"}, 0)["OMP_WAIT_POLICY"] == "ACTIVE"


def test_on_cuda_threads_are_left_alone() -> None:
    assert "OMP_NUM_THREADS" not in shard_environ(resolved(device="cuda"), {}, 0)


def test_hub_variables_reach_the_children() -> None:
    settings = LauncherSettings(huggingface_hub_cache="/hub")
    assert download_environ(settings, {"HF_API_TOKEN": "old"}) == {
        "HF_API_TOKEN": "old",
        "HF_TOKEN": "old",
        "HF_HUB_CACHE": "/hub",
        "HUGGINGFACE_HUB_CACHE": "/hub",
    }


@pytest.mark.parametrize(
    ("environ", "token"),
    [
        ({"HF_API_TOKEN": "old", "HF_TOKEN": "new"}, "new"),
        ({"HF_API_TOKEN": "old", "HF_TOKEN": ""}, "old"),
        ({"HUGGING_FACE_HUB_TOKEN": "oldest"}, "oldest"),
        ({"HUGGING_FACE_HUB_TOKEN": "oldest", "HF_API_TOKEN": "old"}, "old"),
    ],
)
def test_every_name_of_the_hub_token_reaches_every_child(environ: dict[str, str], token: str) -> None:
    settings = resolved()
    for told in (
        download_environ(settings, environ),
        shard_environ(settings, environ, 0),
        router_environ(settings, environ),
    ):
        assert told["HF_TOKEN"] == token


def test_without_a_token_there_is_none() -> None:
    assert "HF_TOKEN" not in download_environ(LauncherSettings(), {})


def test_what_the_launcher_has_remarked_upon_is_not_told_to_its_children_again() -> None:
    environ = {
        "DISABLE_CUSTOM_KERNELS": "1",
        "USE_FLASH_ATTENTION": "true",
        "TRUST_REMOTE_CODE": "true",
        "HF_HUB_OFFLINE": "1",
    }
    settings = resolved()
    for told in (shard_environ(settings, environ, 0), router_environ(settings, environ)):
        assert told.keys() & environ.keys() == {"HF_HUB_OFFLINE"}


def resolved(**given: Any) -> ResolvedSettings:
    settings = resolve(LauncherSettings(**given), num_shard=2, uds_path="/tmp/path")
    return fit_to_model(settings, FOLDER)
