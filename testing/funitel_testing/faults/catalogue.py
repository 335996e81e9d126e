"""Every fault of the table."""

from funitel_testing.faults import clock, network, processes, resources, starts, steps

_ALL = (*processes.FAULTS, *steps.FAULTS, *resources.FAULTS, *clock.FAULTS, *network.FAULTS)
_SCENES = [fault.scene for fault in _ALL]

# Those of one scene stand together, so that they are done to one deployment.
FAULTS = tuple(sorted(_ALL, key=lambda fault: _SCENES.index(fault.scene)))
STARTS = starts.STARTS
