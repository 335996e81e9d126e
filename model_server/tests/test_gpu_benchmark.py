"""`benchmarks/gpu.py`: the arithmetic of its roofs, how its sections are run, and each of them on a tiny shape."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from funitel.launcher.bench.figures import Failure, Timeline
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.quantized.published import find_quantization

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # last: scripts there have names that packages have too

course = import_module("gpu_sections.course")
figures = import_module("gpu_sections.figures")
checkpoint = import_module("gpu_sections.checkpoint")
equality = import_module("gpu_sections.equality")
plans = import_module("gpu_sections.plan")
pool = import_module("gpu_sections.pool")
profile = import_module("gpu_sections.profile")
roofs = import_module("gpu_sections.roofs")
serve = import_module("gpu_sections.serve")

SPEC = plans.FULL.spec
Line = figures.Line


def test_what_a_step_of_llama_reads() -> None:
    """8.03 billion parameters, of which a step does not read the embeddings; 128 KiB of keys and values a token."""
    embeddings, norms = 128_256 * 4096, 65 * 4096
    assert roofs.weight_bytes(SPEC, 2) == 2 * (8_030_261_248 - embeddings - norms)
    assert roofs.kv_bytes(SPEC, 1, 2) == 128 * 1024


def test_what_a_step_of_a_mixture_reads() -> None:
    """Qwen3-30B-A3B has 30.53 billion parameters; routers are read as float32."""
    spec = replace(plans.FULL, config=plans.QWEN3_30B_A3B | {"num_hidden_layers": 48}).spec
    embeddings, norms, routers = 151_936 * 2048, 48 * (2 * 2048 + 2 * 128) + 2048, 48 * 128 * 2048
    assert roofs.mixture_bytes(spec, 128, 2) == 2 * (30_532_122_624 - embeddings - norms) + 2 * routers
    assert roofs.mixture_bytes(spec, 128, 2) - roofs.mixture_bytes(spec, 127, 2) == 48 * 2 * 3 * 768 * 2048
    assert roofs.kv_bytes(SPEC, 1000, 1) == 500 * 128 * 1024


def test_what_a_prompt_of_llama_computes() -> None:
    """Two operations a weight of the layers, and as many for each element of scores and values of those before it."""
    weights = 8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096
    assert roofs.prompt_operations(SPEC, 1) - 2 * weights == 32 * 4 * 4096 / 2
    assert roofs.prompt_operations(SPEC, 8192) == 8192 * (2 * weights + 32 * 4 * 4096 * 4096)


def test_the_share_of_a_roof() -> None:
    assert roofs.share_of_roof(1e9, seconds=0.5, bytes_a_second=4e9) == 0.5


@pytest.mark.parametrize(
    ("ratio", "aim", "is_most", "is_met"),
    [(0.7, 0.65, False, True), (0.6, 0.65, False, False), (1.3, 1.33, True, True), (1.4, 1.33, True, False)],
)
def test_an_aim_is_met_from_its_side(ratio: float, aim: float, is_most: bool, is_met: bool) -> None:
    assert Line("k", "name", 1.0, "ms", ratio, aim, is_most=is_most).is_met is is_met


def test_what_was_not_measured_misses_its_aim_and_none_other() -> None:
    assert not Line("k", "name", None, "skipped", aim=0.9).is_met
    assert Line("k", "name", None, "skipped").is_met


def test_a_summary_is_short_and_names_what_was_missed() -> None:
    lines = [Line("a", "A", 1.23456789, "ms"), Line("b", "B", 2.0, "x", 0.5, 0.9), Line("c", "C", None, "none")]
    summary = figures.summary(figures.report(lines, {"serve": "broke"}, {"serve": 1.0}, is_rehearsal=True))
    assert summary["lines"] == {"a": [1.2346], "b": [2.0, 0.5], "c": []}
    assert summary["missed"] == ["b"]
    assert summary["errors"] == {"serve": "broke"}


def test_a_profile_tells_waits_and_the_longest_kernels() -> None:
    """Of 100 microseconds one kernel takes 30, another 20 of which 10 beside the first: 60 are waited."""
    spans = {"gemm": [(0.0, 15.0), (85.0, 100.0)], "norm": [(5.0, 25.0)]}
    waits, first, second = profile.lines_of(1, spans)
    assert waits.measured == pytest.approx(60.0)
    assert "gemm" in first.name
    assert first.measured == pytest.approx(30.0 / profile.NUM_STEPS / 1e3)
    assert "75.0 %" in first.unit
    assert "norm" in second.name


def test_a_profile_of_nothing_says_so() -> None:
    (line,) = profile.lines_of(1, {})
    assert line.measured is None


def timeline(*arrivals: float, started: float = 0.0) -> Timeline:
    """A request whose tokens came at these seconds."""
    return Timeline(started, arrivals[-1], arrivals, len(arrivals))


def test_the_pace_of_streams_is_that_while_all_run() -> None:
    """From the last first token (2) to the first last one (4), with 10 tokens of prompt before each."""
    slow, fast = timeline(2.0, 3.0, 4.0, 5.0), timeline(0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
    pace = serve.Pace.of([slow, fast], prompt_tokens=10)
    assert pace.tokens_a_second == (2 + 4) / 2  # after 2 up to 4: those of the slow one at 3 and 4, and four others
    assert pace.context == 10 + ((1 + 4) + (3 + 8)) / 2 / 2
    assert (pace.begin, pace.end, pace.num_tokens) == (2.0, 4.0, 6)
    assert serve.whole_pace([slow, fast]) == 12 / 5


def test_streams_that_never_ran_together_have_no_pace() -> None:
    with pytest.raises(ValueError, match="too short"):
        serve.Pace.of([timeline(0.0, 1.0), timeline(2.0, 3.0)], prompt_tokens=1)


def test_a_failed_stream_is_no_pace() -> None:
    failed = replace(timeline(0.0, 1.0), failure=Failure("cut", "the connection was closed"))
    with pytest.raises(ValueError, match="1 of 2 requests failed: the connection was closed"):
        serve.Pace.of([timeline(0.0, 1.0), failed], prompt_tokens=1)


def test_cpu_time_is_that_between_two_instants() -> None:
    watch = serve.CpuWatch({"router": 1, "shard": 2})
    for instant, router in ((10.0, 1.0), (11.0, 1.5), (12.0, 3.0)):
        watch.note(instant, {"router": router, "shard": 0.0})
    assert watch.used("router", 10.5, 12.0) == pytest.approx(0.25 + 1.5)
    assert watch.used("shard", 10.0, 12.0) == 0.0


@pytest.mark.parametrize("seconds", [0.05, 0.3], ids=["shorter than between readings", "longer"])
def test_cpu_time_is_read_from_the_beginning_to_the_end(seconds: float) -> None:
    watch = serve.CpuWatch({"this": os.getpid()})
    with watch.running():
        begin, cpu = time.perf_counter(), time.process_time()
        while time.process_time() < cpu + seconds:
            pass
        end = time.perf_counter()
    assert 0.5 * seconds < watch.used("this", begin, end) < 1.5 * seconds


@pytest.mark.parametrize(("num_blocks", "context"), [(25, 100), (9, 100), (64, 80), (1000, 4096), (1003, 4096)])
def test_a_filled_pool_has_no_block_left(num_blocks: int, context: int) -> None:
    """Every block has one owner, and each row ends in the last slot of its last block."""
    rows = pool.rows_that_fill(num_blocks, context)
    assert sorted(block for row in rows for block in row.blocks) == list(range(1, num_blocks + 1))
    for row in rows:
        assert len(row.input_ids) + row.stopping.max_new_tokens == len(row.blocks) * plans.BLOCK_SIZE
    assert {len(row.input_ids) - row.cache_len for row in rows[1:]} <= {1}
    assert 1 < len(rows[0].input_ids) - rows[0].cache_len <= pool.PREFILL_TOKENS


def test_the_first_difference_of_answers() -> None:
    found = list(equality.differences([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 7, 8]]))
    assert found == [(1, (1, 5))]


def test_a_prompt_of_words_has_as_many_tokens() -> None:
    tokenizer = checkpoint.tokenizer_of(2000)
    assert tokenizer.get_vocab_size() == 2000
    assert tokenizer.token_to_id(checkpoint.EOS) == 1999
    text = checkpoint.prompt_of(7, 50, 2000)
    ids = tokenizer.encode(text).ids
    assert len(ids) == 50
    assert tokenizer.decode(ids) == text
    assert text != checkpoint.prompt_of(8, 50, 2000)


# Running sections


def run_course(folder: Path, program: str, names: Sequence[str], seconds: float | None = None) -> Any:
    """A course whose sections all run a program of a line or two, which finds the section's name in `name`."""
    start = "import json, sys, time; name = sys.argv[sys.argv.index('--section') + 1]\n"
    start += "say = lambda **f: print(json.dumps({'name': '', 'unit': '', **f}), flush=True)\n"
    run = course.Course([sys.executable, "-c", start + program], folder, seconds, 1.0)
    assert [*run.run(names)] == run.lines
    return run


def test_a_section_that_fails_costs_no_other(tmp_path: Path) -> None:
    program = "say(key=name, measured=1.0)\nif name == 'kernels': sys.exit('error: no card')"
    run = run_course(tmp_path, program, ["kernels", "decode"])
    assert [line.key for line in run.lines] == ["kernels", "decode"]
    assert run.errors == {"kernels": "ended with 1: error: no card"}
    assert set(run.taken) == {"kernels", "decode"}


def test_a_section_knows_what_was_measured_before(tmp_path: Path) -> None:
    program = (
        "facts = json.loads(sys.argv[sys.argv.index('--facts') + 1])\n"
        "say(key=name, measured=facts.get('kernels', 0) + 1)"
    )
    run = run_course(tmp_path, program, ["kernels", "decode"])
    assert [line.measured for line in run.lines] == [1, 2]


def test_a_section_that_takes_too_long_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "GRACE_SECONDS", 0.3)
    program = (
        "import subprocess, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "say(key=name, measured=child.pid); time.sleep(60)"
    )
    stages = ((course.Section("decode", 1.5),), (course.Section("serve", 0.0),))
    monkeypatch.setattr(course, "STAGES", stages)
    run = run_course(tmp_path, program, ["decode", "serve"])
    assert run.errors == {"decode": "not done after 2 s", "serve": "no time was left for it"}
    (line,) = run.lines
    assert not course.alive({int(line.measured)})


def test_what_a_section_prints_is_not_taken_for_a_figure() -> None:
    """Its lines alone reach stdout; what libraries print there goes where errors go."""
    program = (
        "import sys, types; from gpu_sections import course, figures\n"
        "def measure(plan, facts):\n"
        "    print('noise'); yield figures.Line('k', 'n', facts['a'], 'u')\n"
        "sys.modules['gpu_sections.decode'] = types.SimpleNamespace(measure=measure)\n"
        "course.run_section('decode', None, {'a': 2.0})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=BENCHMARKS, timeout=60)
    assert json.loads(done.stdout) | {"measured": 2.0} == json.loads(done.stdout)
    assert "noise" in done.stderr
    assert done.returncode == 0


# Sections on a tiny shape


def measured(section: str, facts: dict[str, float] | None = None, **changes: Any) -> dict[str, Any]:
    """The lines of a section by key."""
    plan = replace(plans.REHEARSAL, **changes)
    return {line.key: line for line in import_module(f"gpu_sections.{section}").measure(plan, facts or {})}


def test_kernels() -> None:
    found = measured("kernels", num_workers=1)
    assert set(found) == {"attention_float32", "attention_float16", "attention_bfloat16"}
    assert all(line.is_met for line in found.values())


def test_decoding_and_a_prompt() -> None:
    found = measured("decode", batches=(1, 2), profiled=(1,), repeats=1, context=4, prompt=4)
    assert {"copy", "matmul", "decode_1", "decode_2", "prompt", "profile_1"} <= set(found)
    assert found["same_2"].is_met
    assert {"blocks_of_all_layers_2", "a_pool_a_layer_2"} <= set(found)
    assert found.pop("used").name == "attention in triton, what lies between products in triton"
    assert all(line.measured > 0 for line in found.values())


@pytest.mark.slow
def test_a_mixture_in_kernels_and_by_the_loop() -> None:
    found = measured("experts", mixture_rows=(2,), repeats=1, context=4, mixture_prompt=4)
    assert found["experts_used"].name == "experts in triton"
    assert {"experts_loop_2", "experts_launched_2", "experts_prompt", "experts_prompt_loop"} <= set(found)
    assert found["experts_error_2"].is_met
    assert found["experts_same_2"].is_met
    assert 2 <= found["experts_hit_2"].measured <= 4


def test_the_random_checkpoint_is_loaded_and_gives_the_same_in_every_precision_asked_for(tmp_path: Path) -> None:
    """The executor and plain torch read the same tensors."""
    found = measured("equality", folder=tmp_path, num_prompts=2, num_tokens=3)
    assert set(found) == {"equal_float32", "equal_float32_no_graphs", "equal_bfloat16"}
    assert found["equal_float32"].measured == 100.0


def test_a_pool_is_filled(tmp_path: Path) -> None:
    found = measured("pool", {"http": 1.0, "http_context": 30.0}, folder=tmp_path, pool_seconds=0.1)
    assert found["executor"].ratio == 1.0 / found["executor"].measured
    assert "30 tokens" in found["forward"].name
    assert found["pool"].ratio > 0


def test_weights_of_four_bits_are_written_and_what_needs_a_gpu_is_skipped(tmp_path: Path) -> None:
    found = measured("precision", folder=tmp_path, text_tokens=20)
    assert {"plain_pace", "plain_step_1", "plain_perplexity"} <= set(found)
    assert found["4_bit_weights_pace"].ratio == found["4_bit_weights_pace"].measured / found["plain_pace"].measured
    assert found["4_bit_weights_step_1"].measured > 0
    assert found["fp8_KV_step_1"].measured > 0  # a pool of float8 is there on a CPU too
    for key in ("int8_weights", "fp8_weights", "fp8_weights_and_KV"):
        assert found[key].unit.startswith("skipped: ")
    quantization = find_quantization(tmp_path / "four_bits")
    assert quantization is not None
    assert (quantization.bits, quantization.group_size) == (4, checkpoint.GROUP)


def test_layers_of_four_bits_keep_the_size_of_their_inputs(tmp_path: Path) -> None:
    folder = checkpoint.ensure_four_bits(replace(plans.REHEARSAL, folder=tmp_path))
    weights = Weights(folder, torch.float32, torch.device("cpu"), "model.", is_shown=False)
    assert weights.is_quantised("model.layers.0.self_attn.q_proj")
    layer = weights.read("model.layers.1.mlp.down_proj.weight", (64, 96))
    assert 0.9 < float(layer.square().sum(1).mean()) < 1.2


def test_a_way_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: Any) -> Path:
        raise OSError("no room")

    precision = import_module("gpu_sections.precision")
    ways = precision.Way("broken", {}, broken), replace(precision.WAYS[0], name="whole")
    monkeypatch.setattr(precision, "WAYS", ways)
    lines = precision.measure(replace(plans.REHEARSAL, folder=tmp_path, text_tokens=20), {})
    keys = [next(lines).key for _ in range(6)]
    with pytest.raises(RuntimeError, match="broken: OSError: no room"):
        next(lines)
    assert keys[3:] == ["broken", "whole_pace", "whole_step_1"]


def test_adapters_and_drafts(tmp_path: Path) -> None:
    found = measured("extras", folder=tmp_path, drafted_rows=(2,), repeats=1, context=8)
    assert set(found) == {
        "adapter_load",
        "adapters_none",
        "adapters_one",
        "adapters_many",
        "undrafted_2",
        "undrafted_launched_2",
        "drafted_2_2",
        "drafted_replayed_2_2",
    }
    assert all(line.measured > 0 for line in found.values())
    assert found["adapters_many"].ratio == found["adapters_many"].measured / found["adapters_none"].measured


def test_drafts_are_tokens_with_logits_that_end_at_the_same_context() -> None:
    model = import_module("gpu_sections.model")
    plan = plans.REHEARSAL
    _, tables = model.make_pool(plan, 3, plan.context)
    batch = model.decoding_step(plan, tables, plan.context, 2)
    assert {(row.start, row.end) for row in batch.rows} == {(plan.context - 3, plan.context)}
    assert len(batch.logit_indices) == 9


# vLLM

FAKE_VLLM = """
import os, types
__version__ = "1.0"
class SamplingParams:
    def __init__(self, **settings):
        self.__dict__.update(settings)
class LLM:
    def __init__(self, **settings):
        if "mode" not in settings["compilation_config"]:
            raise RuntimeError("no compiler here")
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        assert os.environ["PYTHONPATH"] == os.path.dirname(os.path.dirname(__file__))
        print("noise")
    def generate(self, prompts, sampling, use_tqdm):
        assert all(0 <= token < 300 for prompt in prompts for token in prompt["prompt_token_ids"])
        if len(prompts) == 1 and BREAKS:
            raise ValueError("out of memory")
        answer = types.SimpleNamespace(token_ids=[1] * sampling.max_tokens)
        return [types.SimpleNamespace(outputs=[answer], num_cached_tokens=20) for _ in prompts]
"""


def fake_vllm(folder: Path, source: str = FAKE_VLLM, *, breaks: bool = False) -> Path:
    """A folder with a package `vllm`, whose engine starts with graphs alone."""
    (folder / "site/vllm").mkdir(parents=True)
    (folder / "site/vllm/__init__.py").write_text(f"BREAKS = {breaks}\n{source}")
    return folder / "site"


def test_vllm_is_measured_in_the_first_way_that_starts(tmp_path: Path) -> None:
    facts = {"http_whole": 10.0, "decode_1": 2.0}
    found = measured("peer_vllm", facts, folder=tmp_path, vllm_site=fake_vllm(tmp_path))
    assert list(found) == [
        "vllm_compile",
        "vllm_start",
        "vllm",
        "vllm_ratio",
        "vllm_prompts",
        "vllm_cached",
        "vllm_single",
    ]
    assert found["vllm_compile"].unit == "failed: compile, start: RuntimeError: no compiler here"
    assert "vLLM 1.0 (graphs)" in found["vllm_start"].name
    assert found["vllm_ratio"].ratio == 10.0 / found["vllm"].measured
    assert found["vllm_ratio"].aim == 1.0
    assert "100 % of the prompts cached" in found["vllm_cached"].unit
    assert found["vllm_single"].ratio == found["vllm_single"].measured / 2.0


def test_a_part_of_vllm_that_fails_costs_no_other(tmp_path: Path) -> None:
    peer_vllm = import_module("gpu_sections.peer_vllm")
    plan = replace(plans.REHEARSAL, folder=tmp_path, vllm_site=fake_vllm(tmp_path, breaks=True))
    lines = peer_vllm.measure(plan, {})
    assert [next(lines).key for _ in range(5)][1:] == ["vllm_start", "vllm", "vllm_prompts", "vllm_cached"]
    with pytest.raises(RuntimeError, match="graphs, single: ValueError: out of memory"):
        next(lines)


def test_an_engine_that_never_starts_fails(tmp_path: Path) -> None:
    site = fake_vllm(tmp_path, "import os\nLLM = lambda **settings: os._exit(3)")
    peer_vllm = import_module("gpu_sections.peer_vllm")
    lines = peer_vllm.measure(replace(plans.REHEARSAL, folder=tmp_path, vllm_site=site), {})
    assert [next(lines).key for _ in range(3)] == ["vllm_compile", "vllm_graphs", "vllm_eager"]
    with pytest.raises(RuntimeError, match="compile, start: its process ended with 3"):
        next(lines)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "vLLM is not installed"),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
    ids=["not there", "broken"],
)
def test_a_rehearsal_without_vllm_skips_it(tmp_path: Path, source: str | None, reason: str) -> None:
    site = tmp_path if source is None else fake_vllm(tmp_path, source)
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--rehearse", "--sections", "vllm"]
    folders = ["--out", str(tmp_path / "out"), "--vllm-site", str(site)]
    sources = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": sources}
    done = subprocess.run([*command, *folders], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = json.loads((tmp_path / "out/report.json").read_text())["lines"]
    assert line["key"] == "vllm"
    assert line["unit"].startswith("skipped: ")
    assert reason in line["unit"]


def test_a_folder_of_vllm_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    gpu = import_module("gpu")
    with pytest.raises(SystemExit, match="error: --vllm-site .*none is no folder"):
        gpu.main(["--rehearse", "--vllm-site", str(tmp_path / "none")])
