"""How many shards a model is split over, as `--num-shard` says it: a number, or `auto`."""


class ShardCount(int):
    """A number of shards; of `auto` it is the least that there will be, and whoever decides looks at `is_auto`."""

    is_auto: bool

    def __new__(cls, text: str) -> "ShardCount":
        """Raise ValueError, which says what is wrong, for anything else."""
        is_auto = text == "auto"
        try:
            count = super().__new__(cls, 1 if is_auto else int(text))
        except ValueError:
            raise ValueError("is neither a number of shards nor auto") from None
        count.is_auto = is_auto
        return count

    def __str__(self) -> str:
        return "auto" if self.is_auto else int.__repr__(self)

    __repr__ = __str__


AUTO = ShardCount("auto")


def is_auto(count: int | None) -> bool:
    """Whether a number of shards is that of the GPUs there are."""
    return isinstance(count, ShardCount) and count.is_auto
