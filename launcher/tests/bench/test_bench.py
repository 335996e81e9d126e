"""`funitel bench` against imitated servers: slow ones, failing ones, and ones that know less than ours."""

import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.bench import plot
from funitel.launcher.bench.apis import IGNORE_EOS, USAGE
from funitel.launcher.bench.command import bench
from funitel.launcher.bench.figures import Timeline
from funitel.launcher.bench.http import Endpoint
from funitel.launcher.bench.load import ClientLoad, Level, run_level
from funitel.launcher.bench.progress import BenchProgress
from funitel.launcher.bench.report import LevelResult, ServerResult, warnings
from funitel.launcher.bench.settings import BenchSettings
from funitel.launcher.bench.target import PreparedRequest, Target
from funitel.launcher.bench.workload import WORDS, Workload
from funitel.proto.errors import FunitelError, NotReady, SettingsError
from funitel.proto.settings.options import Counts, Rates
from funitel_testing.fake_api import FakeApi, serving
from funitel_testing.fake_streams import FakeStreams, streaming

Start = Callable[..., FakeStreams]
APIS = ("openai-chat", "openai-completions", "tgi")
OPTIONS = frozenset({IGNORE_EOS, USAGE})


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(**behaviour)`: an imitated server for the length of the test."""
    with ExitStack() as stack:
        yield lambda **behaviour: stack.enter_context(streaming(FakeStreams(**behaviour)))


def target(fake: FakeStreams, api: str = "openai-chat", *, timeout: float = 10.0, model: str = "") -> Target:
    return Target("it", api, Endpoint(fake.url), model=model, options=OPTIONS, timeout=timeout)


def measured(capsys: pytest.CaptureFixture[str], *fakes: FakeStreams, **settings: Any) -> tuple[str, Any]:
    """Run the command; return its tables and its JSON."""
    settings = {"warmup": 0, "concurrency": Counts("2"), "prompt_tokens": 20, "output_tokens": 5} | settings
    bench(BenchSettings(url=tuple(fake.url for fake in fakes), **settings))
    tables, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    return tables, json.loads(last)


@pytest.mark.parametrize("api", APIS)
async def test_times_are_those_of_the_server(start: Start, api: str) -> None:
    fake = start(first_seconds=0.1, gap_seconds=0.03)
    server = target(fake, api)
    await server.probe()
    begin = time.perf_counter()
    one = await server.ask(PreparedRequest("some words", 6))
    elapsed = time.perf_counter() - begin
    assert one.failure is None
    assert one.is_counted
    assert 0.1 <= one.ttft < one.arrivals[-1] - one.started
    assert len(one.gaps) == (6 if api == "tgi" else 5)  # TGI's end token is an event of its own
    assert 0.25 <= one.arrivals[-1] - one.started <= one.ended - one.started <= elapsed


@pytest.mark.parametrize("api", APIS)
async def test_what_is_asked_for(start: Start, api: str) -> None:
    fake = start()
    server = target(fake, api)
    await server.probe()
    await server.ask(PreparedRequest("some words", 7))
    body = fake.bodies[-1]
    if api == "tgi":
        parameters = {"max_new_tokens": 7, "do_sample": False, "details": True, "ignore_eos_token": True}
        assert body == {"inputs": "some words", "parameters": parameters}
    else:
        prompt = body.pop("messages", None) or body.pop("prompt")
        assert prompt in ("some words", [{"role": "user", "content": "some words"}])
        assert body == {
            "model": "fake-model",
            "max_tokens": 7,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }


@pytest.mark.parametrize(
    ("refuses", "ignores_eos", "reports_usage"),
    [
        ((), True, True),
        (("ignore_eos",), False, True),
        (("stream_options",), True, False),
        (("ignore_eos", "stream_options"), False, False),
    ],
)
async def test_a_server_that_knows_less_is_asked_for_less(
    start: Start, refuses: tuple[str, ...], ignores_eos: bool, reports_usage: bool
) -> None:
    server = target(start(refuses=refuses, tokens_per_event=2))
    await server.probe()
    assert (server.ignores_eos, server.reports_usage) == (ignores_eos, reports_usage)
    one = await server.ask(PreparedRequest("some words", 6))
    assert (one.num_tokens, one.is_counted) == ((6, True) if reports_usage else (3, False))
    assert len(one.arrivals) == 3


@pytest.mark.parametrize(
    ("fate", "kind", "message"),
    [
        ("429", "HTTP 429", "not now"),
        ("500", "HTTP 500", "not now"),
        ("error", "error event", "it broke"),
        ("cut", "cut", "the connection was closed after "),
        ("unfinished", "unfinished", "without a finish reason"),
        ("garbage", "malformed", "an event is no JSON object: b'{half'"),
        ("empty", "empty", "no token"),
        ("silence", "timeout", "not answered within 0.2 s"),
    ],
)
async def test_failures_have_kinds(start: Start, fate: str, kind: str, message: str) -> None:
    server = target(start(fates=(fate,)), timeout=0.2)
    await server.probe()
    failed = await server.ask(PreparedRequest("some words", 4))
    assert failed.failure is not None
    assert (failed.failure.kind, failed.num_tokens, failed.arrivals) == (kind, 0, ())
    assert message in failed.failure.message
    assert (await server.ask(PreparedRequest("some words", 4))).failure is None


async def test_an_event_of_another_api_is_a_failure(start: Start) -> None:
    server = Target("it", "tgi", Endpoint(start().url), model="", options=OPTIONS, timeout=5.0)
    server._dialect = type(server._dialect)(
        "/v1/completions", server._dialect.body, server._dialect.read, OPTIONS, False
    )
    failed = await server.ask(PreparedRequest("some words", 2))
    assert failed.failure is not None
    assert failed.failure.kind == "malformed"


async def test_a_server_that_is_gone_is_a_failure_to_connect(start: Start) -> None:
    server = Target("it", "tgi", Endpoint("127.0.0.1:1"), model="", options=OPTIONS, timeout=5.0)
    failed = await server.ask(PreparedRequest("some words", 2))
    assert failed.failure is not None
    assert failed.failure.kind == "connect"
    with pytest.raises(NotReady, match="^no server answers at http://127.0.0.1:1: "):
        await server.probe()


@pytest.mark.parametrize("counts_by", ["prompt", "content", "inputs"])
@pytest.mark.parametrize("api", APIS)
async def test_prompts_have_the_length_asked_for_template_included(start: Start, api: str, counts_by: str) -> None:
    fake = start(counts_by=counts_by, template_tokens=9)
    server = target(fake, api)
    await server.probe()
    assert server.counts_prompts
    for prompt in await server.prepare(Workload("fixed", 33, 2).prompt_specs(3, 1)):
        assert (await server.ask(prompt)).num_prompt_tokens == 33


async def test_words_of_several_tokens_are_left_out_until_the_length_fits(start: Start) -> None:
    server = target(start(counts_by="content", tokens_per_word=3))
    await server.probe()
    (prompt,) = await server.prepare(Workload("fixed", 60, 2).prompt_specs(1, 1))
    assert (await server.ask(prompt)).num_prompt_tokens == 60


async def test_a_group_shares_the_text_of_its_prefix(start: Start) -> None:
    server = target(start(counts_by="content"))
    await server.probe()
    prompts = await server.prepare(Workload("shared-prefix", 30, 2, prefix_tokens=20, num_groups=2).prompt_specs(4, 1))
    texts = [prompt.text.split() for prompt in prompts]
    assert [len(words) for words in texts] == [30] * 4
    assert texts[0][:20] == texts[2][:20] != texts[1][:20]
    assert texts[0][20:] != texts[2][20:]


async def test_without_a_tokenizer_a_word_is_a_token(start: Start) -> None:
    server = target(start())
    await server.probe()
    (prompt,) = await server.prepare(Workload("fixed", 12, 2).prompt_specs(1, 1))
    assert not server.counts_prompts
    assert len(prompt.text.split()) == 12


# Load


async def test_streams_are_kept_busy_and_no_more_than_that(start: Start) -> None:
    fake = start(gap_seconds=0.01)
    server = target(fake)
    seen: list[Timeline] = []
    run = await run_level(
        server, Level(concurrency=3), [PreparedRequest(word, 3) for word in WORDS[:8]], (), seen.append
    )
    assert fake.most_in_flight == 3
    assert run.timelines == seen
    assert [fake.prompt_of(body) for body in fake.bodies] == list(WORDS[:8])


async def test_requests_with_a_rate_do_not_wait_for_each_other(start: Start) -> None:
    fake = start(first_seconds=0.2)
    prompts = [PreparedRequest("word", 1) for _ in range(5)]
    run = await run_level(target(fake), Level(rate=50), prompts, [0.0, 0.01, 0.02, 0.03, 0.1], lambda _: None)
    starts = sorted(timeline.started for timeline in run.timelines)
    assert fake.most_in_flight == 5
    assert starts[4] - starts[0] == pytest.approx(0.1, abs=1e-6)
    assert all(timeline.ttft >= 0.2 for timeline in run.timelines)


async def test_the_client_notices_what_it_takes_itself(start: Start) -> None:
    def burn(_: Timeline) -> None:
        end = time.process_time() + 0.15
        while time.process_time() < end:
            pass

    begin = time.perf_counter()
    run = await run_level(target(start()), Level(concurrency=1), [PreparedRequest("word", 1)] * 2, (), burn)
    assert run.client.cpu_share * (time.perf_counter() - begin) >= 0.3
    assert (run.client.lag_ms_p99 or 0) > 50
    assert ClientLoad().lag_ms_p99 is None


def test_a_client_that_may_limit_the_figures_is_warned_of(start: Start) -> None:
    def warned(share: float, lag: float) -> list[str]:
        result = LevelResult(Level(concurrency=1))
        result.rounds = [{"client_cpu_share": 0.1, "client_lag_ms_p99": None}]
        result.rounds.append({"client_cpu_share": share, "client_lag_ms_p99": lag})
        return list(warnings([ServerResult(target(start()), [result])]))

    assert warned(0.4, 5.0) == []
    assert warned(0.63, 5.0) == ["it, 1 stream: the client used 63% of a core: it may limit these figures"]
    assert warned(0.4, 30.0) == [
        "it, 1 stream: the client itself was up to 30 ms late (p99): the machine has no free core for it, and times "
        "are too long by that much"
    ]


# The whole command


def test_tables_and_the_last_line(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    fake = start(counts_by="inputs", fates=("", "429", "", "cut"), gap_seconds=0.005)
    tables, last = measured(capsys, fake, num_requests=6, slo_ttft_ms=1000.0, seed=3)
    assert (
        "openai-chat, fake-model; end token ignored; tokens as the server counts them; prompts cut to tokens" in tables
    )
    assert "2 streams: 1 failed, HTTP 429: not now" in tables
    assert "goodput/s" in tables
    (server,) = last["servers"]
    (level,) = server["levels"]
    assert level["failures"] == {"HTTP 429": 1, "cut": 1}
    assert (level["concurrency"], level["median"]["output_tokens"], level["median"]["prompt_tokens_mean"]) == (
        2,
        20,
        20,
    )
    assert level["median"]["goodput_share"] == pytest.approx(4 / 6, abs=1e-3)
    assert level["median"]["tpot_ms_p50"] >= 5
    assert last["workload"]["seed"] == 3
    assert last["times_better"] == []


def test_two_servers_in_turns(start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fast, slow = start(gap_seconds=0.005), start(gap_seconds=0.06, refuses=("ignore_eos",))
    picture = tmp_path / "picture.png"
    tables, last = measured(
        capsys, fast, slow, name=("fast", "slow"), rounds=3, num_requests=2, seed=1, plot=str(picture)
    )
    assert "how many times better fast is than slow, of medians:" in tables
    assert "end token not ignored, so answers may be shorter" in tables
    (comparison,) = last["times_better"]
    assert (comparison["server"], comparison["than"]) == ("fast", "slow")
    assert comparison["ratios"]["tpot_ms_p50"] > 1.5
    assert [len(server["levels"][0]["rounds"]) for server in last["servers"]] == [3, 3]
    asked = [[fake.prompt_of(body) for body in fake.bodies] for fake in (fast, slow)]
    assert asked[0][1:] == asked[1][1:]  # the same of both, after a first one to get to know them
    assert len(set(asked[0])) == 7  # and never the same twice
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_servers_of_several_apis(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    fakes = [start() for _ in APIS]
    _, last = measured(capsys, *fakes, api=APIS, num_requests=1, model_id=("mine",))
    assert [server["api"] for server in last["servers"]] == list(APIS)
    assert all(server["levels"][0]["failures"] == {} for server in last["servers"])
    assert [body["model"] for fake in fakes[:2] for body in fake.bodies] == ["mine"] * 4
    assert len(last["times_better"]) == 3


def test_one_server_given_twice_is_not_asked_the_same(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    fake = start()
    measured(capsys, fake, fake, name=("chat", "tgi"), api=("openai-chat", "tgi"), num_requests=2)
    prompts = [fake.prompt_of(body) for body in fake.bodies if len(fake.prompt_of(body).split()) == 20]
    assert len(set(prompts)) == len(prompts) == 4


def test_rates_and_drawn_lengths(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    fake = start()
    tables, last = measured(
        capsys, fake, concurrency=None, request_rate=Rates("200,400"), num_requests=20, workload="sharegpt", seed=2
    )
    assert [level["request_rate"] for level in last["servers"][0]["levels"]] == [200, 400]
    assert "400/s" in tables
    assert len({body["max_tokens"] for body in fake.bodies}) > 5


def test_no_request_that_succeeds_is_an_error(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FunitelError, match="^no request succeeded: not now$"):
        measured(capsys, start(fates=("503",) * 8), num_requests=2)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["servers"][0]["levels"][0]["failures"] == {
        "HTTP 503": 2
    }


def test_a_server_that_refuses_everything_is_one_line(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FunitelError, match="does not answer a first request: HTTP 422: unknown field: messages$"):
        measured(capsys, start(refuses=("messages",)))


def test_the_program_itself(start: Start) -> None:
    fake = start()
    words = ["bench", "--url", fake.url, "--concurrency", "1,2", "--num-requests", "2", "--output-tokens", "3"]
    done = run_program(*words, "--warmup", "1")
    assert (done.returncode, done.stderr.splitlines()[0].split(maxsplit=1)[0]) == (0, "0%")
    assert len(json.loads(done.stdout.splitlines()[-1])["servers"][0]["levels"]) == 2
    nowhere = run_program("bench", "--url", "127.0.0.1:1").stderr
    assert nowhere.startswith("error: no server answers at http://127.0.0.1:1")
    assert "start one by funitel serve MODEL" in nowhere
    assert nowhere.count("\n") == 1


def test_kernels_are_the_model_servers_command() -> None:
    done = run_program("bench", "kernels", "--rows", "0")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "error: --rows must be within 1..4096, given 0\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--concurrency", "0,4"], "--concurrency must be within 1..4096, given 0"),
        (["--request-rate", "0"], "--request-rate must be within (0, 1e9), given 0.0"),
        (["--request-rate", "nan"], "--request-rate must be within (0, 1e9), given nan"),
        (["--concurrency", "1", "--request-rate", "1"], "give either --concurrency or --request-rate, not both"),
        (["--api", "soap"], "--api must be one of openai-chat, openai-completions, tgi, given 'soap'"),
        (["--url", "a", "--url", "a"], "two servers have the same name, give each a --name: a, a"),
        (
            ["--url", "a", "--api", "tgi", "--api", "tgi"],
            "--api must be given once or once for each of 1 --url, given 2",
        ),
        (["--url", "ftp://a"], "--url must be like http://host:port, given 'ftp://a'"),
        (["--prefix-tokens", "5"], "--prefix-tokens is for --workload shared-prefix, not fixed"),
        (["--workload", "shared-prefix", "--prefix-tokens", "108"], "--prefix-tokens must be within 1..107 "),
        (["--plot", "/nowhere/a.png"], "--plot /nowhere/a.png: there is no folder /nowhere"),
        (["--rounds", "0"], "--rounds must be within 1..1000, given 0"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(words: list[str], line: str) -> None:
    with pytest.raises(SettingsError) as raised:
        settings_of(words)
    assert raised.value.message.startswith(line)


def test_numbers_in_one_flag() -> None:
    assert Counts("1,4,16") == (1, 4, 16)
    assert str(Rates("0.5,2")) == "0.5,2.0"
    for text in ("", "1,", "a", "1.5"):
        with pytest.raises(ValueError, match="is not a list of whole numbers such as 1,4,16"):
            Counts(text)
    done = run_program("bench", "--concurrency", "1;4")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'1;4' is not a list of whole numbers such as 1,4,16" in done.stderr


def test_a_picture_without_matplotlib_is_one_line_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="^--plot a.png needs matplotlib, which is not installed: pip install"):
        bench(BenchSettings(url=("127.0.0.1:1",), plot="a.png"))


def test_what_a_server_says_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeApi(info={"data": [{"id": "m\x1b[2J[red]"}]})) as fake:
        bench(BenchSettings(url=(fake.url,), concurrency=Counts("1"), num_requests=1, warmup=0))
    shown = capsys.readouterr().out
    assert "m?[2J[red]" in shown
    assert "\x1b" not in shown


def test_the_bar_is_a_line_for_each_level_in_a_pipe_and_moves_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    bar = BenchProgress(4, pipe)
    bar.begin("1 stream")
    bar.report(Timeline(0.0, 1.0, num_tokens=5))
    bar.begin("2 streams")
    assert pipe.getvalue() == "  0% 1 stream\n 25% 2 streams\n"

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("funitel.launcher.bench.progress.MIN_SECONDS", 0.0)
    bar = BenchProgress(2, terminal)
    bar.begin("1 stream")
    bar.report(Timeline(0.0, 1.0, num_tokens=5))
    bar.clear()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert f"{'━' * 12}" in shown
    assert "1/2 1 stream, " in shown
    assert terminal.getvalue().endswith("\r\x1b[1A\x1b[2K"), "the bar is gone"


def settings_of(words: list[str]) -> None:
    """Check words as the program does."""
    given: dict[str, Any] = {}
    kinds = {"concurrency": Counts, "request_rate": Rates, "prefix_tokens": int, "rounds": int}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        name = flag.removeprefix("--").replace("-", "_")
        if name in ("url", "api", "name"):
            given[name] = (*given.get(name, ()), value)
        else:
            given[name] = kinds.get(name, str)(value)
    BenchSettings(**given)


def run_program(*words: str) -> "subprocess.CompletedProcess[str]":
    variables = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    return subprocess.run([sys.executable, "-m", "funitel", *words], capture_output=True, text=True, env=variables)
