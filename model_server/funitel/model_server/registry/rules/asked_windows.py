"""Rules of sliding windows of families that have none unless the config asks for them."""

from collections.abc import Callable

from funitel.model_server.registry.rules.row import NUM_LAYERS, Config, Rule, windows


def asked_windows(is_windowed: Callable[[Config, int], bool]) -> Rule:
    """Windows of families that have none unless asked: in layers that `layer_types` names, else where `is_windowed`."""

    def read(config: Config) -> tuple[int | None, ...]:
        if not config.get("use_sliding_window"):
            return ()
        layers = range(NUM_LAYERS(config))
        kinds = ["sliding_attention" if is_windowed(config, i) else "full_attention" for i in layers]
        found: tuple[int | None, ...] = windows()({**config, "layer_types": config.get("layer_types") or kinds})
        return found

    return read


LATER_WINDOWS = asked_windows(lambda c, i: i >= c["max_window_layers"])
"""Windows from a layer on, as Qwen's configs have them."""
