"""Plot latency against throughput. matplotlib is imported only when a plot is requested."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from funitel.launcher.bench.report import ServerResult
from funitel.proto.errors import SettingsError

PANELS = (("time to first token, ms", "ttft_ms"), ("time of a token after it, ms", "tpot_ms"))


def check_plot(path: str) -> None:
    """Raise SettingsError before the measurement if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise SettingsError(f"--plot {path} needs matplotlib, which is not installed: pip install matplotlib")


def plot(path: str, results: Sequence[ServerResult]) -> None:
    """Write a PNG: a panel for each latency, a line for each server through its levels; medians and p99."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    for axis, (label, name) in zip(axes, PANELS, strict=True):
        for number, server in enumerate(results):
            for percent, style in ((50, "o-"), (99, "x:")):
                points = [
                    (result.median["output_tokens_s"], result.median[f"{name}_p{percent}"], str(result.level))
                    for result in server.levels
                ]
                measured = [(x, y, text) for x, y, text in points if x is not None and y is not None]
                axis.plot(
                    [x for x, _, _ in measured],
                    [y for _, y, _ in measured],
                    style,
                    color=f"C{number}",
                    label=f"{server.target.name} p{percent}",
                )
                if percent == 50:
                    for x, y, text in measured:
                        axis.annotate(text, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
        axis.set_xlabel("output tokens/s")
        axis.set_ylabel(label)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(Path(path), format="png", dpi=120)
