"""Type of `--num-shard`: a number of shards, or `auto`."""


class ShardCount(int):
    """A number of shards; `auto` has the value 1, the minimum, and `is_auto`."""

    METAVAR = "INTEGER|auto"

    is_auto: bool

    def __new__(cls, text: str) -> "ShardCount":
        """Raise ValueError with the reason for any other text."""
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
    """Whether the number of shards follows the number of GPUs."""
    return isinstance(count, ShardCount) and count.is_auto
