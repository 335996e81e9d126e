"""What a shard does not announce is refused by name, and nothing else is."""

import pytest

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import Capability, GrammarType, SamplingParams
from funitel.proto.strategy import DecodingStrategy
from funitel.router.shard_client.capabilities import check_capabilities

EVERYTHING = frozenset[str](Capability)


@pytest.mark.parametrize(
    ("asked", "param", "missing"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty", Capability.COUNT_PENALTIES),
        ({"count_penalty": -0.5}, "frequency_penalty", Capability.COUNT_PENALTIES),
        ({"min_p": 0.1}, "min_p", Capability.MORE_SAMPLERS),
        ({"logit_bias": ((1, 2.0),)}, "logit_bias", Capability.MORE_SAMPLERS),
        ({"raw_logprobs": True}, "logprobs", Capability.MORE_SAMPLERS),
        ({"strategy": DecodingStrategy(tfs_z=0.9)}, "tfs_z", Capability.STRATEGIES),
        ({"strategy": DecodingStrategy(mirostat=1)}, "mirostat", Capability.STRATEGIES),
        ({"first_token": 0}, "target_language", Capability.FIRST_TOKEN),
        ({"grammar": "{}", "grammar_type": GrammarType.JSON}, "grammar", Capability.GRAMMARS),
    ],
)
def test_a_field_the_shards_do_not_know_is_refused(asked: dict[str, object], param: str, missing: Capability) -> None:
    sampling = SamplingParams(**asked)  # type: ignore[arg-type]
    check_capabilities(sampling, EVERYTHING)
    with pytest.raises(InvalidRequest, match="is not supported by the shards of this server") as caught:
        check_capabilities(sampling, EVERYTHING - {missing})
    assert caught.value.param == param


def test_plain_tgi_shards_take_what_tgi_has() -> None:
    check_capabilities(
        SamplingParams(temperature=0.5, top_k=3, typical_p=0.5, watermark=True, frequency_penalty=1.0), frozenset()
    )
