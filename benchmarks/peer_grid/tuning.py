"""Find the options with which a peer is fastest at a kind of workload: one option after the other, on short runs. Pure.

Every value of an option is tried with the best values of those before it, and is kept only if it is better by more than
noise. A value that the peer refuses is recorded as such and left.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from funitel.proto.errors import FunitelError

GAIN = 1.02  # what a value must gain to be kept


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting that was tried, and its speed (higher is better); None with the reason if it failed."""

    options: Mapping[str, str]
    speed: float | None
    problem: str = ""


@dataclass(slots=True)
class Tuned:
    """The best options that were found, and all that was tried."""

    options: dict[str, str]
    trials: list[Trial] = field(default_factory=list)


def tune(
    defaults: Mapping[str, str],
    values: Mapping[str, Sequence[str]],
    speed_of: Callable[[Mapping[str, str]], float],
    report: Callable[[Trial], None] = lambda trial: None,
) -> Tuned:
    """Try the values of each option in turn.

    Args:
        defaults: a value of every option; it is tried first.
        speed_of: measures a setting; higher is better. It raises FunitelError for one that the peer refuses.

    Raises:
        FunitelError: no setting works.
    """
    tuned = Tuned(dict(defaults))
    best: float | None = None

    def attempt(options: dict[str, str]) -> None:
        nonlocal best
        try:
            trial = Trial(options, speed_of(options))
        except FunitelError as error:
            trial = Trial(options, None, error.message)
        tuned.trials.append(trial)
        report(trial)
        if trial.speed is not None and (best is None or trial.speed > GAIN * best):
            best, tuned.options = trial.speed, options

    attempt(dict(defaults))
    for name, choices in values.items():
        for value in choices:
            if value != tuned.options[name] and tuned.options | {name: value} not in [t.options for t in tuned.trials]:
                attempt(tuned.options | {name: value})
    if best is None:
        raise FunitelError(f"no setting works: {tuned.trials[0].problem}")
    return tuned
