"""Every flag and variable of TGI's three programs: taken, with its default, and honoured, inert or refused as told."""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from funitel.launcher.settings import LauncherSettings
from funitel.model_server.settings import DownloadSettings, ModelServerSettings, QuantizeSettings
from funitel.proto.errors import SettingsError
from funitel.proto.settings.fields import as_command, to_argv
from funitel.proto.settings.tgi_flags import (
    INERT,
    REFUSED,
    REFUSED_VALUES,
    TRANSLATED_VALUES,
    Program,
    TgiFlag,
    rows_of,
)
from funitel.router.settings import RouterSettings

PROGRAMS: dict[Program, type[Any]] = {
    "launcher": LauncherSettings,
    "router": RouterSettings,
    "shard": ModelServerSettings,
    "download": DownloadSettings,
    "quantize": QuantizeSettings,
}

# Flag, variable, default; "-" as a variable: there is none; None as a default: left open.
# Source: contract reference 2.1, 3, 4.1 to 4.3. Ours differ where DIFFERENT says so.
Row = tuple[str, str, Any]

LAUNCHER: tuple[Row, ...] = (
    ("--model-id", "MODEL_ID", "bigscience/bloom-560m"),
    ("--revision", "REVISION", None),
    ("--validation-workers", "VALIDATION_WORKERS", 2),
    ("--sharded", "SHARDED", None),
    ("--num-shard", "NUM_SHARD", None),
    ("--quantize", "QUANTIZE", None),
    ("--speculate", "SPECULATE", None),
    ("--dtype", "DTYPE", None),
    ("--kv-cache-dtype", "KV_CACHE_DTYPE", None),
    ("--trust-remote-code", "TRUST_REMOTE_CODE", False),
    ("--max-concurrent-requests", "MAX_CONCURRENT_REQUESTS", 128),
    ("--max-best-of", "MAX_BEST_OF", 2),
    ("--max-stop-sequences", "MAX_STOP_SEQUENCES", 4),
    ("--max-top-n-tokens", "MAX_TOP_N_TOKENS", 5),
    ("--max-input-tokens", "MAX_INPUT_TOKENS", None),
    ("--max-input-length", "MAX_INPUT_LENGTH", None),
    ("--max-total-tokens", "MAX_TOTAL_TOKENS", None),
    ("--waiting-served-ratio", "WAITING_SERVED_RATIO", 0.3),
    ("--max-batch-prefill-tokens", "MAX_BATCH_PREFILL_TOKENS", None),
    ("--max-batch-total-tokens", "MAX_BATCH_TOTAL_TOKENS", None),
    ("--max-waiting-tokens", "MAX_WAITING_TOKENS", 20),
    ("--max-batch-size", "MAX_BATCH_SIZE", None),
    ("--cuda-graphs", "CUDA_GRAPHS", None),
    ("--hostname", "HOSTNAME", "0.0.0.0"),
    ("--port", "PORT", 3000),
    ("-p", "PORT", 3000),
    ("--prometheus-port", "PROMETHEUS_PORT", 9000),
    ("--shard-uds-path", "SHARD_UDS_PATH", "/tmp/text-generation-server"),
    ("--master-addr", "MASTER_ADDR", "localhost"),
    ("--master-port", "MASTER_PORT", 29500),
    ("--huggingface-hub-cache", "HUGGINGFACE_HUB_CACHE", None),
    ("--weights-cache-override", "WEIGHTS_CACHE_OVERRIDE", None),
    ("--disable-custom-kernels", "DISABLE_CUSTOM_KERNELS", False),
    ("--cuda-memory-fraction", "CUDA_MEMORY_FRACTION", 1.0),
    ("--rope-scaling", "ROPE_SCALING", None),
    ("--rope-factor", "ROPE_FACTOR", None),
    ("--json-output", "JSON_OUTPUT", False),
    ("--otlp-endpoint", "OTLP_ENDPOINT", None),
    ("--otlp-service-name", "OTLP_SERVICE_NAME", "text-generation-inference.router"),
    ("--cors-allow-origin", "CORS_ALLOW_ORIGIN", ()),
    ("--api-key", "API_KEY", None),
    ("--watermark-gamma", "WATERMARK_GAMMA", 0.5),
    ("--watermark-delta", "WATERMARK_DELTA", 2.0),
    ("--ngrok", "NGROK", False),
    ("--ngrok-authtoken", "NGROK_AUTHTOKEN", None),
    ("--ngrok-edge", "NGROK_EDGE", None),
    ("--tokenizer-config-path", "TOKENIZER_CONFIG_PATH", None),
    ("--disable-grammar-support", "DISABLE_GRAMMAR_SUPPORT", False),
    ("--env", "-", False),
    ("-e", "-", False),
    ("--max-client-batch-size", "MAX_CLIENT_BATCH_SIZE", 4),
    ("--lora-adapters", "LORA_ADAPTERS", None),
    ("--usage-stats", "USAGE_STATS", "on"),
    ("--payload-limit", "PAYLOAD_LIMIT", 2_000_000),
    ("--enable-prefill-logprobs", "ENABLE_PREFILL_LOGPROBS", False),
    ("--graceful-termination-timeout", "GRACEFUL_TERMINATION_TIMEOUT", 90),
    ("-g", "GRACEFUL_TERMINATION_TIMEOUT", 90),
)
ROUTER: tuple[Row, ...] = (
    ("--max-concurrent-requests", "MAX_CONCURRENT_REQUESTS", 128),
    ("--max-best-of", "MAX_BEST_OF", 2),
    ("--max-stop-sequences", "MAX_STOP_SEQUENCES", 4),
    ("--max-top-n-tokens", "MAX_TOP_N_TOKENS", 5),
    ("--max-input-tokens", "MAX_INPUT_TOKENS", None),
    ("--max-total-tokens", "MAX_TOTAL_TOKENS", None),
    ("--waiting-served-ratio", "WAITING_SERVED_RATIO", 1.2),
    ("--max-batch-prefill-tokens", "MAX_BATCH_PREFILL_TOKENS", 4096),
    ("--max-batch-total-tokens", "MAX_BATCH_TOTAL_TOKENS", None),
    ("--max-waiting-tokens", "MAX_WAITING_TOKENS", 20),
    ("--max-batch-size", "MAX_BATCH_SIZE", None),
    ("--hostname", "HOSTNAME", "0.0.0.0"),
    ("--port", "PORT", 3000),
    ("-p", "PORT", 3000),
    ("--prometheus-port", "PROMETHEUS_PORT", 9000),
    ("--master-shard-uds-path", "MASTER_SHARD_UDS_PATH", "/tmp/text-generation-server-0"),
    ("--tokenizer-name", "TOKENIZER_NAME", "bigscience/bloom"),
    ("--tokenizer-config-path", "TOKENIZER_CONFIG_PATH", None),
    ("--revision", "REVISION", None),
    ("--trust-remote-code", "TRUST_REMOTE_CODE", False),
    ("--validation-workers", "VALIDATION_WORKERS", 2),
    ("--api-key", "API_KEY", None),
    ("--json-output", "JSON_OUTPUT", False),
    ("--otlp-endpoint", "OTLP_ENDPOINT", None),
    ("--otlp-service-name", "OTLP_SERVICE_NAME", "text-generation-inference.router"),
    ("--cors-allow-origin", "CORS_ALLOW_ORIGIN", ()),
    ("--ngrok", "NGROK", False),
    ("--ngrok-authtoken", "NGROK_AUTHTOKEN", None),
    ("--ngrok-edge", "NGROK_EDGE", None),
    ("--disable-grammar-support", "DISABLE_GRAMMAR_SUPPORT", False),
    ("--max-client-batch-size", "MAX_CLIENT_BATCH_SIZE", 4),
    ("--usage-stats", "USAGE_STATS", "on"),
    ("--payload-limit", "PAYLOAD_LIMIT", 2_000_000),
    ("--max-image-fetch-size", "MAX_IMAGE_FETCH_SIZE", 1073741824),
)
SHARD: tuple[Row, ...] = (
    ("--revision", "-", None),
    ("--sharded", "-", False),
    ("--no-sharded", "-", False),
    ("--quantize", "-", None),
    ("--speculate", "-", None),
    ("--dtype", "-", None),
    ("--kv-cache-dtype", "-", None),
    ("--trust-remote-code", "-", False),
    ("--no-trust-remote-code", "-", False),
    ("--uds-path", "-", "/tmp/text-generation-server"),
    ("--logger-level", "-", "INFO"),
    ("--json-output", "-", False),
    ("--no-json-output", "-", False),
    ("--otlp-endpoint", "-", None),
    ("--otlp-service-name", "-", "text-generation-inference.server"),
    ("--max-input-tokens", "-", None),
)
DOWNLOAD: tuple[Row, ...] = (
    ("--revision", "-", None),
    ("--extension", "-", ".safetensors"),
    ("--auto-convert", "-", True),
    ("--no-auto-convert", "-", True),
    ("--logger-level", "-", "INFO"),
    ("--json-output", "-", False),
    ("--trust-remote-code", "-", False),
    ("--merge-lora", "-", False),
    ("--no-merge-lora", "-", False),
)
QUANTIZE: tuple[Row, ...] = (
    ("--revision", "-", None),
    ("--logger-level", "-", "INFO"),
    ("--json-output", "-", False),
    ("--trust-remote-code", "-", False),
    ("--upload-to-model-id", "-", None),
    ("--percdamp", "-", 0.01),
    ("--act-order", "-", False),
    ("--no-act-order", "-", False),
    ("--groupsize", "-", 128),
)
TABLES: dict[Program, tuple[Row, ...]] = {
    "launcher": LAUNCHER,
    "router": ROUTER,
    "shard": SHARD,
    "download": DOWNLOAD,
    "quantize": QUANTIZE,
}
# Variables with no flag of their own. Source: contract reference 2.2, 4.4.
VARIABLES: dict[Program, tuple[str, ...]] = {
    "launcher": (
        "LOG_LEVEL",
        "ATTENTION",
        "PREFIX_CACHING",
        "PREFILL_CHUNKING",
        "TGI_WIGGLE_ROOM",
        "USE_FLASH_ATTENTION",
        "MAX_IMAGE_FETCH_SIZE",
        "ZE_AFFINITY_MASK",
        "DISABLE_EXLLAMA",
        "EXLLAMA_VERSION",
        "USE_CUTLASS_W8A8",
        "XPU_MEMORY_FRACTION",
        "ROCM_USE_FLASH_ATTN_V2_TRITON",
        "ROCM_USE_CUSTOM_PAGED_ATTN",
        "ROCM_USE_SKINNY_GEMM",
        "LOG_COLORIZE",
        "LOG_FORMAT",
    ),
    "router": ("LOG_LEVEL", "LOG_COLORIZE", "LOG_FORMAT", "COMPUTE_TYPE"),
    "shard": (
        "ATTENTION",
        "PREFIX_CACHING",
        "PREFILL_CHUNKING",
        "REQUEST_LOGPROBS",
        "CUDA_GRAPHS",
        "CUDA_MEMORY_FRACTION",
        "TGI_WIGGLE_ROOM",
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LORA_ADAPTERS",
        "ROPE_SCALING",
        "ROPE_FACTOR",
        "WATERMARK_GAMMA",
        "WATERMARK_DELTA",
        "WEIGHTS_CACHE_OVERRIDE",
        "USE_FLASH_ATTENTION",
        "DISABLE_CUSTOM_KERNELS",
        "DISABLE_EXLLAMA",
        "EXLLAMA_VERSION",
        "USE_CUTLASS_W8A8",
        "XPU_MEMORY_FRACTION",
        "ROCM_USE_FLASH_ATTN_V2_TRITON",
        "ROCM_USE_CUSTOM_PAGED_ATTN",
        "ROCM_USE_SKINNY_GEMM",
    ),
    "download": ("WEIGHTS_CACHE_OVERRIDE",),
}
# Our own defaults where they are not TGI's, and why.
DIFFERENT: dict[tuple[Program, str], tuple[Any, str]] = {
    ("launcher", "--model-id"): ("smollm2-135m-instruct", "a model small enough to try on any machine"),
    ("router", "--tokenizer-name"): ("smollm2-135m-instruct", "the same model"),
    ("launcher", "--shard-uds-path"): (None, "TGI's, or another when a second instance runs"),
    ("launcher", "--master-port"): (None, "a free one, so that two instances run side by side"),
    ("launcher", "--prometheus-port"): (None, "TGI opens 9000 and answers nothing there"),
    ("router", "--prometheus-port"): (None, "TGI opens 9000 and answers nothing there"),
    ("launcher", "--hostname"): (
        None,
        "loopback where there is no key; the image keeps TGI's",
    ),
    ("router", "--hostname"): (None, "the same"),
    ("launcher", "--payload-limit"): (None, "TGI's, and more where the model takes images"),
    ("router", "--payload-limit"): (None, "the same"),
    ("router", "--max-image-fetch-size"): (33_554_432, "1 GiB of one request is no bound"),
    ("quantize", "--groupsize"): (32, "4.6 bits instead of 4.2, and far better"),
    ("quantize", "--percdamp"): (0.1, "better on texts that calibrated nothing"),
    ("quantize", "--act-order"): (True, "its groups stay in order, so that every reader can take it"),
    ("quantize", "--no-act-order"): (True, "the same"),
    ("launcher", "--cuda-memory-fraction"): (
        None,
        "1 on a GPU; on a CPU a pool of 16 contexts and a quarter of the memory",
    ),
}
POSITIONAL: dict[Program, tuple[str, ...]] = {
    "shard": ("model_id",),
    "download": ("model_id",),
    "quantize": ("model_id", "output_dir"),
}


@dataclass
class Ran:
    """What one command line led to."""

    settings: Any = None
    failure: SettingsError | None = None


def command_of(program: Program, ran: Ran | None = None) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    positional = dict.fromkeys(POSITIONAL.get(program, ()), "")
    seen = ran or Ran()
    app.command()(as_command(PROGRAMS[program], lambda s: setattr(seen, "settings", s), positional, program=program))
    return app


def run(program: Program, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Ran:
    """Parse as the program does, with nothing in the environment but `environ`."""
    ran = Ran()
    words = [*("a-model", "a-folder")[: len(POSITIONAL.get(program, ()))], *argv]
    environment: dict[str, str | None] = dict.fromkeys(os.environ) | dict(environ or {})
    result = CliRunner().invoke(command_of(program, ran), words, env=environment)
    if isinstance(result.exception, SettingsError):
        ran.failure = result.exception
    elif result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    else:
        assert result.exit_code == 0, result.output
    return ran


@cache
def options(program: Program) -> dict[str, Any]:
    """Every option of a program by each of its flags."""
    command = typer.main.get_command(command_of(program))
    return {flag: p for p in command.params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("-")}


def row_of(program: Program, flag: str) -> TgiFlag | None:
    name = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
    return next((row for row in rows_of(program) if row.name == name), None)


ALL_ROWS = [(program, *row) for program, rows in TABLES.items() for row in rows]


@pytest.mark.parametrize(("program", "flag", "variable", "default"), ALL_ROWS)
def test_every_flag_is_taken_by_name_variable_and_default(
    program: Program, flag: str, variable: str, default: Any
) -> None:
    option = options(program)[flag]
    assert not option.hidden
    if variable != "-":
        assert variable in option.envvar
    expected = DIFFERENT.get((program, flag), (default, ""))[0]
    if row_of(program, flag) is None:  # a row that is not honoured has no value at all
        found = tuple(option.default) if isinstance(option.default, list) else option.default
        assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(("program", "variable"), [(p, v) for p, names in VARIABLES.items() for v in names])
def test_every_variable_is_taken(program: Program, variable: str) -> None:
    assert any(variable in (option.envvar or ()) for option in options(program).values())


def test_the_short_p_is_the_port_not_the_metrics_port() -> None:
    for program in ("launcher", "router"):
        settings = run(program, ["-p", "3001"]).settings
        assert settings.port == 3001


# The two classes that are not honoured


def text_for(row: TgiFlag) -> str:
    """A value that asks for something."""
    if row.choices:
        return row.choices[0]
    return {"extension": ".bin"}.get(row.name, "0.5" if row.kind is float else "3")


def argv_for(row: TgiFlag) -> list[str]:
    flag = f"--{row.name.replace('_', '-')}"
    return [flag] if row.kind is bool else [flag, text_for(row)]


def given_by_variable(row: TgiFlag) -> dict[str, str]:
    assert row.env is not None
    return {row.env: "true" if row.kind is bool else text_for(row)}


INERT_ON = [(p, row) for row in INERT for p in PROGRAMS if p in row.flag + row.variable]
REFUSED_ON = [(p, row) for row in REFUSED for p in PROGRAMS if p in row.flag + row.variable]


@pytest.mark.parametrize(("program", "row"), INERT_ON, ids=lambda x: x if isinstance(x, str) else x.name)
def test_an_inert_one_is_one_line_of_the_log_when_given(
    program: Program, row: TgiFlag, caplog: pytest.LogCaptureFixture
) -> None:
    ways: list[tuple[list[str], dict[str, str]]] = [(argv_for(row), {})] if program in row.flag else []
    ways += [([], given_by_variable(row))] if row.env else []
    for argv, environ in ways:
        with caplog.at_level("INFO", "funitel"):
            ran = run(program, argv, environ)
        assert ran.settings == run(program, []).settings
        (line,) = caplog.messages
        given = " ".join(argv) or " ".join(f"{name}={value}" for name, value in environ.items())
        assert line == f"{given} is accepted and changes nothing: {row.why}"
        caplog.clear()


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_said_of_what_is_not_given(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "funitel"):
        run(program, [])
        run(program, [], {"TRUST_REMOTE_CODE": "false", "NGROK": "0", "SPECULATE": ""})
    assert caplog.messages == []


@pytest.mark.parametrize(("program", "row"), REFUSED_ON, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_refused_one_ends_the_program_with_its_name_value_and_what_to_do(program: Program, row: TgiFlag) -> None:
    if program in row.flag:
        failure = run(program, argv_for(row)).failure
        assert failure is not None
        assert failure.message == f"{' '.join(argv_for(row))} cannot be honoured: {row.why}"
    if row.env:
        ((name, value),) = given_by_variable(row).items()
        failure = run(program, [], {name: value}).failure
        assert failure is not None
        assert failure.message == f"{name}={value} cannot be honoured: {row.why}"


@pytest.mark.parametrize(("program", "row"), REFUSED_ON, ids=lambda x: x if isinstance(x, str) else x.name)
def test_what_asks_for_nothing_is_no_reason_to_refuse(program: Program, row: TgiFlag) -> None:
    for word in getattr(row, "allowed", ()):
        assert run(program, [f"--{row.name.replace('_', '-')}", word]).failure is None


REFUSED_CHOICES = [
    (program, name, value)
    for name, values in REFUSED_VALUES.items()
    for value in values
    for program in ("launcher", "shard")
]


@pytest.mark.parametrize(("program", "name", "value"), REFUSED_CHOICES)
def test_a_value_that_cannot_be_honoured_is_refused_however_it_is_given(
    program: Program, name: str, value: str
) -> None:
    flag = f"--{name.replace('_', '-')}"
    for argv, environ, given in (
        ([flag, value], {}, f"{flag} {value}"),
        ([], {name.upper(): value}, f"{name.upper()}={value}"),
    ):
        failure = run(program, argv, environ).failure
        assert failure is not None
        assert failure.message == f"{given} cannot be honoured: {REFUSED_VALUES[name][value]}"


def test_tgis_quantisers_are_all_known() -> None:
    option = inspect.signature(as_command(LauncherSettings, print, program="launcher")).parameters["quantize"]
    words = ("awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes", "fp8")
    for word in (*words, "bitsandbytes-nf4", "bitsandbytes-fp4"):
        assert option.default.parser(word) == word


TRANSLATED = [("eetq", "int8"), ("bitsandbytes", "int8"), ("marlin", "marlin")]


@pytest.mark.parametrize("program", ["launcher", "shard"])
@pytest.mark.parametrize(("value", "meant"), TRANSLATED)
def test_a_value_with_another_name_here_is_taken_and_logged_however_it_is_given(
    program: Program, value: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert {name: row.value for name, row in TRANSLATED_VALUES["quantize"].items()} == dict(TRANSLATED)
    for argv, environ, given in (
        (["--quantize", value], {}, f"--quantize {value}"),
        ([], {"QUANTIZE": value}, f"QUANTIZE={value}"),
        ([], {"FUNITEL_QUANTIZE": value}, f"FUNITEL_QUANTIZE={value}"),
    ):
        caplog.clear()
        with caplog.at_level("INFO", "funitel"):
            settings = run(program, argv, environ).settings
        assert settings == run(program, ["--quantize", meant]).settings
        assert settings.quantize == meant
        (line,) = (message for message in caplog.messages if message.startswith(given))
        why = TRANSLATED_VALUES["quantize"][value].why
        assert line == f"{given} is taken{'' if meant == value else f' as --quantize {meant}'}: {why}"


def test_a_child_is_told_the_value_and_says_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    given = run("shard", ["--quantize", "marlin"]).settings
    with caplog.at_level("INFO", "funitel"):
        child = run("shard", [*to_argv(given, skip=["model_id"]), "--exit-with-parent", "1"]).settings
    assert child.quantize == "marlin"
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("program", "argv", "words"),
    [
        ("launcher", ["--quantize", "int3"], ["--quantize", "int3", "awq"]),
        ("launcher", ["--usage-stats", "maybe"], ["--usage-stats", "maybe", "no-stack"]),
        ("launcher", ["--kv-cache-dtype", "int3"], ["--kv-cache-dtype", "int3", "fp8_e5m2"]),
        ("launcher", ["--speculate", "two"], ["--speculate", "'two' is not a valid integer"]),
        ("launcher", ["--cuda-graphs", "1,x"], ["--cuda-graphs", "'1,x' is not a list of whole numbers"]),
        ("launcher", ["--sharded", "perhaps"], ["--sharded", "'perhaps' is not one of true, 1, yes"]),
        ("shard", ["--speculate", "two"], ["--speculate", "'two' is not a valid integer"]),
    ],
)
def test_a_value_of_the_wrong_kind_is_a_usage_error_whatever_its_class(
    program: Program, argv: list[str], words: list[str]
) -> None:
    result = CliRunner().invoke(command_of(program), argv, env=dict.fromkeys(os.environ), standalone_mode=False)
    assert isinstance(result.exception, typer.BadParameter)
    for word in words:
        assert word in result.exception.format_message()


# Booleans


@pytest.mark.parametrize(
    ("word", "value"),
    [(w, True) for w in ("true", "1", "yes", "True", "YES", "on")]
    + [(w, False) for w in ("false", "0", "no", "False", "NO", "off")],
)
def test_booleans_are_read_in_every_common_spelling(word: str, value: bool) -> None:
    assert run("launcher", [], {"JSON_OUTPUT": word}).settings.json_output is value
    assert run("launcher", [], {"PREFILL_CHUNKING": word}).settings.prefill_chunking is value
    assert run("launcher", ["--sharded", word], {}).settings.sharded is value
    assert run("shard", [], {"REQUEST_LOGPROBS": word}).settings.enable_prefill_logprobs is value
    assert (run("launcher", [], {"NGROK": word}).failure is not None) is value


def test_a_switch_can_be_turned_off_against_its_variable() -> None:
    assert run("launcher", ["--no-json-output"], {"JSON_OUTPUT": "true"}).settings.json_output is False


def test_a_variable_that_is_no_boolean_is_named_with_its_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from funitel.proto.settings.fields import run_app

    monkeypatch.setattr("sys.argv", ["launcher"])
    monkeypatch.setenv("JSON_OUTPUT", "maybe")
    with pytest.raises(SystemExit) as ended:
        run_app(command_of("launcher"))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: Invalid value for '--json-output' (env var: 'JSON_OUTPUT'): 'maybe' is not one of")


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert run("launcher", [], dict.fromkeys(("JSON_OUTPUT", "MAX_BATCH_SIZE", "QUANTIZE"), "")).failure is None


# What TGI's launcher tells its children. Source: contract reference 2.8.

SHARD_ENVIRON = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    "CUDA_MEMORY_FRACTION": "0.8",
    "SAFETENSORS_FAST_GPU": "1",
    "HF_HUB_ENABLE_HF_TRANSFER": "1",
    "ROPE_SCALING": "linear",
    "ROPE_FACTOR": "2.0",
    "MAX_TOTAL_TOKENS": "2048",
    "MAX_BATCH_SIZE": "4",
    "REQUEST_LOGPROBS": "1",
    "CUDA_GRAPHS": "1,2,4,8,16,32",
    "DISABLE_CUSTOM_KERNELS": "True",
    "WATERMARK_GAMMA": "0.25",
    "ATTENTION": "flashinfer",
    "PREFIX_CACHING": "true",
}


def test_a_shard_understands_tgis_launcher() -> None:
    argv = (
        "--uds-path /tmp/text-generation-server --logger-level INFO --json-output --trust-remote-code --sharded "
        "--quantize gptq --speculate 0 --dtype float16 --revision main "
        "--otlp-service-name text-generation-inference.router --max-input-tokens 1024"
    ).split()
    settings = run("shard", argv, SHARD_ENVIRON).settings
    assert (settings.rank, settings.world_size, settings.sharded) == (1, 2, True)
    assert (settings.uds_path, settings.logger_level) == ("/tmp/text-generation-server", "INFO")
    assert (settings.quantize, settings.dtype, settings.revision) == ("gptq", "float16", "main")
    assert (settings.rope_scaling, settings.rope_factor) == ("linear", 2.0)
    assert (settings.cuda_memory_fraction, settings.watermark_gamma) == (0.8, 0.25)
    assert settings.enable_prefill_logprobs
    assert settings.json_output


@pytest.mark.parametrize("more", [[], ["--merge-lora"], ["--revision", "main", "--trust-remote-code"]])
def test_a_download_understands_tgis_launcher(more: list[str]) -> None:
    argv = ["--extension", ".safetensors", "--logger-level", "INFO", "--json-output", *more]
    settings = run("download", argv, {"HF_HUB_ENABLE_HF_TRANSFER": "1"}).settings
    assert settings == DownloadSettings(
        model_id="a-model", json_output=True, revision="main" if "--revision" in more else None
    )


def test_a_router_understands_tgis_launcher() -> None:
    argv = (
        "--max-client-batch-size 4 --max-concurrent-requests 128 --max-best-of 2 --max-stop-sequences 4 "
        "--max-top-n-tokens 5 --hostname 0.0.0.0 --port 80 --prometheus-port 9000 "
        "--master-shard-uds-path /tmp/text-generation-server-0 --tokenizer-name org/model --payload-limit 2000000 "
        "--max-input-tokens 1024 --max-total-tokens 2048 --max-batch-prefill-tokens 1024 --waiting-served-ratio 0.3 "
        "--max-waiting-tokens 20 --validation-workers 2 --max-batch-total-tokens 8192 --max-batch-size 8 "
        "--revision main --trust-remote-code --json-output --otlp-service-name text-generation-inference.router "
        "--cors-allow-origin https://a --cors-allow-origin https://b --usage-stats off --disable-grammar-support "
        "--tokenizer-config-path /data/tokenizer_config.json --api-key sesame"
    ).split()
    settings = run("router", argv, {"HOSTNAME": "3f2a"}).settings
    assert (settings.tokenizer_name, settings.revision) == ("org/model", "main")
    assert (settings.port, settings.prometheus_port, settings.hostname) == (80, 9000, "0.0.0.0")
    assert settings.cors_allow_origin == ("https://a", "https://b")
    assert (settings.max_batch_size, settings.api_key, settings.waiting_served_ratio) == (8, "sesame", 0.3)
    assert settings.disable_grammar_support
