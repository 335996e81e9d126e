"""Write docs/examples.md from the programs in docs/examples.

With --check, only compare and fail when it is stale.
"""

import ast
import sys
from pathlib import Path

from generated_page import write_or_check

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "examples.md"
PROGRAMS = DOCS / "examples"
PRINTS = "\n# prints:\n"

HEAD = """# Python examples

Written by `make pages` from the programs in `docs/examples`; change those, not this page. A test runs each of them and
compares what it prints. They ask a server of the demo model, which `make serve` or `funitel` starts on port 3000. The
API key of a server that has one goes into `api_key`.

Other clients, from LangChain to coding agents, are in [clients.md](clients.md), requests by `curl` in the README.
"""

SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "OpenAI's API",
        "`pip install openai`. What each field does is in [openai.md](openai.md) and [responses.md](responses.md); "
        "batches need `--batch-dir` ([batch.md](batch.md)).",
        (
            "openai_chat",
            "openai_stream",
            "openai_tools",
            "openai_json_schema",
            "openai_completions",
            "openai_responses",
            "openai_batch",
        ),
    ),
    (
        "Anthropic's API",
        "`pip install anthropic`; see [anthropic.md](anthropic.md).",
        ("anthropic_messages", "anthropic_tools"),
    ),
    (
        "TGI's API",
        "`pip install huggingface_hub`, `text-generation` or `httpx`; see [migrate.md](migrate.md).",
        ("tgi_huggingface_hub", "tgi_text_generation", "tgi_tokenize", "raw_sse", "server_facts"),
    ),
    (
        "Embeddings and ranks",
        "An encoder is a server of its own; see [embeddings.md](embeddings.md).",
        ("openai_embeddings", "rerank"),
    ),
    (
        "Without a server",
        "`pip install 'funitel[server]'`; see [offline.md](offline.md).",
        ("offline", "offline_requests", "offline_scores"),
    ),
)


def parts(name: str) -> tuple[str, str, str]:
    """What a program does, its text without docstring and output, and what it prints."""
    code, _, printed = (PROGRAMS / f"{name}.py").read_text().partition(PRINTS)
    does = ast.get_docstring(ast.parse(code))
    assert does, f"{name}.py needs a docstring"
    lines = [line.removeprefix("#").removeprefix(" ") for line in printed.splitlines()]
    return does, code.partition('"""\n')[2].strip(), "\n".join(lines)


def page() -> str:
    """The whole page."""
    listed = sorted(name for _, _, names in SECTIONS for name in names)
    there = sorted(path.stem for path in PROGRAMS.glob("*.py"))
    if listed != there:
        raise SystemExit(f"error: SECTIONS and docs/examples differ: {sorted({*listed} ^ {*there})}")
    text = [HEAD]
    for title, remark, names in SECTIONS:
        text.append(f"## {title}\n\n{remark}\n")
        for does, code, printed in map(parts, names):
            text.append(f"{does}\n\n```python\n{code}\n```\n\n```text\n{printed}\n```\n")
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
