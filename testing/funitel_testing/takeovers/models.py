"""Deployments of every kind of model, tiny, each with requests whose answers are compared when a router dies."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from funitel_testing.faults.asks import CONTEXT
from funitel_testing.faults.model import save_endless
from funitel_testing.faults.scenes import ALIKE, LIMITS
from funitel_testing.takeovers.asks import RawAsk
from funitel_testing.tiny import save_tokenizer
from funitel_testing.tiny_adapters import EIGHT, save_adapter
from funitel_testing.vision_models import picture, save_vision
from funitel_testing.vision_requests import content_of
from funitel_testing.zoo import ZOO

ADAPTERS = ("sql", "poet")
_PROMPT = "{0} bottles of beer on the wall, {0} bottles of beer. "
_SEEDED = {"do_sample": True, "temperature": 0.9, "top_p": 0.95}


@dataclasses.dataclass(frozen=True)
class KilledDeployment:
    """Flags of a server beside those that all have, and the kinds of requests that it is asked.

    Each answer has `num_tokens`, so many that its stream outlives three routers. `loads` are bodies of requests to load
    adapters that come before. With fewer than five clients none pipelines its requests.
    """

    flags: tuple[str, ...]
    asks: Sequence[RawAsk]
    num_tokens: int = 300
    loads: Sequence[Mapping[str, str]] = ()
    num_clients: int = 12


def _body(number: int, num_tokens: int, **parameters: Any) -> dict[str, Any]:
    known = {"max_new_tokens": num_tokens, "details": True, "ignore_eos_token": True}
    return {"inputs": _PROMPT.format(number), "parameters": known | parameters}


def _chat(number: int, num_tokens: int, content: Any = None, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content or _PROMPT.format(number)}]
    known = {"model": "tgi", "messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "logprobs": True}
    return known | fields


def text_asks(adapter: str | None = None) -> tuple[RawAsk, ...]:
    """Requests with a text, of the model or of one of its adapters; their names say which."""
    of = {} if adapter is None else {"adapter_id": adapter}
    model, words = adapter or "tgi", "" if adapter is None else f", {adapter}"
    return (
        RawAsk(f"generate_stream, greedy{words}", lambda n, t: ("/generate_stream", _body(n, t, **of))),
        RawAsk(
            f"generate_stream, seeded{words}", lambda n, t: ("/generate_stream", _body(n, t, seed=n, **_SEEDED, **of))
        ),
        RawAsk(
            f"chat, streamed, two choices{words}",
            lambda n, t: ("/v1/chat/completions", _chat(n, t, model=model, stream=True, n=2, seed=n)),
        ),
        RawAsk(
            f"chat, whole{words}",
            lambda n, t: ("/v1/chat/completions", _chat(n, t, model=model, temperature=0)),
        ),
    )


def _asks_of_text_alone() -> tuple[RawAsk, ...]:
    """Requests for answers without log-probabilities, whose last digits depend on how a prompt was cut into chunks."""
    return tuple(
        RawAsk(
            f"chat, {words}",
            lambda n, t, fields=fields: ("/v1/chat/completions", _chat(n, t, logprobs=False, seed=n, **fields)),
        )
        for words, fields in (
            ("streamed, greedy", {"stream": True, "temperature": 0}),
            ("streamed, seeded", {"stream": True}),
            ("whole", {"temperature": 0}),
        )
    )


def _image_asks() -> tuple[RawAsk, ...]:
    def content(number: int) -> list[dict[str, Any]]:
        return content_of([f"{number}: ", picture(60, 45, number), "and ", picture(33, 90, number + 1)])

    return (
        RawAsk(
            "chat, streamed, images",
            lambda n, t: ("/v1/chat/completions", _chat(n, t, content(n), stream=True, temperature=0)),
        ),
        RawAsk(
            "chat, streamed, one image of all",
            lambda n, t: ("/v1/chat/completions", _chat(n, t, content(0), stream=True, seed=n)),
        ),
        RawAsk("chat, whole, images", lambda n, t: ("/v1/chat/completions", _chat(n, t, content(n), temperature=0))),
        *text_asks()[:2],
    )


def _llama(folder: Path, *flags: str, num_tokens: int = 300) -> KilledDeployment:
    return KilledDeployment(("--model-id", str(save_endless(folder / "model")), *flags), text_asks(), num_tokens)


def _with_adapters(folder: Path, *flags: str) -> KilledDeployment:
    model = save_endless(folder / "model")
    entries = [
        f"{name}={save_adapter(model, folder / name, made, seed)}"
        for seed, (name, made) in enumerate(zip(ADAPTERS, (EIGHT[1], EIGHT[7]), strict=True))
    ]
    asks = [ask for asks in zip(*map(text_asks, (None, *ADAPTERS)), strict=True) for ask in asks]
    return KilledDeployment(("--model-id", str(model), "--lora-adapters", ",".join(entries), *flags), asks)


def _with_adapters_of_run_time(folder: Path) -> KilledDeployment:
    """Requests in the journal go on with them; the next router answers later ones by the model itself."""
    model, root = save_endless(folder / "model"), folder / "adapters"
    for seed, (name, made) in enumerate(zip(ADAPTERS, (EIGHT[1], EIGHT[7]), strict=True)):
        save_adapter(model, root / name, made, seed)
    one, other = map(text_asks, ADAPTERS)
    loads = [{"lora_name": name, "lora_path": name} for name in ADAPTERS]
    flags = ("--model-id", str(model), "--lora-folder", str(root))
    return KilledDeployment(flags, (one[0], other[2], one[3], other[1]), 900, loads, num_clients=4)


def _hybrid(folder: Path, *flags: str) -> KilledDeployment:
    smallest = ZOO["qwen3_5"]
    dataclasses.replace(smallest, config=dict(smallest.config) | {"max_position_embeddings": CONTEXT}).save(folder)
    save_tokenizer(folder)
    return KilledDeployment(("--model-id", str(folder), "--max-batch-size", "16", *flags), _asks_of_text_alone())


def _vision(folder: Path, *flags: str) -> KilledDeployment:
    model = save_vision("qwen2_5_vl", folder / "model")
    return KilledDeployment(("--model-id", str(model), *flags), _image_asks())


TWO_RANKS, TWO_STAGES, TWO_REPLICAS = ("--num-shard", "2"), ("--partition", "0;1"), ("--num-replicas", "2")

KILLED_DEPLOYMENTS: Mapping[str, Callable[[Path], KilledDeployment]] = {
    "adapters": lambda folder: _with_adapters(folder),
    "adapters-on-two-ranks": lambda folder: _with_adapters(folder, *TWO_RANKS),
    "adapters-in-turn": lambda folder: _with_adapters(folder, "--max-loras", "1"),
    "adapters-of-run-time": lambda folder: _with_adapters_of_run_time(folder),
    "stages": lambda folder: _llama(folder, *TWO_STAGES),
    "recurrent": lambda folder: _hybrid(folder),
    "recurrent-on-two-ranks": lambda folder: _hybrid(folder, *TWO_RANKS),
    "images": lambda folder: _vision(folder),
    "images-on-two-ranks": lambda folder: _vision(folder, *TWO_RANKS),
    "speculation": lambda folder: _llama(folder, "--speculate", "2", num_tokens=900),
    "replicas": lambda folder: _llama(folder, *TWO_REPLICAS),
}
"""Functions of a folder for what is saved, by the name of what is deployed."""

COMMON_FLAGS = (*LIMITS, *ALIKE, "--max-restarts", "1000")
