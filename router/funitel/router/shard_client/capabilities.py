"""Capabilities of the shards: refuse request fields that they would silently ignore. Pure."""

from collections.abc import Callable, Sequence
from functools import partial

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import Capability, GrammarType, SamplingParams, ShardInfo
from funitel.proto.strategy import OFF
from funitel.router.core.request import Adapter, RequestMedia


def _uses(name: str, params: SamplingParams) -> bool:
    return params.strategy is not None and name in params.strategy.used


# Request fields that not every shard knows: the capability it must announce, and whether a request uses it.
_NEEDS: tuple[tuple[str, Capability, Callable[[SamplingParams], bool]], ...] = (
    ("presence_penalty", Capability.COUNT_PENALTIES, lambda p: p.presence_penalty != 0.0),
    ("frequency_penalty", Capability.COUNT_PENALTIES, lambda p: p.count_penalty != 0.0),
    ("min_p", Capability.MORE_SAMPLERS, lambda p: p.min_p != 0.0),
    ("logit_bias", Capability.MORE_SAMPLERS, lambda p: bool(p.logit_bias)),
    ("logprobs", Capability.MORE_SAMPLERS, lambda p: p.raw_logprobs),
    ("target_language", Capability.FIRST_TOKEN, lambda p: p.first_token is not None),
    ("min_tokens", Capability.TOKEN_RULES, lambda p: p.min_new_tokens != 0),
    ("stop_token_ids", Capability.TOKEN_RULES, lambda p: bool(p.stop_token_ids)),
    ("allowed_token_ids", Capability.TOKEN_RULES, lambda p: bool(p.allowed_token_ids)),
    ("bad_words", Capability.TOKEN_RULES, lambda p: bool(p.banned_tokens)),
    *((name, Capability.STRATEGIES, partial(_uses, name)) for name in OFF),
    ("structured_outputs", Capability.TOKEN_RULES, lambda p: p.grammar_type is GrammarType.LARK),
    # A plain TGI shard constrains by regular expressions, and ignores a schema.
    ("grammar", Capability.GRAMMARS, lambda p: p.grammar_type is GrammarType.JSON),
)

_EVERY = frozenset(needed for _, needed, _ in _NEEDS)


def check_adapter(adapter: Adapter | None, *, takes_adapters: bool) -> None:
    """Raise InvalidRequest for a request with an adapter where shards take none."""
    if adapter is not None and not takes_adapters:
        raise InvalidRequest("`adapter_id` is not supported by the shards of this server", "adapter_id")


def check_media(media: Sequence[RequestMedia], *, takes_media: bool) -> None:
    """Raise InvalidRequest for a request with images or sounds where shards take none."""
    if media and not takes_media:
        raise InvalidRequest("images and sounds are not supported by the shards of this server")


def check_capabilities(sampling: SamplingParams, capabilities: frozenset[str]) -> None:
    """Raise InvalidRequest for the first field that shards of these capabilities would ignore."""
    if _EVERY <= capabilities:
        return
    for param, needed, uses in _NEEDS:
        if uses(sampling) and needed not in capabilities:
            raise InvalidRequest(f"`{param}` is not supported by the shards of this server", param)


def default_pipeline_steps(info: ShardInfo, num_stages: int = 1) -> int:
    """Return how many steps are in flight at shards, or at each of some pipeline stages, if no setting says so.

    A GPU computes a step of 256 rows in 17 ms, and their texts, the wire and the router take as long. With a third
    step in flight they overlap two steps in place of one.
    """
    return 3 if info.device_type == "cuda" and num_stages == 1 else 2


def is_repeatable(info: ShardInfo) -> bool:
    """Whether shards compute the same tokens of a request in any company: they do on a CPU, see docs/cpu.md."""
    parts = info.layer_parts or ""
    has_other_parts = any("=" in part and not part.partition("=")[2].startswith("cpu") for part in parts.split(","))
    return info.device_type == "cpu" and not has_other_parts and info.attention_impl != "llama.cpp"
