"""Run lm-eval's tasks of this folder on one model or several, in lm-eval's own environment.

    python evaluate.py '[["local-completions", {"base_url": ...}], ["hf", {"pretrained": ...}]]' TASK ...

Prints a line of JSON: for each model by task the responses of each request, in order.
"""

import json
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager


def responses(model: str, arguments: dict[str, Any], tasks: list[str]) -> dict[str, list[Any]]:
    """The responses of one model by task."""
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=tasks,
        task_manager=TaskManager(include_path=".", include_defaults=False),
        bootstrap_iters=0,
    )
    return {
        task: [response for sample in samples for (response,) in sample["resps"]]
        for task, samples in found["samples"].items()
    }


if __name__ == "__main__":
    runs, tasks = json.loads(sys.argv[1]), sys.argv[2:]
    print(json.dumps([responses(model, arguments, tasks) for model, arguments in runs]))
