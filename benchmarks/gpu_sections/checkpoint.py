"""A model of random weights as a folder that any program can load: tensors, tokenizer, configuration.

Layers are written in floating point, or as random integers of 4 bits, in less than a third of the bytes.

A token of the vocabulary is a byte or a word of four letters with a space before it, so that a prompt of n words has n
tokens, and whatever is generated is text.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from zlib import crc32

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
DTYPES = {  # safetensors' names
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int64: "I64",
}
GROUP = 128  # inputs that share a scale, of weights of 4 bits
FOUR_BITS = {  # quantization_config of compressed-tensors
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        }
    },
    "ignore": ["lm_head"],
}


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """Write the plan's model, so that later sections find it."""
    begin = time.perf_counter()
    ensure(plan)
    yield Line("checkpoint", "writing the random checkpoint", time.perf_counter() - begin, "s")


def ensure(plan: Plan) -> Path:
    """The folder of the plan's model."""
    return write(plan.folder / "large", plan.config, plan.dtype, plan.device)


def ensure_four_bits(plan: Plan) -> Path:
    """The folder of a model of the plan's shape with linear layers of 4 bits."""
    return write(plan.folder / "four_bits", plan.config, plan.dtype, plan.device, has_four_bits=True)


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


def write(
    folder: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device, *, has_four_bits: bool = False
) -> Path:
    """Write a model of random weights unless it is there; returns `folder`."""
    if (folder / "config.json").is_file():  # written last
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    weights = _NotedWeights(dtype, device)
    Decoder(spec_of(config), weights, TensorParallel(), TorchAttention(BLOCK_SIZE, device))
    tensors: list[Planned] = []
    for name, shape in list(weights.shapes.items()):
        is_packed = has_four_bits and name.endswith("_proj.weight")
        tensors += _planned_codes(weights, name, shape) if is_packed else [_planned(weights, name, shape)]
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"}, "writing random weights")
    tokenizer_of(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"})
    ends = {"bos_token_id": None, "eos_token_id": config["vocab_size"] - 1}
    write_json(folder / "generation_config.json", ends)
    kept: dict[str, Any] = {"quantization_config": FOUR_BITS} if has_four_bits else {}
    write_json(folder / "config.json", config | ends | kept | {"torch_dtype": str(dtype).removeprefix("torch.")})
    return folder


def _planned(weights: RandomWeights, name: str, shape: Sequence[int]) -> Planned:
    return _planned_of(name, shape, weights.dtype, lambda: weights.read(name, shape))


def _planned_codes(weights: RandomWeights, name: str, shape: Sequence[int]) -> list[Planned]:
    """A layer [outputs, inputs] as words of eight random codes each, with a scale for each group of an output."""
    (outputs, inputs), device = shape, weights.device
    of_words, of_scales = (outputs, -(-inputs // 8)), (outputs, -(-inputs // GROUP))

    def words() -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(crc32(name.encode()))
        return torch.randint(-(2**31), 2**31, of_words, dtype=torch.int32, device=device, generator=generator)

    def scales() -> torch.Tensor:
        deviation = math.sqrt((16**2 - 1) / 12)  # of codes of 4 bits
        return torch.full(of_scales, inputs**-0.5 / deviation, dtype=weights.dtype)

    return [
        _planned_of(f"{name}_packed", of_words, torch.int32, words),
        _planned_of(f"{name}_scale", of_scales, weights.dtype, scales),
        _planned_of(f"{name}_shape", (2,), torch.int64, lambda: torch.tensor(shape)),
    ]


def _planned_of(name: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> Planned:
    return Planned(name, DTYPES[dtype], shape, math.prod(shape) * dtype.itemsize, lambda: [_bytes_of(read())])


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
