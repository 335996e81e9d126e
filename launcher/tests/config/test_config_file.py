"""The file of --config: what it may hold, what beats what, and which line an error names."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from funitel.launcher.config.command_line import ParsedCommandLine, launcher_app
from funitel.launcher.config.config_file import FLAGS, MAX_BYTES, read_config
from funitel.launcher.config.resolve import resolve
from funitel.launcher.config.upgrade import next_settings
from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import SettingsError
from funitel.proto.settings.options import usage_message
from funitel.proto.settings.variables import names_of
from funitel.router.settings import opens_port

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the lines of a file and return its path."""

    def lines(*lines: str) -> str:
        path = tmp_path / "settings"
        path.write_text("\n".join(lines))
        return str(path)

    return lines


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (name for variable in FLAGS for name in (*names_of(variable), "FUNITEL_CONFIG")):
        monkeypatch.delenv(name, raising=False)


def given(*argv: str) -> ParsedCommandLine:
    found: list[ParsedCommandLine] = []
    launcher_app(argv, os.environ, found.append)(list(argv), standalone_mode=False)
    return found[0]


# Lines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("MODEL_ID=org/model", "org/model"),
        ("  MODEL_ID = org/model \r", "org/model"),
        ("MODEL_ID='org/model'", "org/model"),
        ('MODEL_ID=" a name "', " a name "),
        ("MODEL_ID=a=b#c", "a=b#c"),
        ("MODEL_ID=it's", "it's"),
        ("MODEL_ID=''", ""),
        ("MODEL_ID=", ""),
        ("\ufeffMODEL_ID=modèle", "modèle"),
    ],
)
def test_a_value(write: Write, line: str, value: str) -> None:
    assert read_config(write(line)).values == {"MODEL_ID": value}


def test_comments_and_blank_lines_count_and_the_last_line_of_a_variable_wins(write: Write) -> None:
    file = read_config(write("# ours", "", "PORT=1", "  # PORT=2", "DTYPE=float32", "PORT=3", ""))
    assert file.values == {"PORT": "3", "DTYPE": "float32"}
    assert file.lines == {"PORT": (6, "PORT"), "DTYPE": (5, "DTYPE")}


def test_the_prefix_of_a_variable_may_be_left_out_or_added(write: Write) -> None:
    file = read_config(write("NUM_THREADS=1", "FUNITEL_PORT=3", "FUNITEL_NUM_THREADS=2"))
    assert file.values == {"FUNITEL_NUM_THREADS": "2", "PORT": "3"}
    assert file.position("PORT").endswith("line 2: FUNITEL_PORT")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("just words", "line 2: not of the form VARIABLE=value"),
        ("XYZZY=1", "line 2: 'XYZZY' is not the variable of a setting"),
        ("port=1", "line 2: 'port' is not the variable of a setting"),
        ("=1", "line 2: '' is not the variable of a setting"),
        ("--port=1", "line 2: '--port' is not the variable of a setting"),
        ("FUNITEL_CONFIG=/there", "line 2: 'FUNITEL_CONFIG' is not the variable of a setting"),
        ('MODEL_ID="a', 'line 2: MODEL_ID begins with ", so its only other "'),
        ("MODEL_ID='", "line 2: MODEL_ID begins with '"),
        ("MODEL_ID='a' 'b'", "line 2: MODEL_ID begins with '"),
        ("MODEL_ID='a' # b", "line 2: MODEL_ID begins with '"),
        ("API_KEY=a\0b", "line 2: API_KEY has a character that cannot be printed"),
    ],
)
def test_a_wrong_line_is_named(write: Write, line: str, words: str) -> None:
    path = write("# first", line)
    with pytest.raises(SettingsError) as raised:
        read_config(path)
    assert raised.value.message.startswith(f"{path}, {words}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken, long, pipe = tmp_path / "broken", tmp_path / "long", tmp_path / "pipe"
    broken.write_bytes(b"MODEL_ID=\xff")
    long.write_bytes(b"#" * (MAX_BYTES + 1))
    os.mkfifo(pipe)
    for path, words in (
        (tmp_path / "none", "cannot be read: No such file or directory"),
        (tmp_path, "is not a regular file"),
        (pipe, "is not a regular file"),
        (broken, "cannot be read: it is not UTF-8"),
        (long, f"has more than {MAX_BYTES} bytes"),
    ):
        with pytest.raises(SettingsError, match=rf"^--config {path} {words}$"):
            read_config(str(path))


# What beats what --------------------------------------------------------------------------------------------


def test_flag_beats_environment_beats_file_beats_default(
    write: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (
        ("DTYPE", "bfloat16"),
        ("MAX_BEST_OF", "3"),
        ("FUNITEL_MAX_QUEUED_TOKENS", "7"),
        ("FUNITEL_PORT", "3001"),
        ("MAX_CLIENT_BATCH_SIZE", ""),
        ("FUNITEL_DEFAULT_MAX_BATCH_SIZE", "99"),
        ("FUNITEL_DEFAULT_MAX_STOP_SEQUENCES", "9"),
    ):
        monkeypatch.setenv(name, value)
    path = write(
        "MODEL_ID=filed",
        "DTYPE=float32",
        "MAX_BATCH_SIZE=5",
        "JSON_OUTPUT=true",
        "BLOCK_SIZE=many",
        "CORS_ALLOW_ORIGIN=https://a https://b",
        "PORT=3002",
        "MAX_CLIENT_BATCH_SIZE=6",
    )
    before = dict(os.environ)
    found = given("--config", path, "--block-size", "32", "--no-json-output")
    told = found.settings
    assert (told.model_id, told.dtype, told.block_size, told.max_best_of) == ("filed", "bfloat16", 32, 3)
    assert (told.max_queued_tokens, told.port, told.json_output) == (7, 3001, False)
    assert told.max_batch_size == 5, "a default of the image is beaten by the file"
    assert told.max_stop_sequences == 9
    assert told.max_client_batch_size == 6, "an empty variable is as good as none"
    assert told.cors_allow_origin == ("https://a", "https://b")
    assert dict(os.environ) == before
    assert not {"DTYPE", "MAX_BEST_OF", "FUNITEL_PORT"} & set(found.environ), "children get settings as flags only"
    assert [line for line in caplog.messages if "no effect" in line] == [
        f"{path}, line 2: DTYPE has no effect: the environment has DTYPE",
        f"{path}, line 4: JSON_OUTPUT has no effect: --json-output is given",
        f"{path}, line 5: BLOCK_SIZE has no effect: --block-size is given",
        f"{path}, line 7: PORT has no effect: the environment has FUNITEL_PORT",
    ]


def test_what_the_machine_leaves_in_the_environment_does_not_hide_the_file(
    write: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOSTNAME", socket.gethostname())
    monkeypatch.setenv("PORT", "tcp://10.0.0.1:80")
    told = given("--config", write("HOSTNAME=0.0.0.0", "PORT=3002")).settings
    assert (told.hostname, told.port) == ("0.0.0.0", 3002)
    assert not [line for line in caplog.messages if "no effect" in line]


def test_a_stray_key_neither_replaces_that_of_the_file_nor_stands_beside_a_file_of_keys(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "stray")
    told = given("--config", write("API_KEY=filed")).settings
    assert (told.api_key, opens_port(told)) == ("filed", True)
    told = given().settings
    assert (told.api_key, opens_port(told)) == ("stray", False)
    with pytest.raises(SettingsError, match="^API_KEY is set in the environment and would be a key beside those of"):
        given("--api-key-file", "/keys")
    monkeypatch.setenv("FUNITEL_API_KEY", "ours")
    assert given("--config", write("API_KEY=filed")).settings.api_key == "ours"
    assert given("--api-key-file", "/keys").settings.api_key == "ours"


def test_an_empty_line_of_the_file_leaves_the_images_default(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNITEL_DEFAULT_PORT", "80")
    found = given("--config", write("PORT="))
    assert found.settings.port == 80
    assert "FUNITEL_DEFAULT_PORT" not in found.environ, "children get settings as flags only"


def test_help_reads_no_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FUNITEL_CONFIG", "/nowhere")
    for flag, words in (("--help", "Serve a model"), ("--version", "funitel ")):
        launcher_app([flag], os.environ, lambda _: None)([flag], standalone_mode=False)
        assert words in capsys.readouterr().out


def test_a_variable_names_the_file_and_a_flag_beats_it(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("MODEL_ID=filed")
    monkeypatch.setenv("FUNITEL_CONFIG", path)
    assert given().settings.model_id == "filed"
    assert given("--config", path).settings.config == path
    with pytest.raises(SettingsError, match="^--config /nowhere cannot be read"):
        given("--config", "/nowhere")


def test_the_file_is_read_again_with_the_same_flags(write: Write) -> None:
    first = given("--config", write("MODEL_ID=old", "DTYPE=float32"), "--block-size", "32")
    write("MODEL_ID=new")
    again = first.reread().settings
    assert (again.model_id, again.block_size) == ("new", 32)
    assert again.dtype is None, "a line that is gone leaves nothing behind"
    write("MODEL_ID=new", "MAX_BATCH_SIZE=many")
    with pytest.raises(SettingsError, match="line 2: MAX_BATCH_SIZE: .*'many' is not a valid integer"):
        first.reread()


# What is wrong with a value ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "argv", "words"),
    [
        (["PORT=3000", "PORT=many"], [], "line 2: PORT: .*'many' is not a valid integer"),
        (["", "JSON_OUTPUT=perhaps"], [], "line 2: JSON_OUTPUT: .*'perhaps' is not one of"),
        (["DTYPE=float7"], [], "line 1: DTYPE: .*'float7' is not one of"),
        (["NUM_SHARD=0"], [], "line 1: NUM_SHARD: --num-shard must be >= 1, given 0"),
        (["NUM_SHARD=1"], ["--sharded", "true"], "line 1: NUM_SHARD: --sharded true needs --num-shard > 1, given 1"),
        (["DTYPE=float32", "QUANTIZE=exl2"], [], "line 2: QUANTIZE: QUANTIZE=exl2 cannot be honoured"),
    ],
)
def test_a_wrong_value_names_file_line_and_variable(
    write: Write, lines: list[str], argv: list[str], words: str
) -> None:
    path = write(*lines)
    with pytest.raises(SettingsError, match=f"^{path}, {words}"):
        given("--config", path, *argv)


@pytest.mark.parametrize("variable", ["PORT", "FUNITEL_PORT", "FUNITEL_DEFAULT_PORT"])
def test_a_wrong_variable_is_a_usage_error_and_not_blamed_on_the_file(
    variable: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "many")
    lines = ["DTYPE=float32"] + ([] if "DEFAULT" in variable else ["PORT=3002"])
    with pytest.raises(typer.BadParameter) as caught:
        given("--config", write(*lines))
    assert f"(env var: '{variable}'): 'many' is not a valid integer" in usage_message(caught.value)


def test_a_wrong_flag_is_not_blamed_on_the_file(write: Write) -> None:
    with pytest.raises(SettingsError, match="^--num-shard must be >= 1, given 0"):
        given("--config", write("NUM_SHARD=2"), "--num-shard", "0")


# The next generation ----------------------------------------------------------------------------------------


def following(before: LauncherSettings, now: LauncherSettings, **first: str) -> object:
    return next_settings(before, resolve(before, 1, "/tmp/path"), now, {}, 2)


CPU = LauncherSettings(device="cpu", port=3000)


def test_the_next_generation_has_the_new_settings_and_sockets_of_its_own() -> None:
    before = LauncherSettings(device="cpu", port=0, master_port=29500)
    first = resolve(before, 1, "/tmp/path")
    now = LauncherSettings(
        device="cpu", port=0, master_port=29500, model_id="new", num_replicas=2, num_shard=2, max_best_of=7
    )
    found = next_settings(before, first, now, {}, 2)
    assert (found.model_id, found.served_model_name, found.max_best_of) == ("new", "new", 7)
    assert (found.num_shard, found.num_replicas, len(found.master_ports)) == (2, 2, 2)
    assert (found.port, found.shard_uds_path) == (first.port, "/tmp/path-upgrade-2")
    assert 29500 not in found.master_ports


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"port": 3001}, "--port cannot change from 3000 to 3001 before a restart"),
        ({"hostname": "127.0.0.2"}, "--hostname cannot change from not given to 127.0.0.2 before a restart"),
        ({"default_hostname": "0.0.0.0"}, "--default-hostname cannot change from not given to 0.0.0.0"),
        ({"prometheus_port": 9000}, "--prometheus-port cannot change from not given to 9000"),
        ({"shard_uds_path": "/tmp/other"}, "--shard-uds-path cannot change from not given to /tmp/other"),
        ({"master_port": 29500}, "--master-port cannot change from not given to 29500"),
        ({"api_key": "new", "hostname": "0.0.0.0"}, "--hostname cannot change from not given to 0.0.0.0"),
        ({"api_key_file": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_cannot_change_or_be_is_refused(changed: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        following(CPU, LauncherSettings(**({"device": "cpu", "port": 3000} | changed)))  # type: ignore[arg-type]


def test_the_same_address_in_other_words_is_no_change() -> None:
    following(CPU, LauncherSettings(device="cpu", port=3000, hostname="127.0.0.1"))


def test_a_new_key_leaves_the_port_on_loopback_and_the_last_one_cannot_be_taken_away() -> None:
    keyed = LauncherSettings(device="cpu", port=3000, api_key="sesame")
    found = next_settings(CPU, resolve(CPU, 1, "/tmp/path"), keyed, {}, 1)
    assert (found.hostname, found.api_key) == ("127.0.0.1", "sesame")
    with pytest.raises(SettingsError, match=r"--api-key, .* must stay.* cannot change from 0\.0\.0\.0"):
        following(keyed, CPU)
