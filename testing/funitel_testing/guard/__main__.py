"""Count what a request, a token, a step and a start cost, and hold the counts against their bounds.

make guard                          all groups, in a minute; exit code 1 where a count is over its bound
make guard ARGS="--only router"     one group
make guard ARGS="--rounds 5"        the spread of several measurements
make guard ARGS=--write             write the bounds again, from the medians of three measurements
"""

import argparse
import sys
from collections.abc import Sequence

from funitel_testing.guard import table
from funitel_testing.guard.groups import COUNTED, GROUPS, WRITTEN, checked, measured, reason_to_skip
from funitel_testing.guard.table import Rows

ROUNDS_OF_A_WRITE = 3


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--rounds", type=int, default=0, help="measure so often, print the spread, hold nothing")
    parser.add_argument("--write", action="store_true", help="write the bounds again")
    args = parser.parse_args()
    if args.rounds or args.write:
        counts = {name: spread(name, args.rounds or ROUNDS_OF_A_WRITE) for name in args.only or WRITTEN}
        if args.write:
            table.write(counts)
        return
    sys.exit(hold(args.only or COUNTED))


def spread(name: str, num_rounds: int) -> list[Rows]:
    """Measure a group several times, and print least and most of each row."""
    if name == "start":
        measured(name)  # the first may compile modules of Python
    rounds = [measured(name) for _ in range(num_rounds)]
    for row in rounds[0]:
        values = [each[row] for each in rounds]
        numbers = [value for value in values if not isinstance(value, str)]
        told = f"{min(numbers):,.2f} to {max(numbers):,.2f}" if numbers else values[0]
        print(f"{name}: {row}: {told}", flush=True)
    return rounds


def hold(names: Sequence[str]) -> int:
    """Check groups, a line for each row; the exit code."""
    found, is_over = table.read(), False
    for name in names:
        if reason := reason_to_skip(name, found):
            print(f"{name}: skipped: {reason}")
            continue
        for finding in checked(name, found):
            is_over |= finding.is_over
            print("OVER" if finding.is_over else "    ", finding.line, flush=True)
    return int(is_over)


if __name__ == "__main__":
    main()
