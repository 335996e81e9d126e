"""The smallest step there is, to tell a replica that computes nothing from a sequence that cannot be computed."""

import asyncio

from funitel.proto.errors import FunitelError
from funitel.proto.step import SamplingParams, SequenceStart, StoppingParams
from funitel.router.blocks import BlockAllocator
from funitel.router.chunking import StepLoad
from funitel.router.plan import StepPlan
from funitel.router.replica import Replica

PROBE_ID = 2**64 - 1  # of a sequence that no request has
PROBE_SECONDS = 30.0  # in which it is answered


async def is_sound(replica: Replica, blocks: BlockAllocator) -> bool:
    """Whether a replica that holds nothing computes a prompt of one token; it holds nothing afterwards."""
    num_tokens = 1 + replica.info.num_opening_tokens
    lent = blocks.allocate(blocks.blocks_for(num_tokens))
    start = SequenceStart(
        request_id=PROBE_ID,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=1, ignore_eos=True),
        input_ids=(0,),
        blocks=lent,
        chunk_len=num_tokens,
    )
    load = StepLoad()
    load.add_chunk(0, num_tokens)
    step = replica.send(StepPlan((start,), (), {PROBE_ID: num_tokens}, load))
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            replica.settle(step, await step.results)
            await replica.clear()
    except (FunitelError, TimeoutError):
        return False
    finally:
        blocks.free(lent)
    return True
