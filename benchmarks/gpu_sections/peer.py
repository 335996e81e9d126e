"""transformers' continuous batching on the same weights, beside our server at requests of the same lengths."""

import time
from collections.abc import Iterator

import numpy as np
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from gpu_sections import checkpoint
from gpu_sections.figures import Facts, Line
from gpu_sections.plan import Plan

AIM = 2.0  # times as many tokens a second


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """Two rounds of prompts of their own; the first one warms up and does not count."""
    folder = checkpoint.ensure(plan)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=plan.dtype).to(plan.device).eval()
    config = GenerationConfig(max_new_tokens=plan.peer_answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    few = {} if plan.is_gpu else {"num_blocks": 16, "max_batch_tokens": 64}  # else as many as memory holds
    batching = ContinuousBatchingConfig(**few)
    for number in range(2):
        prompts = _prompts(plan, number)
        begin = time.perf_counter()
        answers = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, persistent_manager=True
        )
        seconds = time.perf_counter() - begin
    model.destroy_cached_continuous_batching_manager()
    made = sum(len(answer.generated_tokens) for answer in answers.values())
    if made != plan.peer_streams * plan.peer_answer:
        errors = [answer.error for answer in answers.values() if answer.error]
        raise ValueError(f"{made} tokens came of {plan.peer_streams} streams: {errors[:1]}")
    name = f"transformers, {plan.peer_streams} streams of {plan.context} + {plan.peer_answer} tokens, all of it"
    yield Line("peer", name, made / seconds, "tokens/s")
    if "http_whole" in facts:
        ratio = facts["http_whole"] * seconds / made
        yield Line("peer_ratio", "our server over HTTP, times transformers", ratio, "times", ratio, AIM)


def _prompts(plan: Plan, number: int) -> list[list[int]]:
    random = np.random.default_rng(1000 + number)
    ids = random.integers(checkpoint.NUM_BYTES, plan.config["vocab_size"] - 1, (plan.peer_streams, plan.context))
    lines: list[list[int]] = ids.tolist()
    return lines
