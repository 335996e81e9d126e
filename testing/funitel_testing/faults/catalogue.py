"""Every fault of the table."""

from funitel_testing.faults import clock, network, processes, resources, starts

FAULTS = (*processes.FAULTS, *resources.FAULTS, *clock.FAULTS, *network.FAULTS)
STARTS = starts.STARTS
