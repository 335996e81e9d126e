"""`benchmarks/startup.py`: phases by the lines of a log, and one token of a server that is then ended."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "startup.py"

SERVER = """
import http.server, signal, sys, time
if "--broken" in sys.argv:
    print("error: no such model")
    sys.exit(1)
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--silent" in sys.argv:
    print("loading", flush=True)
    time.sleep(60)
for line in ("launcher: settings: model_id=x", "loading weights: 0% of 1 MB", "loaded model=x", "KV pool tokens=3"):
    time.sleep(0.02)
    print(line, flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.1)
        if "--failing" in sys.argv:
            return self.send_error(503, "not now")
        self.send_response(200 if b'"max_new_tokens": 1}' in body else 400)
        self.end_headers()
    def log_message(self, *args):
        pass

server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
print("ready: it serves", flush=True)
server.serve_forever()
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("startup", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    monkeypatch.setattr(loaded, "PROGRAM", (sys.executable, "-c", SERVER))
    return loaded


def test_phases_of_a_start(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["startup.py", "tiny", "--starts", "1", "--", "--quantize", "int8"])
    module.main()
    *lines, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert (summary["model"], summary["flags"], len(summary["totals"])) == ("tiny", ["--quantize", "int8"], 1)
    medians = summary["medians"]
    phases = [*module.PHASES, "first token"]
    assert list(medians) == [*phases, "total", "processors"]
    assert len(lines) == len(medians)
    assert medians["first token"] >= 0.1
    assert all(medians[phase] >= 0.015 for phase in ("model is present", "imports", "weights", "pool"))
    assert sum(medians[phase] for phase in phases) == pytest.approx(medians["total"], abs=0.05)
    assert medians["processors"] > 0


def test_a_server_that_does_not_start_is_one_line(module: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"^error: the server ended: error: no such model$"):
        module.start("tiny", ["--broken"])


def test_a_server_that_is_never_ready_is_ended_with_one_line(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SECONDS", 0.5)
    with pytest.raises(SystemExit, match=r"^error: the server was not ready within 0\.5 s: loading$"):
        module.start("tiny", ["--silent"])


def test_a_server_that_gives_no_token_is_one_line(module: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"^error: the server gave no token: HTTP Error 503: not now$"):
        module.start("tiny", ["--failing"])


def test_a_server_that_does_not_stop_is_killed(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 0.1)
    assert module.start("tiny", ["--stubborn"])["total"] < 30


def test_a_phase_that_one_start_did_not_log_has_no_median(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = iter([{}, {"pool": 1.0, "total": 2.0}, {"total": 4.0}])
    monkeypatch.setattr(module, "start", lambda model, flags: next(starts))
    monkeypatch.setattr(sys, "argv", ["startup.py", "tiny", "--starts", "2"])
    module.main()
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["totals"], summary["medians"]) == ([2.0, 4.0], {"total": 3.0})
