"""Settings of every test, and of every process a test starts."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A busy machine makes single examples slow; what takes too long shows in the suite's time instead.
hypothesis.settings.register_profile("funitel", deadline=None)
hypothesis.settings.register_profile("short", deadline=None, max_examples=25)
hypothesis.settings.register_profile("long", deadline=None, max_examples=4000)
hypothesis.settings.load_profile("funitel")

# Processes of tests import the tests' own helpers, as pytest's `pythonpath` lets the tests.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "testing"), os.environ.get("PYTHONPATH")])
)
# Beside other tests the threads of a computation would wait for each other, spinning, on cores that others use.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without a GPU Triton's kernels run in its interpreter. It is asked for before anything can have imported triton.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Run in the background by a shell, we and all we start would ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take longest, in this order: begun last they would run while other processes have nothing left to do.
LONGEST = (
    # of the packages
    "tests/test_main.py",
    "supervisor/test_supervisor.py",
    "layers/test_experts_triton.py",
    "supervisor/test_router_process.py",
    "up/test_up.py",
    "tests/test_gpu_benchmark.py",
    "models/test_recorded_adapters.py",
    "perplexity/test_command.py",
    "config/test_upgrade.py",
    "cpu/test_families.py",
    "tests/test_gpu_compiled.py",
    "transformers_fallback/test_fallback.py",
    "executor/test_async_executor.py",
    # of the whole system
    "integration-tests/test_wheel.py",
    "integration-tests/test_schemathesis.py",
    "integration-tests/test_fleet_lifecycle.py",
    "media/test_hostile.py",
    "integration-tests/test_bad_input.py",
    "media/test_images.py",
    "integration-tests/test_disk_tier.py",
    "integration-tests/test_damaged_caches.py",
    "integration-tests/test_lifecycle.py",
    "integration-tests/test_equality.py",
    "integration-tests/test_fleet.py",
    "integration-tests/test_users.py",
    "media/test_voices.py",
    "media/test_transcription.py",
    "machines/test_workers.py",
    "takeover/test_killed.py",
    "integration-tests/test_guard.py",
    "integration-tests/test_install.py",
    "integration-tests/test_contract_shards.py",
)

# Tests that take long, by file, and the cases of them that run in every suite. The others are marked slow: what they
# differ by is covered by these, or by other tests.
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "integration-tests/media/test_images.py": {
        "test_answers_equal_transformers": ("idefics3", "llava", "qwen3_vl"),
        "test_on_two_ranks_in_small_chunks": ("gemma3",),
    },
    "integration-tests/media/test_voices.py": {"test_answers_equal_transformers": ("gemma4", "voxtral")},
    "integration-tests/takeover/test_other_version.py": {"test_a_router_finishes_and_another_one_follows": ("True",)},
    "integration-tests/test_bad_input.py": {
        "test_a_spoiled_folder": ("no config", "cut header", "broken tokenizer config", "config lacks sizes"),
        "test_a_spoiled_quantised_folder": ("unknown method", "another group"),
    },
    "integration-tests/test_beam_search.py": {
        "test_beam_search_is_that_of_transformers_in_company_preempted_and_after_a_crash": ("2",),
    },
    "integration-tests/test_disk_tier.py": {"test_a_restart_and_damage_change_no_text": ("2",)},
    "integration-tests/test_equality.py": {
        "test_greedy_tokens_equal_transformers": ("1",),
        "test_logprobs_equal_transformers": ("2",),
    },
    "integration-tests/test_held_rows.py": {
        "test_a_router_with_other_settings_waits_for_no_rank": ("tensor parallel",),
        "test_tokens_are_those_of_an_undisturbed_run": ("stages",),
    },
    "integration-tests/test_logprobs.py": {"test_logprobs_equal_transformers": ("2",)},
    "integration-tests/test_quantised.py": {"test_a_gptq_folder_is_served": ("2-flags1",)},
    "integration-tests/test_speculation.py": {
        "test_texts_are_those_without_drafts": ("tiny_model-flags0", "hybrid-flags3")
    },
    "integration-tests/test_strategies.py": {
        "test_b6_strategies_give_the_same_tokens_in_company_preempted_and_after_a_crash": ("2",),
    },
    "launcher/tests/up/test_up.py": {
        "test_a_keeper_of_another_version_is_replaced": ("False-False", "True-True"),
        "test_router_and_keeper_are_adopted_and_what_has_died_is_started_again": ("both", "keeper"),
    },
    "llm/tests/test_beam_search.py": {
        "test_beams_are_those_of_transformers": ("2-1.0-False", "2-2.0-never", "4-0.0-True", "4-2.0-False"),
    },
    "model_server/tests/layers/test_experts_triton.py": {
        "test_logits_of_the_reference_also_where_steps_are_replayed": ("qwen3_moe",),
        "test_the_experts_of_each_token": tuple(map(str, range(10))),
        "test_tiles_of_every_shape": ("16", "128"),
    },
    "model_server/tests/sampling/test_strategies.py": {
        "test_b6_draws_come_from_the_distribution_of_the_definition": ("mirostat 1", "tail-free"),
    },
    "model_server/tests/speculation/test_distribution.py": {
        "test_pairs_of_tokens_have_the_distribution_of_the_target": ("sampler0",),
    },
    "model_server/tests/speculation/test_texts.py": {
        "test_a_hundred_texts_are_those_without_drafts": ("fused-True", "torch-False", "hybrid-True"),
    },
    "model_server/tests/test_gpu_benchmark.py": {"test_a_rehearsal_without_vllm_skips_it": ("not there",)},
    "router/tests/engine/test_step_pipeline.py": {
        "test_tokens_are_the_same_however_late_the_answers": (
            "2-unchunked-single tokens-1",
            "2-chunked-forced spans-2",
            "3-unchunked-single tokens-2",
            "3-chunked-forced spans-1",
            "3-unchunked-forced spans-2",
        ),
    },
    "router/tests/media/test_processors.py": {
        "test_tiles_and_tokens_are_those_of_transformers": (
            "idefics3",
            "llava-clip",
            "llava-next",
            "llava-pixtral",
            "gemma3",
            "gemma4",
            "internvl",
            "llama4",
            "mistral3",
            "onevision",
            "qwen2-vl",
        ),
    },
    "router/tests/scheduler/test_scheduler_properties.py": {
        "test_speculating_sequences_share_a_small_pool": ("10-12", "14-0", "24-12"),
    },
    "router/tests/test_main.py": {
        "test_a5_browsers_are_kept_out_where_only_this_machine_is_let_in": ("loopback without a key", "every address"),
    },
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark variants as slow. Run the files that take longest first; the others as they come."""
    _mark_variants(config, items)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(f"{item.path.parent.name}/{item.path.name}", len(LONGEST)))


def _mark_variants(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what `VARIANTS` does not keep.

    Raises:
        pytest.UsageError: a case that is to run is none of its test's.
    """
    cases: dict[tuple[str, str], dict[str, pytest.Item]] = {}
    for item in items:
        path = item.path.relative_to(config.rootpath).as_posix()
        name, _, case = item.name.partition("[")
        if name in VARIANTS.get(path, {}):
            cases.setdefault((path, name), {})[case.removesuffix("]")] = item
    is_whole = not any("::" in argument for argument in config.args)
    for (path, name), found in cases.items():
        kept = VARIANTS[path][name]
        if unknown := [case for case in kept if case not in found] if is_whole else []:
            raise pytest.UsageError(f"VARIANTS: {path}::{name} has no case {', '.join(unknown)}")
        for case, item in found.items():
            if case not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def keeps_signal_handlers() -> Iterator[None]:
    """Fail a test that leaves a signal handler behind: a later test of the same process would not get its signals."""
    handlers = _signal_handlers()
    yield
    left = {number.name: left for number, left in _signal_handlers().items() if left != handlers[number]}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert not left


def _signal_handlers() -> dict[signal.Signals, Any]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return {number: signal.getsignal(number) for number in numbers}
