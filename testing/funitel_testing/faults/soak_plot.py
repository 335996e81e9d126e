"""The soak as a picture: what was held over time, and when processes were killed."""

from pathlib import Path

from matplotlib.figure import Figure

from funitel_testing.faults.soak_report import Report

PANELS = (
    (
        "memory of their own, MiB",
        ("router own MiB", "shards own MiB", "launcher own MiB", "keeper own MiB", "workers own MiB"),
    ),
    ("file descriptors", ("router files", "shards files", "launcher files", "keeper files", "workers files")),
    ("sockets", ("router sockets", "shards sockets", "launcher sockets", "keeper sockets")),
    ("threads", ("router threads", "shards threads", "launcher threads")),
    ("tasks of the router", ("router tasks",)),
    ("KV blocks in use", ("blocks",)),
)


def plot(path: Path, report: Report) -> None:
    """Write a PNG: a panel for each kind of quantity; dots are the silences, red lines the kills."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = figure.subplots(3, 2, sharex=True).flatten()
    for axis, (label, names) in zip(axes, PANELS, strict=True):
        for number, name in enumerate(names):
            points = [(sample.seconds / 60, sample.values[name]) for sample in report.samples]
            silent = [(s.seconds / 60, s.values[name]) for s in report.samples if s.period is not None]
            axis.plot(*zip(*points, strict=True), color=f"C{number}", linewidth=0.6, alpha=0.5)
            axis.plot(*zip(*silent, strict=True), "o", color=f"C{number}", markersize=3, label=name)
        for seconds in report.kills:
            axis.axvline(seconds / 60, color="red", linewidth=0.5, alpha=0.6)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="lower right")
    for axis in axes[-2:]:
        axis.set_xlabel("minutes; dots: idle, red: a process is killed")
    figure.savefig(path, format="png", dpi=110)
