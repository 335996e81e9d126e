"""A checkpoint folder as a model of transformers: its weights, all of them, and whether steps compute right."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from funitel.model_server.checkpoint.sparse_tensor import dense_files
from funitel.model_server.checkpoint.storage import open_file
from funitel.model_server.checkpoint.weights import KV_SCALE
from funitel.model_server.device.torch_import import seeded_generator
from funitel.model_server.files.integrity import read_json, weight_files
from funitel.model_server.forward.batch import Forward, ForwardBatch, RowSpan
from funitel.model_server.models.transformers_fallback.dequantized import DequantizedCheckpoint, is_quantized
from funitel.model_server.models.transformers_fallback.pool import FallbackPools
from funitel.model_server.models.transformers_fallback.tensor_parallel import Split
from funitel.model_server.quantized.published import find_quantization
from funitel.proto.errors import FunitelError, NoRow, Unsuited, UnsupportedModel, WeightsError, translating

logger = logging.getLogger(__name__)

_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_LIBRARY = f"transformers {transformers.__version__}"


def translating_errors(
    message: str = "the model's code in transformers fails", make: type[FunitelError] = UnsupportedModel
) -> AbstractContextManager[None]:
    """Raise what transformers, or code that comes with a model, raises inside as `make`: any class is possible."""
    return translating(lambda error: make(f"{message}: {first_line(error)}"))


def first_line(error: BaseException) -> str:
    """What an error says first, or what it is."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def read_config(folder: Path, no_row: NoRow, *, trusts_code: bool) -> Any:
    """The model's configuration, as transformers understands it.

    Raises:
        UnsupportedModel: transformers does not know the model either, or it is none that generates text from text
            alone, or it brings code that is not trusted, or weights quantised in a way that cannot be read.
    """
    given = read_json(folder / "config.json")
    is_known = given.get("model_type") in transformers.CONFIG_MAPPING
    has_code = "AutoModelForCausalLM" in (given.get("auto_map") or {})
    if has_code and not is_known and not trusts_code:
        raise UnsupportedModel(f"{named(given)} needs code that comes with it: --trust-remote-code runs such code")
    if not is_known and not has_code:
        raise UnsupportedModel(f"{no_row.message}; {_LIBRARY} does not know it either")
    _check_layers(given, folder)
    with translating_errors(f"{no_row.message}; {_LIBRARY} refuses its config.json"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code, local_files_only=True)
        is_causal = has_code and trusts_code or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if not is_causal or config.is_encoder_decoder:
        raise UnsupportedModel(f"{no_row.message}; in {_LIBRARY} it is no causal language model")
    find_quantization(folder)  # refuses what cannot be read
    for each in (config, config.get_text_config(decoder=True)):
        for key in _QUANTIZATION_KEYS:
            if hasattr(each, key):
                delattr(each, key)  # its quantisers are not asked
    return config


def _check_layers(given: Mapping[str, Any], folder: Path) -> None:
    """Raise UnsupportedModel for layers that cannot all have weights: code that makes them would not come to an end.

    Files that `open_file` does not trust, the pickles with code in them, are refused on the way.
    """
    num_tensors = sum(len(open_file(path)[1]) for path in weight_files(folder))
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if isinstance(given.get(key), int) and given[key] > num_tensors:
            raise UnsupportedModel(
                f"config.json of {named(given)} says {given[key]} layers, the checkpoint has {num_tensors} tensors"
            )


def named(config: Mapping[str, Any]) -> str:
    """What a configuration calls the model."""
    architectures = config.get("architectures") or []
    return ", ".join(map(str, architectures)) or f"a model of type {config.get('model_type')!r}"


def hollow(config: Any, *, trusts_code: bool) -> Any:
    """The model without weights.

    Raises:
        UnsupportedModel: its code fails.
    """
    with translating_errors(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trusts_code).eval()


def load_model(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, split: Split | None, *, trusts_code: bool
) -> Any:
    """The model with its weights in `dtype`, or this rank's share of them, in evaluation mode.

    Raises:
        WeightsError: tensors are missing or have other shapes, or cannot be read.
    """
    transformers.utils.logging.set_verbosity_error()  # its reports of loading are ours to give
    transformers.utils.logging.disable_progress_bar()
    settings = {} if split is None else split.settings()
    if is_quantized(folder):
        model, info = _load_quantized(folder, config, dtype, settings, trusts_code=trusts_code)
    else:
        with translating_errors(f"transformers cannot load {folder}", WeightsError):
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                trust_remote_code=trusts_code,
                use_safetensors=weight_files(folder)[0].suffix == ".safetensors",
                local_files_only=True,
                output_loading_info=True,
                **settings,
            )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise WeightsError(f"the checkpoint lacks {len(missing)} tensors of the model: {', '.join(missing[:3])}")
    _check_surplus(folder, config, info["unexpected_keys"])
    if split is not None:
        split.regroup(model)
    return model.eval().requires_grad_(False).to(device)


def _check_surplus(folder: Path, config: Any, unexpected: Iterable[str]) -> None:
    """Raise WeightsError for tensors that have no place in the model.

    Those that its class says are of no use are not among them. A checkpoint of a model for images too holds more than
    the text, and some have layers that predict tokens beyond the next; quantised ones may hold scales of the cache,
    and biases of zeros.
    """
    text = config.get_text_config(decoder=True)
    num_layers = getattr(text, "num_hidden_layers", 0)
    further = range(num_layers, num_layers + (getattr(text, "num_nextn_predict_layers", None) or 0))
    unread = re.compile("|".join([KV_SCALE.pattern, *(rf"(^|\.)layers\.{i}\." for i in further)]))
    surplus = sorted(name for name in unexpected if not unread.search(name))
    if is_quantized(folder):
        surplus = [name for name in surplus if not (name.endswith(".bias") and _is_zero(folder, name))]
    if not surplus:
        return
    some = ", ".join(surplus[:3])
    if text is config:
        raise WeightsError(f"the checkpoint holds {len(surplus)} tensors the model does not know: {some}")
    logger.warning("%d tensors of the checkpoint are not used, for text alone is served: %s", len(surplus), some)


def _is_zero(folder: Path, name: str) -> bool:
    files = dense_files({each: file for file, names in map(open_file, weight_files(folder)) for each in names})
    return not files[name].get_tensor(name).any()


def _load_quantized(
    folder: Path, config: Any, dtype: torch.dtype, settings: Mapping[str, Any], *, trusts_code: bool
) -> tuple[Any, Mapping[str, Any]]:
    """The model of a quantised checkpoint in floating point, and what transformers says of loading it."""
    kind = type(hollow(config, trusts_code=trusts_code))
    checkpoint = DequantizedCheckpoint(folder)
    with translating(
        lambda error: (
            checkpoint.failure or WeightsError(f"transformers cannot load {folder}, dequantised: {first_line(error)}")
        )
    ):
        found: tuple[Any, Mapping[str, Any]] = kind.from_pretrained(
            None, config=config, dtype=dtype, state_dict=checkpoint.tensors, output_loading_info=True, **settings
        )
    return found


_LENGTHS = (9, 5)  # tokens of the sequences
_STEPS = ((6, 4), (1, 1), (2, 0))  # tokens that each computes: chunks beside each other, single ones, a chunk upon them
_TOLERANCE = 1e-3  # of the largest logit, in float32; rounding alone is far below
_HALF_TOLERANCE = 0.1


@torch.inference_mode()
def expected_logits(model: Any, vocab_size: int, device: torch.device) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Random prompts, and the logits of all their positions as the model alone computes them."""
    generator = seeded_generator(0)
    prompts = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in _LENGTHS]
    return prompts, [model(input_ids=torch.tensor([ids], device=device)).logits[0].float() for ids in prompts]


@torch.inference_mode()
def check_steps(
    forward: Forward, pools: FallbackPools, prompts: Sequence[Sequence[int]], expected: Sequence[torch.Tensor]
) -> None:
    """Step through `prompts` beside each other and hold every logit against `expected`.

    Raises:
        Unsuited: they differ.
    """
    size = pools.block_size
    each = -(-max(_LENGTHS) // size)
    pool = pools.make(1 + each * len(prompts))
    tables = [np.arange(1 + i * each, 1 + (i + 1) * each, dtype=np.int32) for i in range(len(prompts))]
    done = [0] * len(prompts)
    for counts in _STEPS:
        active = [i for i, n in enumerate(counts) if n]
        spans = [
            RowSpan(prompts[i][done[i] : done[i] + counts[i]], done[i], tables[i], "all", len(prompts[i]))
            for i in active
        ]
        logits = forward(ForwardBatch.build(spans, size, pools.device), pool)
        for i, span in zip(active, spans, strict=True):
            done[i] = span.end
        if logits is not None:
            wanted = torch.cat([expected[i][s.start : s.end] for i, s in zip(active, spans, strict=True)])
            error = float((logits - wanted).abs().max())
            tolerance = _TOLERANCE if pools.dtype is torch.float32 else _HALF_TOLERANCE
            if not error <= tolerance * float(wanted.abs().max()):
                raise Unsuited(f"its logits by steps are off by {error:.2g}")
