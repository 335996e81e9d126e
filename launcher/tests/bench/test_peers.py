"""`benchmarks/peers.py`: what it asks of both servers, how it tunes a peer, what a grid keeps, what the table says."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.bench.figures import Failure, Timeline
from funitel.proto.errors import FunitelError

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # last: scripts there have names that packages have too

builds = import_module("peer_grid.builds")
folders = import_module("peer_grid.folders")
measure = import_module("peer_grid.measure")
neutral = import_module("peer_grid.neutral")
plan = import_module("peer_grid.plan")
processes = import_module("peer_grid.processes")
program = import_module("peers")
recipes = import_module("peer_grid.recipes")
results = import_module("peer_grid.results")
runner = import_module("peer_grid.runner")
table = import_module("peer_grid.table")
tuning = import_module("peer_grid.tuning")

KEY = "1b/q4_0/llama.cpp/16"
WORKLOAD = plan.Workload("2", 2, 12, 3, "many")
CELL = plan.Cell("1b", "q4_0", "llama.cpp", WORKLOAD)


class Bed:
    """A runner over fake servers; `asked` is what each side was asked, in order."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.lines, self.started = folder, list[str](), list[dict[str, str]]()
        self.peer_flags: Callable[[Mapping[str, str]], list[str]] = lambda options: []
        model = folder / "model.gguf"
        model.write_bytes(b"GGUF")
        fake = recipes.Recipe(
            "llama.cpp",
            "llama.cpp",
            self._peer,
            lambda cores: {"threads": (str(cores), "1"), "speed": ("slow", "fast", "refused")},
            {"one": ("threads",), "many": ("threads", "speed"), "prefill": ()},
        )
        monkeypatch.setattr(runner, "PEERS", {"llama.cpp": fake})
        monkeypatch.setattr(runner, "OURS", replace(recipes.OURS, command=self._ours))
        monkeypatch.setattr(runner, "build", lambda *given, **more: builds.Built("llama.cpp", "9", folder))
        monkeypatch.setattr(runner.Models, "get", lambda models, name, file: model)
        monkeypatch.setattr(runner, "commit", lambda: self.commit)
        tuned = plan.Workload("tune-many", 2, 8, 3, "many")
        monkeypatch.setattr(runner, "TUNED_BY", {"many": tuned})
        monkeypatch.setattr(runner, "TUNING_REQUESTS", {"many": 2})
        monkeypatch.setattr(runner, "_speed", self._speed)
        self.commit = "abc1234"
        self.results = results.Results(folder / "results.json")

    def run(self, rounds: int) -> Any:
        """Run the cell; its record."""
        self.lines.clear()
        self.started.clear()
        grid = runner.Runner(folders.Folders(self.folder), self.results, rounds, 1, 2, self.lines.append)
        grid.run([CELL])
        return results.Results(self.folder / "results.json").cells[CELL.key]

    def asked(self, side: str, num_tokens: int) -> list[str]:
        """Prompts of the requests for `num_tokens`."""
        lines = map(json.loads, (self.folder / f"{side}.log").read_text().splitlines())
        return [line["prompt"] for line in lines if line["max_tokens"] == num_tokens]

    def _speed(self, figures: Any, kind: str) -> float:
        return {"slow": 1.0, "fast": 2.0}[self.started[-1]["speed"]]

    def _ours(self, built: Any, launch: Any) -> Any:
        return self._command(launch, "ours", [])

    def _peer(self, built: Any, launch: Any) -> Any:
        self.started.append(dict(launch.options))
        refused = ["--refuse"] if launch.options["speed"] == "refused" else self.peer_flags(launch.options)
        return self._command(launch, "peer", refused)

    def _command(self, launch: Any, side: str, flags: list[str]) -> Any:
        command = (
            sys.executable,
            "-m",
            "funitel_testing.fake_peer",
            str(launch.port),
            str(self.folder / f"{side}.log"),
        )
        return recipes.Command((*command, *flags), {"PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(tmp_path, monkeypatch)


def test_both_servers_are_asked_the_same_in_turns_and_a_grid_goes_on(bed: Bed) -> None:
    record = bed.run(rounds=2)
    assert record.problem == ""
    assert record.options == {"threads": "2", "speed": "fast"}, "not the best that was tried"
    assert [trial["problem"] != "" for trial in bed.results.tuned["1b/q4_0/llama.cpp/many"]["trials"]].count(True) == 1
    prompts = bed.asked("ours", 3)
    assert prompts == bed.asked("peer", 3)[-len(prompts) :]
    assert len(set(prompts)) == len(prompts) == 2 * CELL.num_requests, "a prefix cache would know a prompt"
    assert all(len(prompt.split()) == WORKLOAD.prompt_tokens for prompt in prompts)
    for rounds in record.rounds.values():
        assert [figures["output_tokens"] for figures in rounds] == [3 * CELL.num_requests] * 2
        assert all(figures["resident_mib"] >= figures["proportional_mib"] > 1 for figures in rounds)
        assert all(0 <= figures["client_cpu_share"] and figures["other_cpu_share"] >= 0 for figures in rounds)
    bed.run(rounds=2)
    assert not bed.started, "it was complete"
    bed.commit = "other00"
    record = bed.run(rounds=2)
    assert (record.commit, bed.started) == ("abc1234", []), "a complete cell stays"
    bed.commit = "abc1234"
    before = record.rounds
    record = bed.run(rounds=3)
    assert {side: rounds[:2] for side, rounds in record.rounds.items()} == before
    assert record.num_rounds() == 3
    assert all(started["speed"] == "fast" for started in bed.started), "it was tuned again"
    bed.commit = "other00"
    assert bed.run(rounds=4).rounds["ours"][:3] != record.rounds["ours"], "rounds of two commits in one cell"


def test_a_peer_that_counts_other_tokens_is_no_result(bed: Bed) -> None:
    bed.peer_flags = lambda options: ["--tokens-per-word", "2"] if options["speed"] == "fast" else []
    record = bed.run(rounds=1)
    assert record.problem == "llama.cpp: a prompt of 24 tokens instead of 12"
    assert not record.num_rounds()
    assert bed.lines[-1] == f"1b/q4_0/llama.cpp: {record.problem}"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"failure": Failure("cut", "it hung up")}, "x: cut: it hung up"),
        ({"num_tokens": 63}, "x: 63 tokens instead of 64"),
        ({"is_counted": False}, "x: an unknown number of tokens instead of 64"),
        ({"num_prompt_tokens": 111}, "x: a prompt of 111 tokens instead of 108"),
        ({"num_prompt_tokens": None}, "x: a prompt of None tokens instead of 108"),
    ],
)
def test_a_request_that_is_not_what_was_asked_ends_the_round(changed: dict[str, Any], problem: str) -> None:
    good = Timeline(0.0, 2.0, (1.0, 2.0), num_tokens=64, is_counted=True, num_prompt_tokens=107)
    measure.check("x", [good], plan.WORKLOADS["1"])
    with pytest.raises(FunitelError) as raised:
        measure.check("x", [good, replace(good, **changed)], plan.WORKLOADS["1"])
    assert raised.value.message == problem


def test_tuning_keeps_what_gains_more_than_noise() -> None:
    speeds = {("2", "50"): 10.0, ("1", "50"): 12.0, ("1", "0"): 12.1, ("1", "100"): 15.0}

    def speed_of(options: Mapping[str, str]) -> float:
        return speeds[options["threads"], options["poll"]]

    tuned = tuning.tune({"threads": "2", "poll": "50"}, {"threads": ("2", "1"), "poll": ("50", "0", "100")}, speed_of)
    assert tuned.options == {"threads": "1", "poll": "100"}
    assert len(tuned.trials) == len(speeds), "a setting was measured twice"
    speeds["1", "100"] = 12.2
    tuned = tuning.tune({"threads": "2", "poll": "50"}, {"threads": ("2", "1"), "poll": ("50", "0", "100")}, speed_of)
    assert tuned.options == {"threads": "1", "poll": "50"}


def test_tuning_where_nothing_works_says_why() -> None:
    def speed_of(options: Mapping[str, str]) -> float:
        raise FunitelError("no such type")

    with pytest.raises(FunitelError, match="no setting works: no such type"):
        tuning.tune({"a": "1"}, {"a": ("1", "2")}, speed_of)


def record_of(ours: list[dict[str, Any]], peer: list[dict[str, Any]], **more: Any) -> Any:
    """A record of rounds."""
    rounds = {"ours": ours, "peer": peer} | ({"llama-bench": more.pop("bench")} if "bench" in more else {})
    return results.Record(commit="abc1234", date="2026-11-23", versions={"llama.cpp": "9"}, rounds=rounds, **more)


def figures(rate: float, tpot: float, ttft: list[float], memory: float = 100.0) -> dict[str, Any]:
    """One round."""
    return {
        "output_tokens_s": rate,
        "tpot_ms_p50": tpot,
        "ttft_ms_p50": sorted(ttft)[len(ttft) // 2],
        "ttft_ms": ttft,
        "proportional_mib": memory,
        "client_cpu_share": 0.031,
    }


def cells_of(line: str) -> list[str]:
    """The columns of a row of a table."""
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_table_shows_medians_every_loss_and_every_missed_aim(tmp_path: Path) -> None:
    found = results.Results(tmp_path / "results.json")
    ours = [figures(rate, 10.0, [1.0, 2.0, 100.0]) for rate in (90.0, 100.0, 110.0)]
    peer = [figures(200.0, 16.0, [4.0, 4.0, 4.0], memory=80.0)] * 3
    found.cells["1b/q4_0/llama.cpp/1"] = record_of(
        ours, peer, bench=[{"tpot_ms_p50": 11.0, "output_tokens_s": 91.0}] * 3
    )
    found.cells[KEY] = record_of([figures(150.0, 30.0, [5.0])], [figures(100.0, 30.0, [5.0], memory=80.0)])
    found.cells["3b/q8_0/llama.cpp/1"] = results.Record(problem="it ended with 1: out of memory")
    found.save()
    text = table.table(results.Results(tmp_path / "results.json"), plan.choose([], is_short=False))
    rows = {cells_of(line)[1]: cells_of(line) for line in text.splitlines() if line.startswith("| ")}
    at = {column.title: 2 + index for index, column in enumerate(table.COLUMNS)}
    assert rows["funitel"][0] == "1b, q4_0"
    assert rows["funitel"][at["tokens/s: 1"]] == "100.0 ±10 %"
    assert rows["funitel"][at["p99"] - 2] == "100 ±0 %", "the 99th percentile of all requests"
    assert rows["llama.cpp"][at["4"]] == "–"
    beside = rows["funitel beside llama.cpp"]
    assert beside[at["tokens/s: 1"]] == "**0.50×**"
    assert beside[at["16"]] == "1.50× (aim 2.00, missed)"
    assert beside[at["TPOT, ms"]] == "1.60× (aim 1.43)"
    assert beside[at["memory, MiB"]] == "**0.80×**"
    assert rows["funitel beside llama-bench"][at["TPOT, ms"]] == "1.10× (aim 1.18, missed)"
    assert "3b, q8_0 | llama.cpp: **not measured**: it ended with 1: out of memory" in text
    assert "3 %" in text.partition("largest share of a core")[2]


def test_each_machine_has_a_table_of_its_own_on_the_page() -> None:
    begin, end = table.BEGIN.format("A"), table.END.format("A")
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    new = f"{begin}\nnew\n{end}"
    page = table.write_into(page, new, {"label": "A, quiet"})
    assert page == f"before\n{new}\nafter\n"
    other = f"{table.BEGIN.format('B')}\nother\n{table.END.format('B')}"
    page = table.write_into(page, other, {"label": "B, busy"})
    assert page == f"before\n{new}\n\n{other}\nafter\n"
    newer = other.replace("other", "newer")
    assert table.write_into(page, newer, {"label": "B"}) == f"before\n{new}\n\n{newer}\nafter\n"
    with pytest.raises(FunitelError, match="has no line"):
        table.write_into("a page", new, {"label": "A"})


def test_a_file_that_is_none_of_results_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"cells": 3}')
    with pytest.raises(FunitelError, match=r"results\.json is no file of results"):
        results.Results(path)


def test_the_grid_has_each_cell_once_and_what_the_issue_of_fairness_names() -> None:
    cells = plan.choose([], is_short=False)
    keys = [cell.key for cell in cells]
    assert len(set(keys)) == len(keys)
    for model in ("0.5b", "1b", "3b"):
        for form, peer in (("q4_k_m", "llama.cpp"), ("q8_0", "llama.cpp"), ("bf16", "vllm")):
            assert {f"{model}/{form}/{peer}/{name}" for name in plan.WORKLOADS} <= set(keys)
    (largest,) = (cell for cell in cells if cell.model == "8b")
    assert (largest.key, plan.rounds_of(largest, 5)) == ("8b/q4_k_m/llama.cpp/1", 3)
    assert {cell.workload.name for cell in cells if cell.model == "moe"} == {"1", "4", "16"}
    assert all(cell.num_requests >= cell.workload.streams for cell in cells)
    assert {cell.workload.name for cell in plan.choose([], is_short=True)} == {"1", "16"}
    rates = {"read_rate": 1e10, "multiply_rate": 6e10}
    one = [cell for cell in cells if cell.key == KEY]
    assert 0 < plan.estimate_seconds(one, 1, **rates) < plan.estimate_seconds(one, 5, **rates)


@pytest.mark.parametrize("name", list(recipes.PEERS))
def test_every_command_has_a_slot_for_each_stream_and_room_for_its_tokens(name: str, tmp_path: Path) -> None:
    recipe = recipes.PEERS[name]
    built = builds.Built(name, "1", tmp_path)
    for workload in plan.WORKLOADS.values():
        launch = recipes.Launch(tmp_path / "m.gguf", plan.FORMATS["bf16"], workload, recipe.defaults(2), 8000)
        command = recipe.command(built, launch)
        assert str(workload.streams) in command.arguments
        context = {"llama.cpp": workload.streams, "ik_llama.cpp": workload.streams, "vllm": 1}.get(name)
        if context is not None:
            assert str(context * launch.context) in command.arguments
            assert launch.context > workload.prompt_tokens + workload.output_tokens
        ours = recipes.OURS.command(built, launch).arguments
        assert f"--max-batch-total-tokens {workload.streams * launch.context}" in " ".join(ours)
        for option, values in recipe.values(workload.kind, 2).items():
            changed = [
                recipe.command(built, replace(launch, options=launch.options | {option: value})) for value in values
            ]
            assert len({(c.arguments, *sorted(c.variables.items())) for c in changed}) > 1, f"{option} changes nothing"


def _stop_in_the_midst_of(path: Path) -> None:
    path.write_bytes(b"half")
    raise KeyError


def test_models_that_were_not_used_for_longest_make_room(tmp_path: Path) -> None:
    place = folders.Folders(tmp_path, most_model_bytes=100)
    place.models.mkdir()
    for age, name in enumerate(("new.gguf", "old.gguf", "oldest")):
        path = place.models / name
        if name == "oldest":
            path.mkdir()
            (path / "model.safetensors").write_bytes(bytes(40))
        else:
            path.write_bytes(bytes(40))
        os.utime(path, (1000 - age, 1000 - age))
    place.make_room(50, place.models / "next.gguf")
    assert [path.name for path in place.models.iterdir()] == ["new.gguf"]
    with pytest.raises(OSError, match="needs"):
        place.make_room(1 << 60, place.models / "next.gguf")
    with pytest.raises(KeyError), place.writing(place.models / "next.gguf") as partial:
        _stop_in_the_midst_of(partial)
    assert not list(place.models.glob("next*"))


def test_a_build_that_fails_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "BUILDS", {"x": builds.Environment(("no-such package",))})
    monkeypatch.setattr(sys, "executable", "/bin/false")
    place = folders.Folders(tmp_path)
    with pytest.raises(builds.NotBuilt, match=r"/bin/false failed .*: see .*build\.log"):
        builds.build("x", place, jobs=1, report=lambda line: None)
    assert builds.find("x", place) is None
    with pytest.raises(builds.NotBuilt, match="ended by signal 4"):
        builds.check_starts(["/bin/sh", "-c", "kill -ILL $$"])


def test_a_server_that_ends_says_its_last_line(tmp_path: Path) -> None:
    command = recipes.Command(("/bin/sh", "-c", "echo no such model; exit 3"))
    with pytest.raises(processes.DoesNotStart, match="it ended with 3: no such model: see"):
        with processes.running(command, processes.free_port(), tmp_path / "log", is_ours=False):
            pass
    missing = recipes.Command(("/no/such/program",))
    with pytest.raises(processes.DoesNotStart, match="/no/such/program: No such file"):
        with processes.running(missing, processes.free_port(), tmp_path / "log", is_ours=False):
            pass


def test_what_guidellm_reports() -> None:
    values = {"successful": {"mean": 50.0, "median": 20.0}}
    metrics = {name: values for name in neutral.METRICS.values()}
    metrics |= {"request_totals": {"errored": 0}, "output_token_count": {"successful": {"mean": 64.0}}}
    report = {"benchmarks": [{"metrics": metrics}]}
    assert neutral.figures_of(report, 64) == {"output_tokens_s": 50.0, "tpot_ms_p50": 20.0, "ttft_ms_p50": 20.0}
    with pytest.raises(FunitelError, match=r"64\.0 tokens instead of 32"):
        neutral.figures_of(report, 32)
    metrics["request_totals"] = {"errored": 2}
    with pytest.raises(FunitelError, match="2 requests failed"):
        neutral.figures_of(report, 64)


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program.main(["--list", "--only", "demo/q8_0/llama.cpp", "--cache", str(tmp_path)])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        f"demo/q8_0/llama.cpp/{name}" for name in plan.WORKLOADS
    ]
    program.main(["--list", "--only", "demo/q8_0/*/1", "--cache", str(tmp_path)])
    assert {line.split()[0].rpartition("/")[2] for line in capsys.readouterr().out.splitlines()} == {"1"}
    program.main(["--dry-run", "--short", "--cache", str(tmp_path)])
    assert "llama.cpp: would be built" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        program.main(["--only", "7b", "--cache", str(tmp_path)])
    assert "no cell is named 7b" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program.main(["--rounds", "0", "--cache", str(tmp_path)])
    assert "must be >= 1, given 0" in capsys.readouterr().err
