"""Write docs/routes.md from the table of routes, or with --check say whether it is up to date."""

import sys
from collections.abc import Sequence
from pathlib import Path

from generated_page import write_or_check

from funitel.router.api import (
    anthropic,
    audio,
    batches,
    embeddings,
    fleet,
    inferflow,
    native,
    openai,
    operators,
    platforms,
    requests,
    responses,
    steps,
    vllm,
)
from funitel.router.api.openapi import KEY_FAILURES, MEANINGS
from funitel.router.api.routes import OPERATIONS
from funitel.router.auth.access import Access
from funitel.router.middleware.operation import Operation

PAGE = Path(__file__).parent.parent / "docs" / "routes.md"

HEAD = """# Routes

Written by `make pages` from the table of routes; change that, not this page. A running server describes the same routes
with the fields of every body and answer at `/docs` (for people) and `/openapi.json`; `funitel-router print-schema`
prints the document without a server.

*Key* says whether a request needs an API key, if the server has any ([access](access.md)). *Streams* marks routes that
can answer as Server-Sent Events. A [status](#statuses) other than 200 has the error record of the route's API.
"""

PLATFORMS = "KServe, SageMaker and Vertex AI, which names its paths in `AIP_PREDICT_ROUTE` and `AIP_HEALTH_ROUTE`."
ENCODERS = "Routes of text-embeddings-inference, OpenAI and Cohere; see [embeddings](embeddings.md)."
OPERATORS = "Health, facts and metrics; see [observability](observability.md) and [metrics](metrics.md)."
TGI = "Routes of text-generation-inference; see [migrate](migrate.md) and [differences](differences.md)."

SECTIONS: tuple[tuple[str, str, Sequence[Operation]], ...] = (
    ("TGI", TGI, native.ROUTES),
    ("OpenAI", "Chats and completions; see [openai](openai.md).", openai.ROUTES),
    ("OpenAI's responses", "See [responses](responses.md).", responses.ROUTES),
    ("OpenAI's files and batches", "With `--batch-dir`; see [batch](batch.md).", batches.ROUTES),
    ("Running requests", "See [requests](requests.md).", requests.ROUTES),
    (
        "Inferflow",
        "Its native route, and its engine's calls; see [Inferflow's APIs](inferflow.md).",
        (*inferflow.ROUTES, *steps.ROUTES),
    ),
    ("Anthropic", "See [anthropic](anthropic.md).", anthropic.ROUTES),
    ("Encoders", ENCODERS, embeddings.ROUTES),
    ("Audio", "Whisper; see [audio](audio.md).", audio.ROUTES),
    ("vLLM", "Routes that vLLM has beside OpenAI's.", vllm.ROUTES),
    ("Platforms", PLATFORMS, platforms.ROUTES),
    ("Models at run time", "See [fleet](fleet.md).", fleet.ROUTES),
    ("Users, keys and usage", "With `--users`; see [users](users.md).", operators.USER_ROUTES),
    ("Operators", OPERATORS, operators.ROUTES),
    ("Console", "Unless `--console false`; see [console](console.md).", operators.CONSOLE_ROUTES),
    ("Debugging", "With `--debug-routes` only.", operators.DEBUG_ROUTES),
)
KEYS = {
    Access.KEY: "yes",
    Access.OWN: "its own",
    Access.OPERATOR: "its own; operators",
    Access.ADMIN: "its own; admins",
    Access.FACT: "no",
    Access.CLOSED_FACT: "yes",
    Access.CONTINUED: "that of the request",
    Access.LOGIN: "no",
    Access.PROBE: "no",
}


def row(operation: Operation) -> str:
    """The line of a route."""
    statuses = sorted({*operation.failures, *(KEY_FAILURES if operation.is_protected else ())})
    cells = (
        f"`{operation.method} {operation.documented_path}`",
        operation.summary,
        "yes" if operation.event is not None else "",
        KEYS[operation.access],
        ", ".join(map(str, statuses)),
    )
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """The whole page."""
    listed = [operation for _, _, routes in SECTIONS[:-1] for operation in routes]
    if {id(each) for each in listed} != {id(each) for each in OPERATIONS}:
        raise SystemExit("error: a route of the table is in no section of scripts/routes_page.py")
    parts = [HEAD]
    for title, text, routes in SECTIONS:
        head = "| route | what for | streams | key | other statuses |\n| --- | --- | --- | --- | --- |"
        parts.append(f"## {title}\n\n{text}\n\n{head}\n" + "\n".join(map(row, routes)) + "\n")
    meanings = "\n".join(f"| {status} | {meaning} |" for status, meaning in MEANINGS.items())
    parts.append(f"## Statuses\n\n| status | meaning |\n| --- | --- |\n{meanings}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
