"""Parse and format how the layers of a model are placed: ranges of layers with a device or precision each."""

from dataclasses import dataclass

from funitel.proto.settings.partition import Partition

ON_GPU, ON_CPU = "cuda", "cpu"
EXACT = ("float32", "float16", "bfloat16")
PLACES = (ON_GPU, ON_CPU, *EXACT, "int8", "gguf")
"""Where the layers of a range are: on the GPU, on the CPU, or on the CPU with weights kept in a precision."""

MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class PlacedLayers:
    """Layers [first, last] of a model, and their place, one of `PLACES`."""

    first: int
    last: int
    place: str

    @property
    def layers(self) -> range:
        """The layers as a range."""
        return range(self.first, self.last + 1)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}={self.place}"


class LayerParts(tuple[PlacedLayers, ...]):
    """Ranges of layers from text, such as `0-9=int8,10-29=cuda`; `str` gives the text.

    Ranges are in order, from layer 0 on and without gaps. A range of one layer may be written as its number.
    """

    METAVAR = "LAYERS=PLACE,..."

    def __new__(cls, text: str) -> "LayerParts":
        """Raise ValueError with the reason for text of another form."""
        return super().__new__(cls, _parse(text))

    def __str__(self) -> str:
        return ",".join(map(str, self))

    __repr__ = __str__

    @property
    def num_layers(self) -> int:
        """Layers of all ranges."""
        return self[-1].last + 1

    def has(self, place: str) -> bool:
        """Whether some layers are at a place."""
        return any(each.place == place for each in self)


def _parse(text: str) -> list[PlacedLayers]:
    parts: list[PlacedLayers] = []
    for word in text.split(","):
        numbers, equals, place = (each.strip() for each in word.partition("="))
        first, _, last = (each.strip() for each in numbers.partition("-"))
        if not equals or not _is_layer(first) or not _is_layer(last or first):
            raise ValueError("is not ranges of layers with a place each, such as 0-9=cpu,10-29=cuda")
        if place not in PLACES:
            raise ValueError(f"has {place!r} for layers {numbers}: a place is one of {', '.join(PLACES)}")
        part = PlacedLayers(int(first), int(last or first), place)
        expected = parts[-1].last + 1 if parts else 0
        if part.first != expected:
            raise ValueError(f"has a range that begins with layer {part.first}: layer {expected} comes next")
        if part.last < part.first:
            raise ValueError(f"has the range {numbers}, which ends before it begins")
        parts.append(part)
    return parts


def _is_layer(word: str) -> bool:
    return word.isdecimal() and word.isascii() and len(word) <= len(str(MAX_LAYERS)) and int(word) <= MAX_LAYERS


def check_parts(
    gpu_layers: int | None, parts: LayerParts | None, partition: Partition | None, num_ranks: int
) -> str | None:
    """What is wrong with settings that place layers beside those that divide a model over ranks; None: nothing."""
    if gpu_layers is not None and parts is not None:
        return f"--gpu-layers {gpu_layers} and --layer-parts {parts} both place the layers: give one"
    flag = placing_flag(gpu_layers, parts)
    if flag is None:
        return None
    if partition is not None:
        return f"{flag} cannot be used with --partition {partition}: one shard has all layers"
    if num_ranks > 1:
        return f"{flag} cannot be used with --num-shard {num_ranks}: one shard has all layers"
    return None


def placing_flag(gpu_layers: int | None, parts: LayerParts | None) -> str | None:
    """The flag that places layers, with its value; None where none does."""
    if gpu_layers is not None:
        return f"--gpu-layers {gpu_layers}"
    return None if parts is None else f"--layer-parts {parts}"
