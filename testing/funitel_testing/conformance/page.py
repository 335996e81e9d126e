"""Write docs/differences.md from the rows of the conformance test, or with --check say whether it is up to date."""

import sys
from pathlib import Path

from funitel_testing.conformance import ROWS

PAGE = Path(__file__).parents[3] / "docs" / "differences.md"
HEAD = """# Where funitel answers otherwise than TGI

Written by `make pages` from the rows of the conformance test; change those, not this page. Every other field, bound,
status, header and metric that the test walks is answered as TGI answers it. Rows with the same reason stand together;
issue numbers are those of TGI's repository. [migrate.md](migrate.md) says what this means for a deployment.

| reason | where |
| --- | --- |
"""


STARTS_HEAD = """
## Where it is started otherwise

| flag | what | why |
| --- | --- | --- |
"""
STARTS = (
    (
        "--hostname",
        "outside the image, 127.0.0.1 when neither it nor a key is given; that of `API_KEY` does not count",
        "without authentication the server listens on loopback by default ([access](access.md))",
    ),
    (
        "--cors-allow-origin",
        "on loopback without a key, by default pages of this machine; and any `Host` but loopback is refused",
        "else every web page could use the server in its visitor's machine ([access](access.md))",
    ),
    ("--model-id", "smollm2-135m-instruct", "small enough to try on any machine"),
    ("--master-port", "a free one", "two instances run side by side"),
    ("--shard-uds-path", "another when it is taken", "two instances run side by side"),
    ("--shard-uds-path", "sockets are accessible to their owner only", "access to a shard allows running the model"),
    ("--prometheus-port", "none", "TGI opens 9000 and answers nothing there"),
    (
        "--cuda-memory-fraction",
        "on a CPU 16 contexts of the model and at most a quarter of the available memory; 1 on a GPU",
        "a server on a CPU shares its memory with other programs ([cpu](cpu.md#memory))",
    ),
)


def render() -> str:
    """The page."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for row in ROWS:
        if row.differs:
            reasons.setdefault(row.differs, {}).setdefault(row.path, []).append(row.claim)
    rows = [f"| {why} | {_places(claims)} |\n" for why, claims in reasons.items()]
    starts = [f"| `{flag}` | {what} | {why} |\n" for flag, what, why in STARTS]
    return "".join([HEAD, *rows, STARTS_HEAD, *starts])


def _places(claims: dict[str, list[str]]) -> str:
    return "<br>".join(f"`{path}`: {'; '.join(found)}" for path, found in claims.items())


def main() -> int:
    """Write or check the page."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(render(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != render():
        print(f"{PAGE} is not up to date: run make pages", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
