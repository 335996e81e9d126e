"""What ranks hold of an earlier router: the calls of outputs and of a takeover, to all ranks of one model copy."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import FunitelError
from funitel.proto.step import Capability, ShardInfo, WarmupResult
from funitel.proto.takeover import wire as takeover_wire
from funitel.proto.takeover.state import HeldBatch, NumberedCall, SequenceOutputs, TakeOverState
from funitel.router.shard_client.rank import ShardClient

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # for a rank to tell what it has begun, which it does beside the steps
TAKE_OVER_SECONDS = 60.0  # for the calls that were begun to be finished
OUTPUTS_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class TakenOver:
    """What ranks hold of an earlier router, the same on all of them; numbering goes on behind `last_step_seq`."""

    last_step_seq: int
    batches: tuple[HeldBatch, ...]
    warmups: tuple[WarmupResult, ...]  # of the ranks, in their order


def can_be_asked(infos: Sequence[ShardInfo]) -> bool:
    """Whether ranks tell what they hold of an earlier router."""
    return all(Capability.TAKE_OVER in info.capabilities for info in infos)


def takes_over(infos: Sequence[ShardInfo]) -> bool:
    """Whether a router can go on with the rows of these ranks.

    Not where the shards hold what only the earlier router knew of, features of media or states of recurrent layers; nor
    where several micro-batches take turns.
    """
    return can_be_asked(infos) and all(
        Capability.STATE_SLOTS not in info.capabilities and info.media is None and info.num_stages <= 1
        for info in infos
    )


async def outputs_of(clients: Sequence[ShardClient], vocab_size: int) -> list[SequenceOutputs]:
    """All outputs that ranks have kept, each its share; raises FunitelError."""
    calls = (client.call("Outputs", b"", pb.OutputsResponse.FromString, OUTPUTS_SECONDS) for client in clients)
    responses = await asyncio.gather(*calls)

    def decode() -> list[SequenceOutputs]:
        return [each for response in responses for each in takeover_wire.decode_outputs(response, vocab_size)]

    return await asyncio.to_thread(decode)


async def release_outputs(clients: Sequence[ShardClient], keys: Sequence[str]) -> None:
    """Let ranks forget outputs; raises FunitelError unless all of them have."""
    payload = takeover_wire.encode_release(keys).SerializeToString()
    parse = pb.ReleaseOutputsResponse.FromString
    await asyncio.gather(*(client.call("ReleaseOutputs", payload, parse, OUTPUTS_SECONDS) for client in clients))


async def take_over(clients: Sequence[ShardClient], warmup: pb.WarmupRequest) -> TakenOver | None:
    """Take ranks over as they are, with the rows that they hold; None if that cannot be: ClearCache comes next.

    A call that some ranks have begun and others have not got is sent to these: no rank waits for another one then.
    """
    try:
        looks = await _call(clients, [takeover_wire.encode_take_over(warmup, only_looks=True)] * len(clients))
        calls = [takeover_wire.encode_take_over(warmup, each) for each in missing_calls(looks)]
        return _agreed(await _call(clients, calls))
    except _Refused as refusal:
        reason = str(refusal)
    except FunitelError as error:
        reason = error.message
    logger.info("rows of an earlier router are not taken over: %s", reason)
    return None


class _Refused(Exception):
    """Ranks cannot be taken over as they are."""


async def _call(clients: Sequence[ShardClient], requests: Sequence[pb.TakeOverRequest]) -> list[TakeOverState]:
    """Call every rank, each by a request of its own, and wait for all of them; raises the failure of the lowest."""
    responses = await asyncio.gather(
        *(
            client.call(
                "TakeOver",
                request.SerializeToString(),
                pb.TakeOverResponse.FromString,
                LOOK_SECONDS if request.only_looks else TAKE_OVER_SECONDS,
            )
            for client, request in zip(clients, requests, strict=True)
        ),
        return_exceptions=True,
    )
    for response in responses:
        if isinstance(response, BaseException):
            raise response
    return [takeover_wire.decode_state(each) for each in responses if isinstance(each, pb.TakeOverResponse)]


def missing_calls(looks: Sequence[TakeOverState]) -> list[list[NumberedCall]]:
    """The calls that each rank lacks of those that any rank has begun, in order; a rank refuses them after a gap."""
    begun = {call.step_seq: call for look in looks for call in look.latest}
    return [[begun[seq] for seq in sorted(begun) if seq > look.last_step_seq] for look in looks]


def _agreed(states: Sequence[TakeOverState]) -> TakenOver:
    if len({(state.last_step_seq, state.batches) for state in states}) > 1:
        raise _Refused("the ranks hold different rows")
    warmups = tuple([state.warmup for state in states if state.warmup is not None])
    if len(warmups) < len(states):
        raise _Refused("a rank was not warmed up")
    if any(warmup.state_slots for warmup in warmups):
        raise _Refused("their recurrent states are not known")
    return TakenOver(states[0].last_step_seq, states[0].batches, warmups)
