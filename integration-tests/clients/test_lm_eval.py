"""lm-eval as it is: `local-completions` over HTTP gives what its own `hf` backend computes in float32.

The version is `lm-eval[api,hf]==0.4.13`, which has requirements that are not the project's: it lives in an environment
of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from funitel_testing.cache import as_floats
from funitel_testing.servers import Server, serving

TASKS = Path(__file__).parent / "lm_eval_tasks"
ROOT = Path(__file__).parents[2]
SCORED = ("funitel_choice", "funitel_loglikelihood", "funitel_rolling")
GENERATED = "funitel_generate"
CLOSE = 1e-4
CONTEXT = 512  # of `tiny_model`


def find_python() -> Path | None:
    """An interpreter that has lm-eval: the one that is named, that of the third-party clients, or this one."""
    named = os.environ.get("FUNITEL_LM_EVAL_PYTHON")
    known = [Path(named)] if named else [ROOT / ".venv-clients/lm_eval/bin/python", Path(sys.executable)]
    for python in filter(Path.exists, known):
        program = "import lm_eval, aiohttp, tenacity, torch, transformers"
        if (
            subprocess.run([python, "-c", program], capture_output=True, check=False, env=_environment()).returncode
            == 0
        ):
            return python
    return None


def _environment() -> dict[str, str]:
    """Without the project's packages, and without the internet."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}


@pytest.fixture(scope="module")
def python() -> Path:
    found = find_python()
    if found is None:
        pytest.skip("lm-eval[api,hf] is not installed: set FUNITEL_LM_EVAL_PYTHON to an interpreter that has it")
    return found


def evaluate(
    python: Path, folder: Path, *runs: tuple[str, dict[str, Any]], words: tuple[str, ...] = (*SCORED, GENERATED)
) -> list[dict[str, list[Any]]]:
    done = subprocess.run(
        [python, "evaluate.py", json.dumps(runs), *words],
        cwd=TASKS,
        env=_environment() | {"HF_DATASETS_CACHE": str(folder)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, list[Any]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def over_http(url: str, model: Path, **more: Any) -> tuple[str, dict[str, Any]]:
    return "local-completions", {"base_url": f"{url}/v1/completions", "model": "any", "tokenizer": str(model)} | more


def in_transformers(model: Path, **more: Any) -> tuple[str, dict[str, Any]]:
    return "hf", {"pretrained": str(as_floats(model)), "dtype": "float32", "device": "cpu"} | more


def assert_equal(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    assert found.keys() == expected.keys() == {*SCORED, GENERATED}
    assert found[GENERATED] == expected[GENERATED]
    for task in SCORED:
        pairs = list(zip(found[task], expected[task], strict=True))
        assert len(pairs) >= 6
        if isinstance(pairs[0][0], list):
            assert [one[1] for one, _ in pairs] == [other[1] for _, other in pairs], f"{task}: what is greedy"
            pairs = [(one[0], other[0]) for one, other in pairs]
        worst = max(abs(one - other) for one, other in pairs)
        assert worst < CLOSE, f"{task}: {worst} apart"


def test_b2_lm_eval_of_a_random_model(python: Path, tiny_model: Path, tmp_path: Path) -> None:
    with serving(
        tmp_path, "--model-id", str(tiny_model), "--dtype", "float32", "--max-batch-prefill-tokens", "24"
    ) as server:
        found, side_by_side, expected = evaluate(
            python,
            tmp_path,
            over_http(server.url, tiny_model, max_length=CONTEXT),
            over_http(server.url, tiny_model, max_length=CONTEXT, num_concurrent=4, batch_size=3),
            in_transformers(tiny_model, max_length=CONTEXT),
        )
    assert_equal(found, expected)
    assert_equal(side_by_side, expected)


def test_b2_lm_eval_of_the_demo_model(python: Path, server: Server, demo_model: Path, tmp_path: Path) -> None:
    """Beside other requests' cached prefixes: what was cached is scored too."""
    again = over_http(server.url, demo_model, tokenized_requests=False)
    found, as_text, expected = evaluate(
        python, tmp_path, over_http(server.url, demo_model), again, in_transformers(demo_model)
    )
    assert_equal(found, expected)
    assert_equal(as_text, expected)


def test_b2_lm_eval_of_chats(python: Path, server: Server, demo_model: Path, tmp_path: Path) -> None:
    chats = {"base_url": f"{server.url}/v1/chat/completions", "model": "any", "tokenizer_backend": None}
    found, expected = evaluate(
        python,
        tmp_path,
        ("local-chat-completions", chats | {"num_concurrent": 2}),
        in_transformers(demo_model),
        words=("--chat", GENERATED),
    )
    assert [text.strip() for text in found[GENERATED]] == [text.strip() for text in expected[GENERATED]]
    assert any(text.strip() for text in found[GENERATED])
