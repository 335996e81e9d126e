"""Every fault of the table."""

from funitel_testing.faults import clock, network, processes, resources, starts, steps

FAULTS = (*processes.FAULTS, *steps.FAULTS, *resources.FAULTS, *clock.FAULTS, *network.FAULTS)
STARTS = starts.STARTS
