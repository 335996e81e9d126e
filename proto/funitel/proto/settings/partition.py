"""Parse and format how ranks are parted into pipeline stages: `0&1;2&3`, and how many layers each has: `12,20`."""

from funitel.proto.settings.options import Counts

MAX_RANKS = 1024


class Partition(tuple[tuple[int, ...], ...]):
    """The ranks of each pipeline stage, from text: `;` separates stages, `&` ranks; `str` gives the text.

    The form is Inferflow's. Each stage has as many ranks, so that hidden states go from rank to rank.
    """

    METAVAR = "RANKS;RANKS"

    def __new__(cls, text: str) -> "Partition":
        """Raise ValueError with the reason for text of another form."""
        return super().__new__(cls, _parse(text))

    def __str__(self) -> str:
        return ";".join("&".join(map(str, stage)) for stage in self)

    __repr__ = __str__

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return len(self) * len(self[0])

    @property
    def num_tensor_ranks(self) -> int:
        """Ranks of a stage, over which its tensors are split."""
        return len(self[0])

    @property
    def root(self) -> int:
        """The rank that samples: the first of the last stage, which has the logits."""
        return self[-1][0]

    def stage_of(self, rank: int) -> int:
        """The stage that a rank belongs to."""
        return next(place for place, ranks in enumerate(self) if rank in ranks)


def _parse(text: str) -> list[tuple[int, ...]]:
    parts = [[word.strip() for word in stage.split("&")] for stage in text.split(";")]
    if not all(
        word.isdecimal() and word.isascii() and len(word) <= len(str(MAX_RANKS)) for each in parts for word in each
    ):
        raise ValueError("is not ranks with & between and stages with ; between, such as 0&1;2&3")
    stages = [tuple(map(int, stage)) for stage in parts]
    ranks = [rank for stage in stages for rank in stage]
    repeated = next((rank for rank in ranks if ranks.count(rank) > 1), None)
    if repeated is not None:
        raise ValueError(f"has rank {repeated} twice")
    missing = next((rank for rank in range(len(ranks)) if rank not in ranks), None)
    if missing is not None:
        raise ValueError(f"has {len(ranks)} ranks, which must be 0..{len(ranks) - 1}: rank {missing} is missing")
    if len({len(stage) for stage in stages}) > 1:
        sizes = ", ".join(str(len(stage)) for stage in stages)
        raise ValueError(f"has stages of {sizes} ranks: all must have as many")
    return stages


def check_layers(partition: Partition | None, layers: Counts | None) -> str | None:
    """What is wrong with layers for the stages of a partition; None: nothing."""
    if layers is None:
        return None
    if partition is None:
        return f"--layers {layers} is for the stages of --partition, which is not given"
    if len(layers) != len(partition):
        return f"--layers {layers} has {len(layers)} numbers, --partition {partition} has {len(partition)} stages"
    if min(layers) < 1:
        return f"--layers {layers} must have at least one layer for each stage"
    return None
