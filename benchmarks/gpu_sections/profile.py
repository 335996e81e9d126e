"""Where the time of a step goes: its kernels by what they take together, and when the device waits for the next one."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from gpu_sections import timing
from gpu_sections.figures import Line
from gpu_sections.plan import Plan

NUM_STEPS = 5
NUM_KERNELS = 12  # that are told
MAX_CHARS = 44  # of a kernel's name

Span = tuple[float, float]  # begin and end in microseconds


def measure(plan: Plan, num_rows: int, step: Callable[[], object]) -> Iterator[Line]:
    """Profile a step of so many rows, and tell of the kernels that take most."""
    kind = DeviceType.CUDA if plan.is_gpu else DeviceType.CPU
    step()
    timing.wait(plan)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * plan.is_gpu
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(NUM_STEPS):
            step()
        timing.wait(plan)
    spans: dict[str, list[Span]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == kind:
            spans[event.name].append((event.time_range.start, event.time_range.end))
    return lines_of(num_rows, spans)


def lines_of(num_rows: int, spans: dict[str, list[Span]]) -> Iterator[Line]:
    """The figures of one step."""
    every = [span for each in spans.values() for span in each]
    if not every:
        yield Line(f"profile_{num_rows}", f"profile, {num_rows} rows", None, "the profiler saw no kernel")
        return
    begin, end = min(start for start, _ in every), max(end for _, end in every)
    busy = union(every)
    name = f"profile, {num_rows} rows"
    waits = 1 - busy / (end - begin) if end > begin else 0.0
    yield Line(f"profile_{num_rows}", f"{name}: the device waits", waits * 100, f"% of {NUM_STEPS} steps")
    totals = {kernel: sum(end - start for start, end in each) for kernel, each in spans.items()}
    for rank, kernel in enumerate(sorted(totals, key=totals.__getitem__, reverse=True)[:NUM_KERNELS]):
        share, count = totals[kernel] / busy * 100 if busy else 0.0, len(spans[kernel]) / NUM_STEPS
        unit = f"ms a step, {share:.1f} % of what the device does, {count:g} launches"
        label = f"{name}: {kernel[:MAX_CHARS]}"
        yield Line(f"profile_{num_rows}_{rank}", label, totals[kernel] / NUM_STEPS / 1e3, unit)


def union(spans: Iterable[Span]) -> float:
    """How long at least one of the spans lasted."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
