"""Blocks copied to blocks: a sequence that goes on from another's partly filled block, beside it and after it."""

from pathlib import Path

import pytest
import torch

from funitel.model_server.executor.executor import Executor
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import BlockCopy, Capability
from funitel_testing.executors import (
    BLOCK_SIZE,
    ids_of,
    load_executor,
    num_sequences,
    prefill,
    run_alone,
    run_out,
    start,
)
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_seq2seq import save_tiny_seq2seq

PROMPT = list(range(40, 58))  # four blocks and a half
NUM_FULL, COUNT = 4, 8


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_executor(save_tiny("llama", tmp_path_factory.mktemp("tiny")))


def fork(source: int, target: int) -> BlockCopy:
    return BlockCopy(source, 0, is_load=False, to_block=target)


def test_a_fork_goes_on_from_a_copy_of_the_last_block(executor: Executor) -> None:
    others = [[7, 9], [11]]
    expected = [ids_of(run_alone(executor, start(1, [*PROMPT, *more], COUNT))) for more in others]
    first = start(2, PROMPT, 2)
    own = first.blocks
    found: dict[int, list[object]] = {}
    result = prefill(executor, 1, [first])
    into = (300, 301, 302, 303)
    forks = [
        start(3, [*PROMPT, *others[0]], COUNT, blocks=own[: NUM_FULL + 3], cache_len=len(PROMPT)),
        start(4, [*PROMPT, *others[1]], COUNT, blocks=(*own[:NUM_FULL], *into), cache_len=len(PROMPT)),
    ]
    assert result.batch is not None
    executor.clear(result.batch.id)
    result = executor.compute_prefill(2, forks, copies=[fork(own[NUM_FULL], into[0])]).describe()
    assert result.num_forward_tokens == 3
    run_out(executor, result, found)  # type: ignore[arg-type]
    assert [ids_of(found[i]) for i in (3, 4)] == expected  # type: ignore[arg-type]
    assert num_sequences(executor) == 0


def test_all_layers_of_a_block_are_copied(executor: Executor) -> None:
    pool = executor.runner.pool.pool
    pool[400] = torch.arange(pool.shape[1], dtype=pool.dtype)
    executor.compute_prefill(1, [start(11, PROMPT)], copies=[fork(400, 401), fork(401, 402)]).describe()
    assert torch.equal(pool[402], pool[400])
    executor.clear()


@pytest.mark.parametrize("copy", [fork(0, 5), fork(5, 0), fork(501, 5), fork(5, 501), fork(5, 5)])
def test_bad_copies_are_refused_and_change_nothing(executor: Executor, copy: BlockCopy) -> None:
    says = f"block {copy.block} cannot be copied to block {copy.to_block}: they must be two of the blocks 1..500"
    before = executor.runner.pool.pool[7].clone()
    with pytest.raises(InvalidRequest, match=says):
        executor.compute_prefill(1, [start(1, PROMPT)], copies=[fork(6, 7), copy])
    assert num_sequences(executor) == 0
    assert torch.equal(executor.runner.pool.pool[7], before)


def test_shards_say_whether_blocks_can_be_forked(tmp_path: Path) -> None:
    def capabilities(folder: Path, **settings: object) -> frozenset[str]:
        chosen: dict[str, object] = {"device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "num_threads": 1}
        _, info = load_generator(ModelServerSettings(model_id=str(folder), **(chosen | settings)), folder)  # type: ignore[arg-type]
        assert info.eos_token_ids
        return info.capabilities

    assert Capability.BLOCK_FORKS in capabilities(save_tiny("llama", tmp_path / "llama"))
    seq2seq = tmp_path / "seq2seq"
    save_tiny_seq2seq("t5", seq2seq)
    assert Capability.BLOCK_FORKS not in capabilities(seq2seq)
