"""The modules of `benchmarks/replaying`: load in virtual time."""

import sys
from importlib import import_module
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # last: scripts there have names that packages have too

costs = import_module("replaying.costs")
measures = import_module("replaying.measures")
run = import_module("replaying.run")
simulation = import_module("replaying.simulation")
trace = import_module("replaying.trace")
