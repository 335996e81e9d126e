"""Write a model with its matrices as blocks: the format of each, what the configuration says, and the tensors."""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.checkpoint.block_storage import OUTLIER_PARTS
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.files.progress import Progress
from funitel.model_server.quantized.block_formats import BlockFormat, BlockRules
from funitel.model_server.quantized.config import BLOCKS
from funitel.model_server.quantized.outliers import has_outliers, num_outliers, split
from funitel.model_server.settings import QuantizeSettings
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.tools.quantize.folder import SafetensorsWriter
from funitel.model_server.tools.quantize.formats import Shapes
from funitel.model_server.tools.quantize.job import CheckpointSource, QuantizeJob, Report
from funitel.proto.errors import SettingsError, UnsupportedModel, WeightsError

logger = logging.getLogger(__name__)


class BlockJob:
    """One model written as blocks: which tensors the output will have, and the work of filling them.

    Raises:
        SettingsError: a format that is asked for is not known, no matrix has a name that a pattern is part of, or there
            are to be outliers and every matrix has 8 bits.
        UnsupportedModel: no matrix can be blocks.
    """

    def __init__(self, settings: QuantizeSettings, folder: Path, spec: ModelSpec, prefix: str) -> None:
        assert settings.to is not None
        self._is_inferflow = settings.inferflow_levels
        self._is_transposed = spec.names.is_transposed
        self._source = CheckpointSource(folder)
        rules = BlockRules.parse(settings.to, settings.tensor)
        tables = {prefix + spec.names.embedding, spec.names.head}
        left = [_pattern(prefix + name) for name in (spec.names.positions, spec.names.router) if name]
        self._formats: dict[str, BlockFormat] = {}
        kept: list[str] = []
        for name in self._source.names:
            stem = name.removesuffix(".weight")
            shape = self._source.shape(name)[1]
            if stem == name or len(shape) != 2 or any(pattern.fullmatch(stem) for pattern in left):
                continue
            found = rules.of(stem, self._inputs_of(stem, shape, tables), is_table=stem in tables)
            if found is None:
                kept.append(stem)
            else:
                self._formats[stem] = found
        if not self._formats:
            raise UnsupportedModel(f"{folder} has no matrix with whole blocks of {rules.usual.num_inputs} inputs")
        rules.check_used([*self._formats, *kept])
        self._tables, self._outliers = tables, settings.outliers
        self.report = Report(len(self._formats), kept)
        others = {stem: each.name for stem, each in self._formats.items() if each.name != rules.usual.name}
        self.quantization_config: dict[str, Any] = {
            "quant_method": BLOCKS,
            "format": rules.usual.name,
            "tensors": others,
        }
        self.plan: Shapes = {}
        for name in self._source.names:
            self.plan |= self._planned(name)
        if self._outliers and not any(name.endswith(OUTLIER_PARTS[0]) for name in self.plan):
            raise SettingsError(f"--outliers {self._outliers}: no matrix of under 8 bits has so many weights")

    @property
    def side_files(self) -> dict[str, Mapping[str, Any]]:
        """Further files by name: none."""
        return {}

    def run(self, writer: SafetensorsWriter, samples: list[list[int]]) -> None:
        """Write every tensor of the plan; blocks need no samples."""
        progress = Progress("quantising", sum(self._num_weights(name) for name in self._source.names) * 4)
        for name in self._source.names:
            stem = name.removesuffix(".weight")
            chosen = self._formats.get(stem) if stem != name else None
            tensor = self._source.read(name)
            if chosen is None:
                writer.write(name, tensor)
                continue
            if not torch.isfinite(tensor).all():
                raise WeightsError(f"{stem} has weights that are not finite")
            weights = tensor if stem in self._tables or not self._is_transposed else tensor.t()
            for each in self._tensors(stem, weights, chosen).items():
                writer.write(*each)
            progress.advance(self._num_weights(name) * 4)
        progress.finish()

    def _tensors(self, stem: str, weights: torch.Tensor, chosen: BlockFormat) -> dict[str, torch.Tensor]:
        """The tensors of a matrix, in the order of the plan."""
        count, found = self._num_outliers(weights.shape, chosen), None
        if count:
            blocks, found = split(weights, chosen, count, is_inferflow=self._is_inferflow)
        else:
            blocks = chosen.encode(weights, is_inferflow=self._is_inferflow)
        tensors = {
            f"{stem}.weight_blocks": blocks,
            f"{stem}.weight_inputs": torch.tensor([weights.shape[1]], dtype=torch.int32),
        }
        if found is not None:
            parts = found.starts.to(torch.int32), found.columns, found.deltas
            tensors |= {f"{stem}.{part}": tensor for part, tensor in zip(OUTLIER_PARTS, parts, strict=True)}
        return tensors

    def _num_outliers(self, shape: Sequence[int], chosen: BlockFormat) -> int:
        num_outputs, num_inputs = shape
        return num_outliers(self._outliers, num_outputs, num_inputs) if has_outliers(chosen, num_inputs) else 0

    def _inputs_of(self, stem: str, shape: tuple[int, ...], tables: set[str]) -> int:
        return shape[0] if self._is_transposed and stem not in tables else shape[1]

    def _planned(self, name: str) -> Shapes:
        dtype, shape = self._source.shape(name)
        stem = name.removesuffix(".weight")
        chosen = self._formats.get(stem) if stem != name else None
        if chosen is None:
            return {name: (dtype, shape)}
        num_inputs = self._inputs_of(stem, shape, self._tables)
        num_outputs = shape[0] * shape[1] // num_inputs
        planned: Shapes = {
            f"{stem}.weight_blocks": (torch.uint8, (num_outputs, chosen.row_bytes(num_inputs))),
            f"{stem}.weight_inputs": (torch.int32, (1,)),
        }
        count = self._num_outliers((num_outputs, num_inputs), chosen)
        if count:
            types, sizes = (torch.int32, torch.uint16, torch.float16), (num_outputs + 1, count, count)
            each = zip(OUTLIER_PARTS, types, sizes, strict=True)
            planned |= {f"{stem}.{part}": (dtype, (size,)) for part, dtype, size in each}
        return planned

    def _num_weights(self, name: str) -> int:
        shape = self._source.shape(name)[1]
        return shape[0] * shape[1] if name.removesuffix(".weight") in self._formats else 0


def make_job(settings: QuantizeSettings, folder: Path, spec: ModelSpec, weights: Weights) -> BlockJob | QuantizeJob:
    """The job that settings ask for. Raises: `StartupError`."""
    if settings.to is not None:
        return BlockJob(settings, folder, spec, weights.prefix)
    return QuantizeJob(settings, folder, spec, weights)


def _pattern(template: str) -> re.Pattern[str]:
    """Matches the names that a template of a layer stands for; alternatives are parted by bars."""
    alternatives = [re.escape(each).replace(r"\{i\}", r"\d+") for each in template.split("|")]
    return re.compile("|".join(alternatives))
