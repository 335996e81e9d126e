"""How long a call may be under way before the shards are taken to hang. Pure."""

from funitel.router.plan import StepPlan

# Nothing was learnt yet of the first steps of a kind, and they may compile what they run.
FIRST_FACTOR = 5
# A step that takes so many times what it was predicted to is not slow but hangs: noise, swapping and neighbours
# stretch one by less.
LATE_FACTOR = 10


def most_seconds(plan: StepPlan | None, step_timeout_s: float) -> float:
    """Seconds from the answer before it to its own that a call is given; one without a plan drops rows."""
    if plan is None:
        return step_timeout_s
    if not plan.predicted_seconds:
        return FIRST_FACTOR * step_timeout_s
    return max(step_timeout_s, LATE_FACTOR * plan.predicted_seconds)
