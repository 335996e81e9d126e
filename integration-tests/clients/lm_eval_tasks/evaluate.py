"""Run lm-eval's tasks of this folder on one model or several, in lm-eval's own environment.

    python evaluate.py '[["local-completions", {"base_url": ...}], ["hf", {"pretrained": ...}]]' TASK ...

`--chat` first applies the model's chat template.

Prints a line of JSON: for each model by task the responses of each request, in order.
"""

import json
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager


def responses(model: str, arguments: dict[str, Any], tasks: list[str], *, is_chat: bool) -> dict[str, list[Any]]:
    """The responses of one model by task."""
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=tasks,
        task_manager=TaskManager(include_path=".", include_defaults=False),
        bootstrap_iters=0,
        apply_chat_template=is_chat,
    )
    return {
        task: [response for sample in samples for (response,) in sample["resps"]]
        for task, samples in found["samples"].items()
    }


if __name__ == "__main__":
    is_chat, (first, *tasks) = "--chat" in sys.argv, [word for word in sys.argv[1:] if word != "--chat"]
    print(json.dumps([responses(model, arguments, tasks, is_chat=is_chat) for model, arguments in json.loads(first)]))
