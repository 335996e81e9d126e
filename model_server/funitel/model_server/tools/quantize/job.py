"""Plan and run one quantisation: the tensors of the output, and how each of them is made."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.checkpoint.sparse_tensor import dense_files
from funitel.model_server.checkpoint.storage import TensorFile, open_file
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.files.integrity import weight_files
from funitel.model_server.files.progress import Progress
from funitel.model_server.layers.linear import Matmul
from funitel.model_server.quantized.bit_packing import Codes, round_int8, round_q4
from funitel.model_server.quantized.config import COMPRESSED
from funitel.model_server.settings import QuantizeSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.tools.quantize.folder import DTYPES, SafetensorsWriter
from funitel.model_server.tools.quantize.formats import Format, Shapes, side_files
from funitel.model_server.tools.quantize.gptq import output_error, quantize_gptq
from funitel.model_server.tools.quantize.layer_walk import Inputs, Walk, inputs_of
from funitel.model_server.tools.quantize.level_grid import full_range
from funitel.proto.errors import UnsupportedModel, WeightsError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quality:
    """Error of a layer's outputs over the calibration texts, relative to them; `rounded`: had one just rounded."""

    error: float
    rounded: float


@dataclass(slots=True)
class Report:
    """What was done: layers quantised, those left as they were, and how well the former keep their outputs."""

    num_quantised: int
    kept: list[str]
    num_tokens: int = 0
    qualities: dict[str, Quality] = field(default_factory=dict)  # by the first layer of those that share an input


class QuantizeJob:
    """One quantisation: which tensors the output will have, and the work of filling them."""

    def __init__(self, settings: QuantizeSettings, folder: Path, spec: ModelSpec, weights: Weights) -> None:
        self.settings = settings
        self.spec = spec
        self.weights = weights
        self._source = CheckpointSource(folder)
        every = [inputs_of(spec, weights.prefix, i) for i in range(spec.num_layers)]
        stems = [stem for layer in every for inputs in layer for stem, _ in inputs.parts]
        self._format = Format(settings, self._source.float_type(f"{stems[0]}.weight"))
        self._layers = [[inputs for inputs in layer if self._can_hold(inputs)] for layer in every]
        chosen = [part for layer in self._layers for inputs in layer for part in inputs.parts]
        if not chosen:
            raise UnsupportedModel(
                f"{folder} has no linear layer that {settings.rounding} can hold: it needs {self._format.needs}"
            )
        quantised = {stem for stem, _ in chosen}
        kept = [stem for stem in stems if stem not in quantised]
        if kept:
            logger.info("left as they are layers=%d: %s needs %s", len(kept), settings.rounding, self._format.needs)
        self.report = Report(len(quantised), kept)
        self.quantization_config: dict[str, Any] = self._format.config(sorted(quantised), kept, spec.names.head)
        self._plain = [name for name in self._source.names if name.removesuffix(".weight") not in quantised]
        self.plan: Shapes = {name: self._source.shape(name) for name in self._plain}
        self._num_weights = 0
        for layer in self._layers:
            for inputs in layer:
                self._num_weights += inputs.num_outputs * inputs.num_inputs
                for stem, num_outputs in inputs.parts:
                    self.plan |= self._format.shapes(stem, num_outputs, inputs.num_inputs)

    @property
    def side_files(self) -> dict[str, Mapping[str, Any]]:
        """Further files by name."""
        return side_files(self.quantization_config)

    def _can_hold(self, inputs: Inputs) -> bool:
        """Layers that share an input are quantised together or not at all: others join them into one matmul."""
        return all(self._format.can_hold(num_outputs, inputs.num_inputs) for _, num_outputs in inputs.parts)

    def run(self, writer: SafetensorsWriter, samples: list[list[int]]) -> None:
        """Write every tensor of the plan."""
        progress = Progress("quantising", self._num_weights * torch.float32.itemsize)
        for name in self._plain:
            writer.write(name, self._source.read(name))
        rounded = self._calibrated(samples) if samples else self._rounded()
        for inputs, codes in rounded:
            outputs = 0
            for stem, num_outputs in inputs.parts:
                part = codes.rows(outputs, outputs + num_outputs)
                for name, tensor in self._format.tensors(stem, part).items():
                    writer.write(name, tensor)
                outputs += num_outputs
            progress.advance(codes.codes.numel() * torch.float32.itemsize)
        progress.finish()

    def _rounded(self) -> Iterator[tuple[Inputs, Codes]]:
        """Every layer, each weight to the nearest level."""
        round_one = round_int8 if self.settings.rounding == "int8" else round_q4
        for layer in self._layers:
            for inputs in layer:
                yield inputs, round_one(self._read(inputs), self._format.scale_dtype).to(torch.device("cpu"))

    def _calibrated(self, samples: list[list[int]]) -> Iterator[tuple[Inputs, Codes]]:
        """Every layer by GPTQ, each calibrated on what the layers before it, quantised, let through."""
        walk = Walk(self.spec, self.weights, samples)
        self.report.num_tokens = walk.num_tokens
        for index, chosen in enumerate(self._layers):
            layer = walk.load(index)
            for inputs in chosen:
                hessian, weight = walk.hessian(layer, inputs), self._read(inputs)
                codes = quantize_gptq(
                    weight,
                    hessian,
                    group_size=self.settings.groupsize,
                    percdamp=self.settings.percdamp,
                    act_order=self.settings.act_order,
                    symmetric=self.settings.symmetric,
                )
                restored = codes.dequantize(torch.float32)
                self._note(inputs, weight, restored, hessian)
                linear = inputs.linear(layer)
                linear.matmul = Matmul(restored, linear.matmul.bias)
                yield inputs, codes.to(torch.device("cpu"))
            walk.advance(layer)

    def _read(self, inputs: Inputs) -> torch.Tensor:
        """Weights [outputs of all parts, inputs] in float32."""
        is_transposed = self.spec.names.is_transposed
        parts = [
            self.weights.read_linear(stem, num_outputs, inputs.num_inputs, is_transposed=is_transposed)
            for stem, num_outputs in inputs.parts
        ]
        weight = torch.cat(parts)
        if not torch.isfinite(weight).all():
            raise WeightsError(f"{inputs.parts[0][0]} has weights that are not finite")
        return weight

    def _note(self, inputs: Inputs, weight: torch.Tensor, restored: torch.Tensor, hessian: torch.Tensor) -> None:
        size = inputs.num_inputs if self.settings.groupsize == -1 else self.settings.groupsize
        rounded = full_range(weight, size, symmetric=self.settings.symmetric).round(weight).dequantize(torch.float32)
        quality = Quality(output_error(weight, restored, hessian), output_error(weight, rounded, hessian))
        name = inputs.parts[0][0]
        self.report.qualities[name] = quality
        logger.debug("quantised layer=%s error=%.4f rounded_error=%.4f", name, quality.error, quality.rounded)


class CheckpointSource:
    """The tensors of the checkpoint's files as they are, sparse ones dense."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, TensorFile] = {}
        for path in weight_files(folder):
            file, names = open_file(path)
            self._files |= dict.fromkeys(names, file)
        self._files = dense_files(self._files)
        self.names = list(self._files)

    def shape(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of a tensor."""
        if name not in self._files:
            raise WeightsError(f"the checkpoint lacks tensor {name}")
        part = self._files[name].get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise UnsupportedModel(f"tensor {name} is of type {part.get_dtype()}, which cannot be copied")
        return DTYPES[part.get_dtype()], tuple(part.get_shape())

    def float_type(self, name: str) -> torch.dtype:
        """Type for the scales of this tensor: its own, where others compute in it."""
        dtype = self.shape(name)[0]
        return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self._files[name].get_tensor(name)


def without_sparsity(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a checkpoint that is not quantised, less the description of sparse tensors, then dense."""
    keys = ("quantization_config", "compression_config")
    sparse = [
        key for key in keys if isinstance(config.get(key), dict) and config[key].get("quant_method") == COMPRESSED
    ]
    return {key: value for key, value in config.items() if key not in sparse}
