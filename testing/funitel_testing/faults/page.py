"""The table in docs/faults.md: between two marks, the rest of the page is written by hand."""

from collections.abc import Sequence

from funitel_testing.faults.table import Row, as_markdown

BEGIN, END = "<!-- table: written by make faults -->", "<!-- end of the table -->"


def written(page: str, rows: Sequence[Row]) -> str:
    """The page with another table."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{as_markdown(rows)}\n{END}{tail}"
