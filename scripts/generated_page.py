"""Write a page that is made of the code, or with --check say whether it is as it should be."""

import sys
from pathlib import Path


def write_or_check(page: Path, text: str) -> int:
    """Return the exit status: 1 where `--check` is given and the page is not `text`."""
    if "--check" not in sys.argv[1:]:
        page.write_text(text)
    elif not page.exists() or page.read_text() != text:
        print(f"error: docs/{page.name} is out of date: make pages", file=sys.stderr)
        return 1
    return 0
