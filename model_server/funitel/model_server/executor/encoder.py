"""One call: texts as tokens in, numbers out; runs on the compute thread. Keeps nothing between calls."""

import time
from collections.abc import Sequence

import torch

from funitel.model_server.device.parked_tensors import SleepState
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.models.encoder.heads import ClassifierHead, EmbeddingHead, FillHead
from funitel.model_server.models.encoder.model import Encoder
from funitel.model_server.models.encoder.packed import Packed, pack
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import EncoderInput, EncoderResult, EncoderTask


class EncoderExecutor:
    """An encoder with the heads its checkpoint has."""

    def __init__(
        self,
        encoder: Encoder,
        embedding: EmbeddingHead,
        classifier: ClassifierHead | None,
        filler: FillHead | None,
        device: torch.device,
    ) -> None:
        self.parallel = TensorParallel()
        self._encoder = encoder
        self._embedding = embedding
        self._classifier = classifier
        self._filler = filler
        self._device = device
        self.sleep_state = SleepState(device)

    @property
    def tasks(self) -> frozenset[EncoderTask]:
        """What can be asked for."""
        heads = {
            EncoderTask.EMBED: self._embedding if self._classifier is None else None,
            EncoderTask.CLASSIFY: self._classifier,
            EncoderTask.FILL: self._filler,
        }
        heads[EncoderTask.EMBED_ALL] = heads[EncoderTask.EMBED]
        return frozenset(task for task, head in heads.items() if head is not None)

    @torch.inference_mode()
    def encode(self, task: EncoderTask, inputs: Sequence[EncoderInput]) -> EncoderResult:
        """Compute one batch; rows of the result are in the order of `inputs`, and of their tokens.

        Raises:
            InvalidRequest: a text is empty or too long, names a token that is not there, or the task is none of this
                model's.
            WrongState: the shard sleeps.
        """
        self.sleep_state.check_awake()
        began = time.perf_counter_ns()
        if task not in self.tasks:
            raise InvalidRequest(f"this model does not {task.name.lower()}")
        self._check(inputs)
        packed = pack(inputs, self._device)
        hidden = self._encoder(packed)
        ids: tuple[int, ...] = ()
        lengths = torch.ones_like(packed.lengths)  # rows of each input
        if task is EncoderTask.EMBED:
            values = _shaped(self._embedding(hidden, packed)[packed.order], inputs)
        elif task is EncoderTask.CLASSIFY:
            assert self._classifier is not None
            values = self._classifier(hidden, packed)[packed.order]
        elif task is EncoderTask.EMBED_ALL:
            lengths = packed.lengths[packed.order]
            values = hidden[_token_rows(packed)].float()
        else:
            values, found = self._fill(hidden, packed, inputs)
            ids = tuple(found.flatten().tolist())
        values = values.cpu()
        owners = torch.arange(len(inputs)).repeat_interleave(lengths.cpu())
        broken = sorted(set(owners[~values.isfinite().all(1)].tolist()))
        data = values.contiguous().numpy().tobytes()
        return EncoderResult(values.shape[1], data, ids, tuple(broken), time.perf_counter_ns() - began)

    def sleep(self, level: int) -> int:
        """Move the weights of a GPU to the host's memory; returns the bytes that are free. There is no pool.

        Raises:
            InvalidRequest: there is no such level.
            ResourceExhausted: the host has no memory for the weights; nothing has changed.
        """
        self.sleep_state.check_level(level)
        return self.sleep_state.sleep(self)

    def wake(self) -> None:
        """Put the weights back where they were. Raises ResourceExhausted: see `SleepState.wake`."""
        self.sleep_state.wake()

    def _fill(
        self, hidden: torch.Tensor, packed: Packed, inputs: Sequence[EncoderInput]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._filler is not None
        masks = torch.tensor([text.mask_place for text in inputs], device=self._device)
        count = min(max(text.top_n for text in inputs), self._encoder.spec.vocab_size)
        return self._filler(hidden, packed.starts[packed.order] + masks, count)

    def _check(self, inputs: Sequence[EncoderInput]) -> None:
        spec = self._encoder.spec
        if not inputs:
            raise InvalidRequest("a batch must hold one text or more")
        for text in inputs:
            count = len(text.input_ids)
            if not 1 <= count <= spec.max_tokens:
                raise InvalidRequest(f"a text must have 1..{spec.max_tokens} tokens, given {count}")
            if max(text.input_ids) >= spec.vocab_size:
                raise InvalidRequest(f"token ids must be < {spec.vocab_size}, given {max(text.input_ids)}")
            if len(text.type_ids) not in (0, count) or not 0 <= text.mask_place < count:
                raise InvalidRequest("type ids and the place of the mask must be those of the text's tokens")


def _token_rows(packed: Packed) -> torch.Tensor:
    """The row of every token in the packed batch, in the order of the inputs: [num_tokens]."""
    lengths = packed.lengths[packed.order]
    shifts = packed.starts[packed.order] - (lengths.cumsum(0) - lengths)  # from a place there to one here
    return shifts.repeat_interleave(lengths) + torch.arange(int(lengths.sum()), device=lengths.device)


def _shaped(values: torch.Tensor, inputs: Sequence[EncoderInput]) -> torch.Tensor:
    """Cut each vector to the dimensions wanted, which leaves zeros behind them, and make it one long where wanted."""
    wanted = torch.tensor([text.dimensions or values.shape[1] for text in inputs], device=values.device)
    if int(wanted.min()) < values.shape[1]:
        values = values * (torch.arange(values.shape[1], device=values.device) < wanted[:, None])
    is_unit = torch.tensor([text.is_normalized for text in inputs], device=values.device)
    return torch.where(is_unit[:, None], torch.nn.functional.normalize(values, dim=1), values)
