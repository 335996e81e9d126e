"""Log-probabilities of prompts and completions are within 1e-4 of transformers' in float32."""

from pathlib import Path

import pytest
import torch
import transformers

from funitel.llm import LLM, Logprob, SamplingParams
from funitel_testing.tiny import save_tiny

MAX_DIFFERENCE = 1e-4
NUM_TOP = 10
PROMPTS = ("Once upon a time", "It was the best of times, it was the worst of times, " * 2, "x y")


def check(found: dict[int, Logprob], truth: torch.Tensor, chosen: int) -> float:
    """Hold the candidates at one place to the model's scores; the largest difference."""
    likeliest = [token_id for token_id, each in found.items() if each.rank is not None and each.rank <= NUM_TOP]
    values, _ = truth.topk(NUM_TOP)
    assert len(likeliest) == NUM_TOP
    assert chosen in found
    ranked = sorted(likeliest, key=lambda token_id: found[token_id].rank or 0)
    differences = [abs(found[i].logprob - float(value)) for i, value in zip(ranked, values, strict=True)]
    return max(*differences, *(abs(each.logprob - float(truth[i])) for i, each in found.items()))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("ways", [{"temperature": 0}, {"seed": 3, "temperature": 1.4, "repetition_penalty": 1.3}])
def test_scores_are_those_of_transformers(tmp_path: Path, family: str, ways: dict[str, float]) -> None:
    folder = save_tiny(family, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP, **ways)
    # Prompts are computed in chunks of 16 tokens, beside the others' completions.
    sizes = {"block_size": 4, "max_batch_total_tokens": 2000, "max_batch_prefill_tokens": 16}
    with LLM(folder, dtype="float32", num_threads=1, **sizes) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    worst = 0.0
    for output in outputs:
        (completion,) = output.outputs
        ids = [*output.prompt_token_ids, *completion.token_ids]
        with torch.no_grad():
            truth = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        prompt, completed = output.prompt_logprobs, completion.logprobs
        assert prompt is not None
        assert completed is not None
        assert (prompt[0], len(prompt), len(completed)) == (None, len(output.prompt_token_ids), 24)
        for place, found in enumerate([*prompt[1:], *completed], 1):
            assert found is not None
            worst = max(worst, check(found, truth[place - 1], ids[place]))
    assert worst < MAX_DIFFERENCE
