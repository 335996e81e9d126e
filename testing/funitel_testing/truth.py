"""What transformers says of the tokens a server answered: scores at every place, raw and as sampling changes them."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers.generation import logits_process

# The bound promised for log-probabilities.
CLOSE = 1e-3
# What may be lost to rounding between two orders of summation: candidates nearer than this may change places.
NEAR_TIE = 1e-4


class Truth:
    """A model of transformers in float32, and its tokenizer."""

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._remembered = functools.lru_cache(maxsize=16)(self._scores)

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, as it stands."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def text_of(self, token_id: int) -> str:
        """A token's text by itself."""
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False))

    def scores(self, ids: Sequence[int]) -> torch.Tensor:
        """Raw scores [len(ids), vocab_size] of what follows each token of a sequence; not to be changed."""
        return self._remembered(tuple(ids))

    @torch.inference_mode()
    def _scores(self, ids: tuple[int, ...]) -> torch.Tensor:
        logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0].float()
        return logits

    def gaps(self, ids: Sequence[int], answer: Sequence[int]) -> list[float]:
        """How far below the best token each token of an answer to a prompt scores; 0 where it is the best."""
        scores = self.scores([*ids, *answer])[len(ids) - 1 : -1]
        gaps: list[float] = (scores.max(-1).values - scores[range(len(answer)), list(answer)]).tolist()
        return gaps

    def ends(self) -> frozenset[int]:
        """Tokens that end a completion."""
        listed = self.model.generation_config.eos_token_id
        return frozenset(listed if isinstance(listed, list) else [listed])

    def prompt_logprobs(self, scores: torch.Tensor, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of `ids[1:]`, each after those before it."""
        following = torch.tensor(ids[1:], dtype=torch.int64)
        logprobs: list[float] = scores[: len(following)].log_softmax(-1).gather(1, following[:, None])[:, 0].tolist()
        return logprobs


def raw_logprobs(scores: torch.Tensor) -> torch.Tensor:
    """Log-softmax of unprocessed scores: what OpenAI's routes promise."""
    return scores.log_softmax(-1)


def processed_logprobs(scores: torch.Tensor, before: Sequence[int], parameters: dict[str, Any]) -> torch.Tensor:
    """Log-softmax of one row of scores after all that native parameters do to it, in TGI's order.

    Made of transformers' own processors, but for TGI's frequency penalty, which it has not: the penalty times a
    token's share of all tokens `before`.
    """
    scores = scores.clone()
    for token_id, bias in (parameters.get("logit_bias") or {}).items():
        scores[int(token_id)] += bias
    ids: Any = torch.tensor([before])
    rows: Any = scores[None]
    if penalty := parameters.get("repetition_penalty"):
        rows = logits_process.RepetitionPenaltyLogitsProcessor(penalty)(ids, rows)
    if penalty := parameters.get("frequency_penalty"):
        rows = rows - penalty * torch.bincount(ids[0], minlength=rows.shape[1]) / len(before)
    warpers: dict[str, Any] = {
        "temperature": logits_process.TemperatureLogitsWarper,
        "top_k": logits_process.TopKLogitsWarper,
        "top_p": logits_process.TopPLogitsWarper,
        "min_p": logits_process.MinPLogitsWarper,
        "typical_p": logits_process.TypicalLogitsWarper,
    }
    for name, make in warpers.items():
        if name in parameters:
            rows = make(parameters[name])(ids, rows)
    logprobs: torch.Tensor = rows[0].log_softmax(-1)
    return logprobs


def check_place(logprobs: torch.Tensor, token: dict[str, Any], top: list[dict[str, Any]], num_top: int) -> str | None:
    """Hold one answered token and the likeliest ones beside it against the truth; say what differs.

    Tokens are `{"id", "logprob"}`; a masked one is never among the likeliest, ties with the last all are.
    """
    for each in (token, *top):
        if each["logprob"] is None or abs(each["logprob"] - float(logprobs[each["id"]])) >= CLOSE:
            return f"token {each['id']}: {each['logprob']}, truly {float(logprobs[each['id']])}"
    best = [value for value in logprobs.topk(num_top).values.tolist() if value > -torch.inf]
    found = [each["logprob"] for each in top]
    if len(found) < len(best) or found != sorted(found, reverse=True):
        return f"likeliest {found}, truly {best}"
    if any(abs(a - b) >= CLOSE for a, b in zip(found, best, strict=False)) or found[-1] < best[-1] - CLOSE:
        return f"likeliest {found}, truly {best}"
    if len({each["id"] for each in top}) < len(top):
        return "a token is twice among the likeliest"
    return None
