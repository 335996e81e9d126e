"""The commands that measure a model, by their settings. Imports torch, which takes seconds."""

from collections.abc import Callable, Mapping
from typing import Any

from funitel.model_server.settings import KernelSettings, PerplexitySettings
from funitel.model_server.tools.kernel_bench.matmul import measure_kernels
from funitel.model_server.tools.perplexity.command import print_perplexity

MEASUREMENTS: Mapping[type[Any], Callable[[Any], None]] = {
    KernelSettings: measure_kernels,
    PerplexitySettings: print_perplexity,
}
"""Each prints what it finds."""


def measure(settings: KernelSettings | PerplexitySettings) -> None:
    """Measure what the settings are for. Raises: FunitelError, see the functions."""
    MEASUREMENTS[type(settings)](settings)
