"""How long the plan of the next step can wait: it is sent before the step under way ends, and no sooner. Pure.

Who comes before that is in the next step, not in the one after it.
"""

# Planning, sending and whatever else the router does come to less than this, and a step takes less of its predicted
# time only now and then; the shards wait when both fail.
LEAD_SECONDS = 0.006
LEAD_SHARE = 0.25
LEAST_SECONDS = 0.005  # a shorter wait is not worth a timer


def plan_after(predicted_seconds: float) -> float:
    """Seconds from the begin of a step until the one after it is planned; `predicted_seconds` is 0 where unknown."""
    seconds = predicted_seconds * (1 - LEAD_SHARE) - LEAD_SECONDS
    return seconds if seconds >= LEAST_SECONDS else 0.0
