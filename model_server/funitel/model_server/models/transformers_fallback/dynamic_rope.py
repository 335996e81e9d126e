"""Rotary positions that depend on how long a sequence is, in code that takes one length for all rows of a forward.

transformers' longrope and dynamic go by the longest sequence of a forward, and dynamic by those of forwards before.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from funitel.proto.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """Which rows have the same rotary angles, so that they may share a forward.

    Up to `trained` tokens all do; None: at any length. Beyond, rows of equal length do where there are `modules`, those
    that remember the angles of before, and all others together.
    """

    trained: int | None = None
    modules: tuple[Any, ...] = ()

    @classmethod
    def of(cls, model: Any) -> "DynamicRope":
        """How `model` rotates.

        Raises:
            UnsupportedModel: by sequences before, and it is not known how to make it forget them.
        """
        config = model.config.get_text_config(decoder=True)
        for given in _scalings(config):
            kind = str(given.get("rope_type") or given.get("type"))
            if "dynamic" in kind:
                modules = tuple(module for module in model.modules() if _is_dynamic(module))
                if not modules:
                    raise UnsupportedModel(
                        f"rope_type {kind} is not supported through transformers for {type(model).__name__}: its "
                        "rotary positions would depend on the requests before"
                    )
                return cls(modules[0].original_max_seq_len, modules)
            if kind == "longrope":
                key = "original_max_position_embeddings"
                trained = given.get(key) or getattr(config, key, None)
                return cls(int(trained) if trained else None)
        return cls()

    @property
    def is_by_length(self) -> bool:
        """Whether a prompt must be computed as a whole, and keys serve no sequence but their own."""
        return self.trained is not None

    def kind(self, length: int) -> int:
        """A number that rows of the same angles have in common; `length` is a row's context after the step."""
        if self.trained is None or length <= self.trained:
            return 0
        return length if self.modules else 1

    def forget(self) -> None:
        """Make the next forward rotate by its own rows alone."""
        for module in self.modules:
            module.max_seq_len_cached = module.original_max_seq_len
            module.inv_freq = module.original_inv_freq


def _scalings(config: Any) -> Iterator[Mapping[str, Any]]:
    """What a configuration says of rotary positions, of all layers or of each kind of them."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    yield given
    yield from (value for value in given.values() if isinstance(value, dict))


def _is_dynamic(module: Any) -> bool:
    """Whether a module is a rotary embedding of transformers' that goes by the sequences before."""
    kind = getattr(module, "rope_type", None)
    return isinstance(kind, str) and "dynamic" in kind and hasattr(module, "original_inv_freq")
