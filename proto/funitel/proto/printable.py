"""What others wrote, fit to stand in a line of ours: nothing in it is obeyed by a terminal or taken for a new line."""


def printable(text: str) -> str:
    """`text` with what cannot be printed, line ends included, as Python writes it in a literal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shortened(text: str, most: int) -> str:
    """The first `most` characters of a text, and a sign where it goes on."""
    return text if len(text) <= most else f"{text[:most]}..."
