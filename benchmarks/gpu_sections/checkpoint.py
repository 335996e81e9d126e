"""A model of random weights as a folder that any program can load: tensors, tokenizer, configuration.

A token of the vocabulary is a byte or a word of four letters with a space before it, so that a prompt of n words has n
tokens, and whatever is generated is text.
"""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.convert.hf_folder import Planned, write_json, write_safetensors
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel_testing.random_weights import RandomWeights
from gpu_sections.figures import Facts, Line
from gpu_sections.plan import BLOCK_SIZE, Plan

EOS = "<|end|>"
NUM_BYTES = 256
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}  # safetensors' names


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """Write the plan's model, so that later sections find it."""
    begin = time.perf_counter()
    ensure(plan)
    yield Line("checkpoint", "writing the random checkpoint", time.perf_counter() - begin, "s")


def ensure(plan: Plan) -> Path:
    """The folder of the plan's model."""
    return write(plan.folder / "large", plan.config, plan.dtype, plan.device)


def ensure_small(plan: Plan) -> Path:
    """The folder of the model that stands in for the demo model."""
    return write(plan.folder / "small", plan.small, torch.float32, plan.device)


def word(index: int) -> str:
    """The text of one of the words, of which there are many more than any vocabulary has tokens."""
    return " " + "".join(ascii_lowercase[index // 26**place % 26] for place in reversed(range(4)))


def prompt_of(number: int, num_tokens: int, vocab_size: int) -> str:
    """A text of so many tokens, another for each number."""
    words = np.random.default_rng(number).integers(0, vocab_size - NUM_BYTES - 1, num_tokens)
    return "".join(map(word, words.tolist()))


class _NotedWeights(RandomWeights):
    """Random weights that keep the names and shapes of what they were asked for."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device, deviation=None)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def read(self, name: str, shape: Sequence[int], **parts: Any) -> torch.Tensor:
        """See Weights."""
        self.shapes[name] = tuple(shape)
        return super().read(name, shape, **parts)


def write(folder: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Path:
    """Write a model of random weights unless it is there; returns `folder`."""
    if (folder / "config.json").is_file():  # written last
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    weights = _NotedWeights(dtype, device)
    Decoder(spec_of(config), weights, TensorParallel(), TorchAttention(BLOCK_SIZE, device))
    tensors = [_planned(weights, name, shape) for name, shape in list(weights.shapes.items())]
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"}, "writing random weights")
    tokenizer_of(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"})
    ends = {"bos_token_id": None, "eos_token_id": config["vocab_size"] - 1}
    write_json(folder / "generation_config.json", ends)
    write_json(folder / "config.json", config | ends | {"torch_dtype": str(dtype).removeprefix("torch.")})
    return folder


def _planned(weights: RandomWeights, name: str, shape: Sequence[int]) -> Planned:
    num_bytes = math.prod(shape) * weights.dtype.itemsize
    return Planned(name, DTYPES[weights.dtype], shape, num_bytes, lambda: [_bytes_of(weights.read(name, shape))])


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """As bytes, as numpy has no bfloat16."""
    return tensor.view(torch.uint8).cpu().numpy()


def tokenizer_of(vocab_size: int) -> Tokenizer:
    """Every byte, then words, and the end token as the last."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    letters = islice(product(ascii_lowercase, repeat=4), vocab_size - NUM_BYTES - 1)
    pieces += [space + "".join(each) for each in letters]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer
