"""Escape and shorten foreign text for log lines and messages: no control characters, no line breaks."""


def printable(text: str) -> str:
    """`text` with unprintable characters, line ends included, escaped as in Python literals."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shortened(text: str, max_characters: int) -> str:
    """The first `max_characters` of a text, with an ellipsis if it was cut."""
    return text if len(text) <= max_characters else f"{text[:max_characters]}..."
