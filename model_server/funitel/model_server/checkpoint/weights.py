"""Read the weights of a checkpoint by name, sliced per rank; refuse missing, unexpected and misshapen tensors.

Reads safetensors, GGUF and PyTorch's own files, memory-mapped: no rank reads another rank's slices, and no more than
one tensor is on its way at a time. Quantised layers come out in floating point, sparse ones dense. `decoder` asks for
every tensor it needs and then calls `finish`, which refuses tensors that were not asked for.
"""

import logging
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from funitel.model_server.checkpoint.block_storage import BlockSource, RoundedStorage, blocks_between
from funitel.model_server.checkpoint.float_storages import open_float8_stack
from funitel.model_server.checkpoint.gguf_file import GgufTensorFile
from funitel.model_server.checkpoint.mxfp4 import Mxfp4Storage
from funitel.model_server.checkpoint.open_storages import TGI_TENSORS, gptq_tensors, open_storages
from funitel.model_server.checkpoint.quantized_storage import QuantizedStorage
from funitel.model_server.checkpoint.sparse_tensor import dense_files
from funitel.model_server.checkpoint.storage import (
    PlainStorage,
    Range,
    RenamedTensor,
    StackedStorage,
    Storage,
    TensorFile,
    open_file,
    part_shape,
)
from funitel.model_server.files.integrity import weight_files
from funitel.model_server.files.progress import Progress
from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.quantized.block_formats import BlockRules, format_of
from funitel.model_server.quantized.block_types import BlockType
from funitel.model_server.quantized.config import BLOCKS, Quantization
from funitel.model_server.quantized.matmul import QuantizedMatmul, rounded
from funitel.model_server.quantized.published import find_quantization
from funitel.model_server.spec.tensor_names import TensorNames
from funitel.proto.errors import SettingsError, WeightsError

logger = logging.getLogger(__name__)


def has_nan(values: torch.Tensor) -> bool:
    """Whether some values are not numbers; of types of one byte and of tensors without values never."""
    if not values.is_floating_point() or values.itemsize == 1 or values.is_meta or not values.numel():
        return False
    return bool(torch.stack(torch.aminmax(values)).isnan().any())


KV_SCALE = re.compile(r"\.(q|k|v|kv|prob)_scale$")
_PLACE = re.compile(r"(.+)\[(\d{1,9})\]\.(weight|bias)")  # of a matrix or a vector in a stack


_OF_TEXT = re.compile(
    r"(language_model\.)(?=lm_head\.)|(language_model\.model|model\.language_model|model\.text_model)\."
)


def name_of_text(name: str) -> str:
    """What a tensor of the text model is called without the model for images too that holds it."""
    found = _OF_TEXT.match(name)
    return name if found is None else ("" if found[1] else "model.") + name[found.end() :]


class Weights:
    """The tensors of one checkpoint folder, cast to `dtype` on `device` as they are read.

    Names are those of the causal-LM model; a checkpoint saved from the bare model, without `prefix`, is understood, and
    one of a model for images too, with the text model behind `language_model` or `text_model`.

    `held_bytes` counts what this rank holds, `sharded_bytes` the part of it that is split between ranks, and
    `total_sharded_bytes` the same tensors unsplit. A caller that takes GGUF blocks of some types sets
    `takes_blocks` before anything is read; `products` is what multiplies by quantised matrices as they are;
    `scales_kv` says that the pool is float8, so that the scales of keys and values count. `quantization` is None for a
    checkpoint that is not quantised, `block_format` the usual format of blocks that are no GGUF's. Progress goes to
    stderr where `is_shown`.

    Raises:
        StartupError: no weights, a file that is not whole, or quantised in a way that cannot be read.
    """

    _blocks: GgufTensorFile | None = None
    _has_noted = False  # that outliers have no kernels

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, prefix: str = "", *, is_shown: bool = True
    ) -> None:
        self.dtype = dtype
        self.takes_blocks: Callable[[BlockType], bool] = lambda kind: False
        self.products: QuantizedMatmul | None = None
        self.scales_kv = False
        self.device = device
        self.held_bytes = 0
        self.sharded_bytes = 0
        self.total_sharded_bytes = 0
        self._files: dict[str, TensorFile] = {}
        self._used: set[str] = set()
        self.unexpected: list[str] = []  # tensors that were not asked for, known when finished
        for path in weight_files(folder):
            self._open(path)
        self._files = dense_files(self._files)
        self.prefix = self._prefix_here(prefix)
        self._blocks = next((file for file in self._files.values() if isinstance(file, GgufTensorFile)), None)
        self.quantization = find_quantization(folder) or gptq_tensors(self._files)
        self._storages = open_storages(self._files, self.quantization)
        has_own = self.quantization is not None and self.quantization.method == BLOCKS
        self.block_format = self.quantization.format_of("") if self.quantization is not None and has_own else None
        self._is_shown = is_shown
        self._progress: Progress | None = None

    def _prefix_here(self, prefix: str) -> str:
        """The prefix, less its leading parts where no tensor has them."""
        while prefix and not any(name.startswith(prefix) for name in self._files):
            prefix = prefix.partition(".")[2]
        return prefix

    def _open(self, path: Path) -> None:
        file, names = open_file(path)
        for name in names:
            known = name_of_text(name)
            if known in self._files:
                raise WeightsError(f"tensor {name} is in two files of {path.parent}")
            self._files[known] = file if known == name else RenamedTensor(file, name)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name, with prefix."""
        return name in self._storages or self._stack_of(name) is not None or self._mxfp4_of(name) is not None

    def has_linear(self, stem: str) -> bool:
        """Whether the checkpoint holds a linear layer of this name, with prefix."""
        return self.has(f"{stem}.weight")

    def named(self, template: str, **places: int) -> str:
        """The name, with prefix, that a template of `TensorNames` has here: of alternatives the first that is there."""
        names = [self.prefix + each.format(**places) for each in template.split("|")]
        return next((name for name in names if self.has(name) or self.has_linear(name)), names[0])

    def read(
        self,
        name: str,
        shape: Sequence[int],
        *,
        rows: Range | None = None,
        columns: Range | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Read a tensor of the checkpoint, or the range of its rows or columns that is this rank's share.

        Args:
            name: name in the checkpoint, with prefix.
            shape: shape the whole tensor must have.
            rows: range of dimension 0; given (or `columns`), the tensor counts as split between ranks.
            columns: range of dimension 1.
            dtype: precision to read it in, where that is not the one of these weights.

        Raises:
            WeightsError: the tensor is missing, has another shape, or holds values that are not numbers.
        """
        storage = self._shaped(name, shape)
        is_sharded = rows is not None or columns is not None
        self._count_whole(storage, storage.num_elements * (dtype or self.dtype).itemsize, is_sharded)
        kept = storage.read(rows, columns, dtype or self.dtype, self.device)
        self._check_numbers(name, kept)
        self._count_held(kept.numel() * kept.element_size(), is_sharded)
        return kept

    def read_linear(
        self,
        stem: str,
        num_outputs: int,
        num_inputs: int,
        *,
        rows: Range | None = None,
        columns: Range | None = None,
        is_transposed: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Read the weights [outputs, inputs] of a linear layer, or a range of its outputs or inputs only.

        `is_transposed` says that the family stores them [inputs, outputs]; quantised ones never lie that way, and some
        checkpoints have stacks of experts the other way round.
        """
        name = f"{stem}.weight"
        if is_transposed and not self._lies_by_outputs(name, (num_outputs, num_inputs)):
            return self.read(name, [num_inputs, num_outputs], rows=columns, columns=rows, dtype=dtype).t().contiguous()
        return self.read(name, [num_outputs, num_inputs], rows=rows, columns=columns, dtype=dtype)

    def _lies_by_outputs(self, name: str, shape: tuple[int, int]) -> bool:
        """Whether a linear layer is [outputs, inputs] whatever the family does; `shape` is that."""
        is_by_outputs = isinstance(self._storages.get(name), QuantizedStorage | RoundedStorage)
        if is_by_outputs or self._mxfp4_of(name) is not None:
            return True
        stacked = self._stack_of(name)
        if stacked is None:
            return False
        if shape[0] == shape[1]:
            return self._is_stacked_by_outputs_beside(stacked[0])
        return StackedStorage(self._files, *stacked).shape == shape

    def _is_stacked_by_outputs_beside(self, name: str) -> bool:
        """Whether gate and up beside a stack of square matrices, twice as many outputs as inputs, lie by outputs."""
        folder = name.rpartition(".")[0]
        beside = [each for each in self._files if each.rpartition(".")[0] == folder and each != name]
        shapes = [tuple(self._files[each].get_slice(each).get_shape()) for each in beside]
        return any(len(shape) == 3 and shape[1] == 2 * shape[2] for shape in shapes)

    def read_codes(
        self,
        stem: str,
        num_outputs: int,
        num_inputs: int,
        *,
        rows: Range | None = None,
        columns: Range | None = None,
        is_transposed: bool = False,
    ) -> Codes | None:
        """Read a linear layer, in place of `read_linear`, as the integers that `products` multiplies by.

        None where there are none of it: the checkpoint has it in floating point, and nothing is made of that.
        """
        name, is_sharded = f"{stem}.weight", rows is not None or columns is not None
        kept = self.kept(stem)
        if kept is None:
            return None
        num_bytes = kept.num_bytes(*part_shape((num_outputs, num_inputs), rows, columns))
        if self.is_quantised(stem):
            storage = self._shaped(name, (num_outputs, num_inputs))
            assert isinstance(storage, QuantizedStorage | RoundedStorage)
            codes = storage.read_codes(rows or (0, num_outputs), columns or (0, num_inputs)).to(self.device)
            self._check_numbers(name, codes.scales)
            self._count_whole(storage, kept.num_bytes(num_outputs, num_inputs), is_sharded)
            self._count_held(num_bytes, is_sharded)
            return codes
        counted = self.held_bytes, self.sharded_bytes, self.total_sharded_bytes
        weight = self.read_linear(
            stem, num_outputs, num_inputs, rows=rows, columns=columns, is_transposed=is_transposed
        )
        self.held_bytes, self.sharded_bytes, self.total_sharded_bytes = counted
        self.total_sharded_bytes += kept.num_bytes(num_outputs, num_inputs) if is_sharded else 0
        self._count_held(num_bytes, is_sharded)
        return rounded(weight, kept)

    def _check_numbers(self, name: str, values: torch.Tensor) -> None:
        if has_nan(values):
            damage = f"tensor {name} holds values that are not numbers: its file is damaged"
            raise WeightsError(damage if self._blocks is None else self._blocks.get_slice(name).damage)

    def is_quantised(self, stem: str) -> bool:
        """Whether the checkpoint has a linear layer quantised, or blocks are made of it."""
        return isinstance(self._storages.get(f"{stem}.weight"), QuantizedStorage | RoundedStorage)

    def kept(self, stem: str) -> Quantization | None:
        """How `products` have a linear layer; None where it is in floating point."""
        if self.products is None:
            return None
        storage = self._storages.get(f"{stem}.weight")
        if isinstance(storage, BlockSource):
            if storage.has_outliers:
                self._note_outliers()
                return None
            return storage.format.kept
        return self.quantization if isinstance(storage, QuantizedStorage) else self.products.made

    def read_kv_scales(self, stem: str) -> tuple[float, float]:
        """What the keys and values of an attention of this name are divided by in the pool; 1 where nothing is said.

        `stem` is the name of one of its projections, with prefix.
        """
        names = stem.rpartition(".")[0]
        return self._kv_scale(names, "k"), self._kv_scale(names, "v")

    def _kv_scale(self, stem: str, part: str) -> float:
        named = (f"{stem}.{part}_scale", f"{stem}.{part}_proj.{part}_scale", f"{stem}.kv_scale")
        name = next((each for each in named if each in self._files), None)
        if not self.scales_kv or name is None:
            return 1.0
        found = self._files[name].get_tensor(name).float()
        if found.numel() != 1 or not 0 < float(found) < math.inf:
            raise WeightsError(f"tensor {name} must be one number > 0, found {found.flatten()[:3].tolist()}")
        return float(found)

    @property
    def has_blocks(self) -> bool:
        """Whether there are matrices of blocks that can be read as they are."""
        if self._blocks is not None:
            return self._blocks.has_blocks
        return any(isinstance(storage, BlockSource) for storage in self._storages.values())

    def round_as(self, asked: str | None, others: str | None, names: TensorNames) -> None:
        """Make blocks of matrices in floating point where they are read as such, if a format of blocks is asked for.

        Args:
            asked: the value of --quantize.
            others: formats of some matrices, see `BlockRules.parse`.
            names: of the model's tensors.

        Raises:
            SettingsError: a format or a pattern makes no sense, or there are formats without blocks.
        """
        usual = None if asked is None or self.quantization is not None else format_of(asked)
        if usual is None:
            if others is not None:
                raise SettingsError(f"--quantize-tensors {others} is for --quantize with blocks, such as q4 or a16w8")
            return
        rules = BlockRules.parse(usual.name, others, flag="--quantize-tensors")
        self.block_format = usual.name
        rules.check_used([name.removesuffix(".weight") for name in self._storages])
        tables = {each for table in (names.embedding, names.head) for each in (table, self.prefix + table)}
        for name, storage in self._storages.items():
            stem = name.removesuffix(".weight")
            if type(storage) is not PlainStorage or len(storage.shape) != 2 or stem == name:
                continue
            if names.positions and stem == self.prefix + names.positions:
                continue
            is_transposed = names.is_transposed and stem not in tables
            chosen = rules.of(stem, storage.shape[0 if is_transposed else 1], is_table=stem in tables)
            if chosen is not None:
                self._storages[name] = RoundedStorage(self._files, name, chosen, is_transposed=is_transposed)

    def block_source(self, stem: str) -> BlockSource | None:
        """The blocks of a linear layer, and what is to be added to them; None where it has none but a GGUF's."""
        storage = self._storages.get(f"{stem}.weight")
        return storage if isinstance(storage, BlockSource) else None

    def num_outliers(self, stem: str, rows: Range | None = None, columns: Range | None = None) -> int:
        """How many outliers there are beside the blocks of a part of a layer."""
        source = self.block_source(stem)
        if source is None or not source.has_outliers:
            return 0
        found = source.outliers(rows or (0, source.shape[0]), columns or (0, source.shape[1]))
        return 0 if found is None else found.count

    @property
    def has_outliers(self) -> bool:
        """Whether there are matrices of blocks with outliers."""
        return any(isinstance(each, BlockSource) and each.has_outliers for each in self._storages.values())

    def _note_outliers(self) -> None:
        """Say once that no kernel here multiplies by blocks with outliers."""
        if not self._has_noted and self._is_shown:
            logger.warning("matrices of blocks with outliers become %s: the kernels have none for them", self.dtype)
        self._has_noted = True

    def block_type(self, stem: str, columns: Range | None = None) -> BlockType | None:
        """The type of a linear layer's blocks; None where it has none, or where `columns` would cut one."""
        storage = self._storages.get(f"{stem}.weight")
        if isinstance(storage, BlockSource):
            fitted = storage.format.fitted(storage.shape[1], *(columns or ()))
            return None if fitted is None else fitted.kind
        return None if self._blocks is None else self._blocks.type_of(f"{stem}.weight", columns)

    def read_blocks(
        self, stem: str, num_outputs: int, num_inputs: int, *, rows: Range | None = None, columns: Range | None = None
    ) -> torch.Tensor:
        """Read the blocks of a linear layer that has a `block_type`, in place of `read_linear`: [outputs, bytes].

        Views of the file where they lie there in this order. Raises: as `read`.
        """
        name = f"{stem}.weight"
        is_sharded = rows is not None or columns is not None
        storage = self._storages.get(name)
        if isinstance(storage, BlockSource):
            found = self._shaped(name, (num_outputs, num_inputs))
            self._count_whole(found, num_outputs * storage.format.row_bytes(num_inputs), is_sharded)
            return blocks_between(storage, rows or (0, num_outputs), columns or (0, num_inputs), num_inputs)
        assert self._blocks is not None
        self._count_whole(self._find(name), self._blocks.num_bytes(name), is_sharded)
        return self._blocks.read_blocks(name, (num_outputs, num_inputs), rows, columns)

    def _stack_of(self, name: str) -> tuple[str, int, int] | None:
        """The stack that holds a matrix, where in it, and its dimensions, of `stack[3].weight`, or of `stack[3].bias`.

        The stack of the latter is `stack.bias` or `stack_bias`.
        """
        place = _PLACE.fullmatch(name)
        if place is None:
            return None
        is_matrix = place[3] == "weight"
        names = (f"{place[1]}.weight", place[1]) if is_matrix else (f"{place[1]}.bias", f"{place[1]}_bias")
        stack = next((each for each in names if each in self._files), None)
        return None if stack is None else (stack, int(place[2]), 2 if is_matrix else 1)

    def _mxfp4_of(self, name: str) -> tuple[str, int] | None:
        """The stack of a matrix in MXFP4, and where in it, of `stack[3].weight`."""
        place = _PLACE.fullmatch(name)
        if place is None or place[3] != "weight" or f"{place[1]}_blocks" not in self._files:
            return None
        return place[1], int(place[2])

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise WeightsError where a tensor is missing or has another shape, as `read` would."""
        self._shaped(name, shape)

    def _shaped(self, name: str, shape: Sequence[int]) -> Storage:
        storage = self._find(name)
        if storage.shape != tuple(shape):
            raise WeightsError(
                f"tensor {name} has shape {list(storage.shape)}, expected {list(shape)} from config.json"
            )
        return storage

    def _find(self, name: str) -> Storage:
        if name in self._storages:
            return self._storages[name]
        stacked = self._stack_of(name)
        if stacked is not None:
            stack, place, num_dims = stacked
            floats = open_float8_stack(self._files, stack, place, self.quantization) if num_dims == 2 else None
            return floats or StackedStorage(self._files, stack, place, num_dims)
        packed = self._mxfp4_of(name)
        if packed is not None:
            return Mxfp4Storage(self._files, *packed)
        stem = name.removesuffix(".weight")
        if self.quantization is None and f"{stem}.qweight" in self._files:
            raise WeightsError(f"tensor {stem}.qweight is quantised, but no quantization_config says how")
        raise WeightsError(f"the checkpoint lacks tensor {name}")

    def count_copy(self, part: torch.Tensor, num_elements: int) -> None:
        """Note that a layer keeps a second copy of its part of a split tensor of `num_elements`."""
        self._count_held(part.numel() * part.element_size(), is_sharded=True)
        self.total_sharded_bytes += num_elements * self.dtype.itemsize

    def _count_held(self, num_bytes: int, is_sharded: bool) -> None:
        self.held_bytes += num_bytes
        self.sharded_bytes += num_bytes if is_sharded else 0

    def _count_whole(self, storage: Storage, num_bytes: int, is_sharded: bool) -> None:
        if self._progress is None and self._is_shown:
            self._progress = Progress("loading weights", sum(self._bytes_of(*item) for item in self._storages.items()))
        if self._used.issuperset(storage.names):
            return
        self._used.update(storage.names)
        self.total_sharded_bytes += num_bytes if is_sharded else 0
        if self._progress is not None:
            self._progress.advance(num_bytes)

    def _bytes_of(self, name: str, storage: Storage) -> int:
        """What is read of a tensor that is read whole."""
        if isinstance(storage, BlockSource) and self.takes_blocks(storage.format.kind):
            return storage.shape[0] * storage.format.row_bytes(storage.shape[1])
        kind = None if self._blocks is None else self._blocks.type_of(name)
        if self._blocks is not None and kind is not None and self.takes_blocks(kind):
            return self._blocks.num_bytes(name)
        return storage.num_elements * self.dtype.itemsize

    def finish(self, ignored: Sequence[str]) -> None:
        """Refuse tensors that were not asked for, except those matching a pattern of `ignored`, and close the files."""
        patterns = [re.compile(pattern) for pattern in ignored]
        patterns.append(KV_SCALE)
        extra = [n for n in self._files if n not in self._used and not any(p.search(n) for p in patterns)]
        self.unexpected = sorted(n for n in extra if n not in TGI_TENSORS and not self._is_empty_bias(n))
        if self._progress is not None:
            self._progress.finish()
        self._storages.clear()
        self._files.clear()
        if self.unexpected:
            some = ", ".join(self.unexpected[:3])
            raise WeightsError(f"the checkpoint holds {len(self.unexpected)} tensors the model does not know: {some}")

    def _is_empty_bias(self, name: str) -> bool:
        """Whether this is the bias of zeros that AutoGPTQ gives to quantised layers which have none."""
        stem, _, kind = name.rpartition(".")
        if kind != "bias" or not isinstance(self._storages.get(f"{stem}.weight"), QuantizedStorage):
            return False
        return not self._files[name].get_tensor(name).any()
