"""Tensors of a device in the host's memory and back; a CPU stands for the device, and on a GPU the same."""

from functools import partial

import numpy as np
import pytest
import torch

from funitel.model_server.device import parked_tensors
from funitel.model_server.device.host_memory import AvailableMemory
from funitel.model_server.device.parked_tensors import ParkedTensors, SleepState, tensors_of
from funitel.proto.errors import InvalidRequest, ResourceExhausted, WrongState

CPU = torch.device("cpu")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [pytest.param(CPU), pytest.param(torch.device("cuda", 0), marks=CUDA)]


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class Model:
    """Weights wherever models have them: attributes, slots, containers, closures, arguments of partials."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        self.own = numbers(5, 3)
        self.view = self.own[1:, :2]
        self.parts = {"a": [Slotted(numbers(7).to(torch.bfloat16))]}
        kept = numbers(4)
        self.closure = lambda: kept
        self.partial = partial(torch.add, numbers(2))
        self.module = torch.nn.Linear(3, 2).to(device)
        self.elsewhere = torch.empty(3, device="meta")

    def state(self) -> list[torch.Tensor]:
        tensors = [self.own, self.view, self.parts["a"][0].weight, self.closure(), self.partial.args[0]]
        return [*tensors, self.module.weight.detach(), *([self.module.bias.detach()])]


@pytest.mark.parametrize("device", DEVICES)
def test_every_tensor_of_an_object_is_found_parked_and_restored(device: torch.device) -> None:
    model = Model(device)
    before = [tensor.clone() for tensor in model.state()]
    found = tensors_of(model, device)
    storages = {tensor.untyped_storage().data_ptr() for tensor in model.state()}
    assert {tensor.untyped_storage().data_ptr() for tensor in found} == storages
    assert len(storages) == 6  # a view has the storage of the whole

    parked = ParkedTensors(found, device)
    assert [tensor.untyped_storage().nbytes() for tensor in model.state()] == [0] * 7
    assert parked.num_bytes == 15 * 4 + 7 * 2 + 4 * 4 + 2 * 4 + 6 * 4 + 2 * 4

    parked.restore()
    for tensor, expected in zip(model.state(), before, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    model.own[1, 0] = 77.0
    assert model.view[0, 0] == 77.0  # a view still


def test_tensors_that_cannot_be_emptied_are_left_alone() -> None:
    foreign = torch.from_numpy(np.ones(4, dtype=np.float32))
    assert tensors_of([foreign, torch.ones(1)], CPU) == [torch.ones(1)]
    assert tensors_of([foreign], torch.device("meta")) == []


def test_a_host_without_memory_for_the_weights_leaves_them_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.arange(1000.0)
    monkeypatch.setattr(parked_tensors, "available_memory", lambda: AvailableMemory(3999, "memory.max"))
    with pytest.raises(ResourceExhausted, match=r"^the weights need 4096 bytes of the host to sleep, more than the .*"):
        ParkedTensors([weight], CPU)
    assert weight.sum() == 499500


def test_a_device_without_memory_to_wake_up_sleeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.arange(1000.0), torch.arange(1000.0)]
    parked = ParkedTensors(weights, CPU)
    failing = weights[1].untyped_storage()
    resize = torch.UntypedStorage.resize_

    def refuse(storage: torch.UntypedStorage, size: int) -> None:
        if size and storage.data_ptr() == failing.data_ptr() and storage._cdata == failing._cdata:
            raise torch.OutOfMemoryError("CUDA out of memory")
        resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", refuse)
        with pytest.raises(ResourceExhausted, match="^the weights need 8000 bytes of cpu, which has fewer"):
            parked.restore()
    assert [weight.untyped_storage().nbytes() for weight in weights] == [0, 0]
    parked.restore()
    assert [weight.sum() for weight in weights] == [499500, 499500]


def test_page_locked_memory_is_given_back_or_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a GPU, of which the calls are written down."""
    calls: list[str] = []

    def refuse(num_bytes: int, device: torch.device, flag: str) -> torch.Tensor:
        raise parked_tensors.NotEnoughMemory("Sleep: cudaErrorMemoryAllocation")

    monkeypatch.setattr(parked_tensors, "give_back", lambda memory, device: calls.append(f"unlock {memory.numel()}"))
    weight = torch.ones(64)
    parked = ParkedTensors([weight], CPU)
    parked._is_locked = True
    parked.restore()
    assert calls == ["unlock 256"]
    monkeypatch.setattr(parked_tensors, "page_locked", refuse)
    ParkedTensors([weight], CPU).restore()
    assert (calls, weight.sum()) == (["unlock 256"], 64)


def test_the_state_of_a_shard_says_what_may_be_done() -> None:
    state = SleepState(CPU)
    state.check_awake()
    state.wake()  # nothing happens
    state.check_level(1)
    for level in (0, 2):
        with pytest.raises(InvalidRequest, match=f"^level must be 1, given {level}: weights stay in the h"):
            state.check_level(level)
    held = [np.ones(64 << 20, dtype=np.uint8)]
    assert state.sleep(None, held.clear) == pytest.approx(64 << 20, rel=0.1)
    assert state.sleep(None) == 0
    with pytest.raises(WrongState, match=r"^the shard sleeps: Wake comes first, then Warmup$"):
        state.check_awake()
    state.wake()
    state.check_awake()
