"""One line an event, for people or for machines."""

import json
import logging
import re
import warnings
from collections.abc import Iterator

import pytest

from funitel.proto.process import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Give the logging of the test run back as it was."""
    root, ours = logging.getLogger(), logging.getLogger("funitel")
    before = (root.handlers, root.level, ours.level)
    yield
    root.handlers = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
    logging.captureWarnings(False)


def events(captured: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    """The JSON lines on stderr; nothing may be on stdout."""
    output = captured.readouterr()
    assert output.out == ""
    return [json.loads(line) for line in output.err.splitlines()]


def test_text_is_one_line_with_time_level_process_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("shard-1")
    logging.getLogger("funitel.router.engine.engine").info("connected shards=%d", 2)
    output = capsys.readouterr()
    assert output.out == ""
    pattern = (
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO shard-1 funitel\.router\.engine\.engine: connected shards=2\n"
    )
    assert re.fullmatch(pattern, output.err)


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", json_output=True)
    logging.getLogger("funitel.router").warning("two\nlines and ünïcode")
    (event,) = events(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", str(event.pop("timestamp")))
    assert isinstance(event.pop("line_number"), int)
    assert event == {
        "level": "WARN",
        "filename": "test_logs.py",
        "process": "router",
        "target": "funitel.router",
        "message": "two\nlines and ünïcode",
    }


def test_the_launchers_json_has_its_message_where_tgis_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("launcher", json_output=True)
    logging.getLogger("funitel.launcher").info("on its way")
    (event,) = events(capsys)
    assert event["fields"] == {"message": "on its way"}
    assert event["message"] == "on its way"


@pytest.mark.parametrize("process", ["shard-0", "download"])
def test_the_json_of_shards_is_what_tgis_launcher_reads_from_their_stdout(
    process: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(process, json_output=True)
    logging.getLogger("funitel.model_server").warning("warm")
    output = capsys.readouterr()
    assert output.err == ""
    event = json.loads(output.out)
    assert event["text"].endswith(f"WARNING {process} funitel.model_server: warm\n")
    assert event["record"]["level"]["name"] == "WARNING"
    assert event["record"]["message"] == "warm"
    assert event["record"]["time"]["timestamp"] > 1.7e9


def test_json_carries_the_exception(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", json_output=True)
    try:
        raise ValueError("no such thing")
    except ValueError:
        logging.getLogger("funitel.router").exception("failed")
    (event,) = events(capsys)
    assert event["message"] == "failed"
    assert str(event["exception"]).endswith("ValueError: no such thing")


def test_levels_are_for_our_loggers_others_only_warn(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", json_output=True, level="debug")
    for name in ("funitel.router", "uvicorn"):
        logging.getLogger(name).debug("debug of %s", name)
        logging.getLogger(name).warning("warning of %s", name)
    assert [event["message"] for event in events(capsys)] == [
        "debug of funitel.router",
        "warning of funitel.router",
        "warning of uvicorn",
    ]


def test_warnings_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", json_output=True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)  # pytest and catch_warnings took the hook back
        warnings.warn("old ways", DeprecationWarning, stacklevel=1)
    (event,) = events(capsys)
    assert "old ways" in str(event["message"])


def test_configuring_again_does_not_double_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", json_output=True)
    logs.configure("router", json_output=True)
    logging.getLogger("funitel").info("once")
    assert len(events(capsys)) == 1


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("debug", logging.DEBUG),
        ("INFO", logging.INFO),
        ("warn", logging.WARNING),
        ("error", logging.ERROR),
        ("trace", logging.DEBUG),
        ("off", logging.CRITICAL),
        ("info,text_generation_router=debug", logging.INFO),
        (" debug , tower=off", logging.DEBUG),
        ("nonsense", logging.INFO),
        ("", logging.INFO),
    ],
)
def test_levels_as_tgi_spells_them(text: str, level: int) -> None:
    assert logs.parse_level(text) == level


@pytest.mark.parametrize(
    ("text", "router", "launcher"),
    [
        ("warn,text_generation_router=debug", logging.DEBUG, logging.WARNING),
        ("text_generation_router=debug,text_generation_launcher=error", logging.DEBUG, logging.ERROR),
        ("text_generation_router::server=debug,info", logging.DEBUG, logging.INFO),
        ("tower=debug,warn", logging.WARNING, logging.WARNING),
    ],
)
def test_a_filter_may_name_one_program(text: str, router: int, launcher: int) -> None:
    assert (logs.parse_level(text, "router"), logs.parse_level(text, "launcher")) == (router, launcher)


@pytest.mark.parametrize("level", logs.LEVELS)
def test_every_documented_level_is_known(level: str) -> None:
    assert logging.getLevelName(logs.parse_level(level)) == level.upper()


HOSTILE = "a\r\n2026-01-01T00:00:00.000Z ERROR router funitel: forged\x1b[2J\u202e\u2028\ud800\x00\x9b"


@pytest.mark.parametrize("process", ["router", "shard-0"])
@pytest.mark.parametrize("json_output", [False, True])
def test_what_an_event_quotes_is_obeyed_by_nobody(
    process: str, json_output: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(process, json_output=json_output)
    logging.getLogger("funitel").warning("given %s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("funitel").exception("failed")
    lines = "".join(capsys.readouterr()).split("\n")[:-1]
    assert all(line.isprintable() for line in lines)
    events = [line for line in lines if not line.startswith("  ")]
    assert len(events) == 2
    if json_output:
        records = [json.loads(line) for line in events]
        said = [record["record"]["message"] if "record" in record else record["message"] for record in records]
        assert said == [f"given {HOSTILE}", "failed"]


@pytest.mark.parametrize("json_output", [False, True])
def test_a_long_event_is_cut(json_output: bool, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", json_output=json_output)
    logging.getLogger("funitel").warning("x" * 1_000_000)
    assert len(capsys.readouterr().err) < 2 * logs.MAX_CHARACTERS


def test_facts_stand_behind_the_words_and_hold_nothing_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router")
    with logs.log_context(request_id="r-1"), logs.log_context(trace_id="t-1"):
        logs.log_fields(
            logging.getLogger("funitel.router"), "answered", status=200, route="/x y\n\x1b[31m\x9b", nothing=None
        )
    logging.getLogger("funitel.router").info("later")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(r'answered request_id=r-1 trace_id=t-1 status=200 route="/x y\n\u001b[31m\u009b"')
    assert second.endswith("later")


def test_facts_stand_before_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router")
    with logs.log_context(request_id="r-1"):
        try:
            raise ValueError("here")
        except ValueError:
            logging.getLogger("funitel.router").exception("failed")
    output = capsys.readouterr().err.splitlines()
    assert output[0].endswith("failed request_id=r-1")
    assert output[-1].strip() == "ValueError: here"


def test_facts_are_keys_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", json_output=True)
    with logs.log_context(request_id="r-1"):
        logs.log_fields(logging.getLogger("funitel.router"), "answered", status=200, cancelled=False, seconds=0.5)
    (event,) = events(capsys)
    assert {"request_id": "r-1", "status": 200, "cancelled": False, "seconds": 0.5}.items() <= event.items()
    assert event["filename"] == "test_logs.py"


def test_facts_of_a_shard_are_loguru_s_extra(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("shard-0", json_output=True)
    logs.log_fields(logging.getLogger("funitel.model_server"), "ends early", logging.WARNING, request_id="r-1")
    assert json.loads(capsys.readouterr().out)["record"]["extra"] == {"request_id": "r-1"}


def test_a_line_below_the_level_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", level="warning")
    logs.log_fields(logging.getLogger("funitel.router"), "answered", status=200)
    assert capsys.readouterr().err == ""


def test_every_line_has_its_own_second(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router")
    logger = logging.getLogger("funitel.router")
    for seconds in (0.0, 1.25, 1.5, 86400.0):
        record = logger.makeRecord(logger.name, logging.INFO, "here", 1, "a line", (), None)
        record.created, record.msecs = seconds, seconds % 1 * 1000
        logger.handle(record)
    times = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
    days = ["1970-01-01T00:00:00.000Z", "1970-01-01T00:00:01.250Z", "1970-01-01T00:00:01.500Z"]
    assert times == [*days, "1970-01-02T00:00:00.000Z"]
