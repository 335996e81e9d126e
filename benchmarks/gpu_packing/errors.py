"""The error of a pack that cannot be made."""


class PackError(Exception):
    """Input that does not fit, or a download that failed; the message is one line."""
