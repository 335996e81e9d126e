"""How long the plan of the next step can wait: it is sent before the step under way ends, and no sooner. Pure.

Who comes before that is in the next step, not in the one after it. Where nobody comes, nobody is waited for: to wake up
once more for each step costs more than the planning.
"""

# Planning, sending and whatever else the router does come to less than this, and a step takes less of its predicted
# time only now and then; the shards wait when both fail.
LEAD_SECONDS = 0.006
LEAD_SHARE = 0.25
LEAST_SECONDS = 0.005  # a shorter wait is not worth a timer
QUIET_SECONDS = 2.0  # when for so long nobody came, nobody is expected within a step


def plan_after(predicted_seconds: float, quiet_seconds: float, *, has_several_keys: bool) -> float:
    """Seconds from the begin of a step until the one after it is planned.

    Args:
        predicted_seconds: what the step is thought to take; 0 where unknown.
        quiet_seconds: since a sequence came last.
        has_several_keys: one that asks now and then is expected beside one that asks for much.
    """
    if quiet_seconds >= QUIET_SECONDS and not has_several_keys:
        return 0.0
    seconds = predicted_seconds * (1 - LEAD_SHARE) - LEAD_SECONDS
    return seconds if seconds >= LEAST_SECONDS else 0.0
