"""Print that the deployment is ready, with an example command."""

import json
import logging
from contextlib import suppress
from typing import Any

from funitel.launcher.config.resolve import ResolvedSettings
from funitel.router.settings import local_only

logger = logging.getLogger(__name__)

EVERY_ADDRESS = ("0.0.0.0", "::")


def announce(settings: ResolvedSettings, *, seconds: float) -> None:
    """Print the ready line and an example command on stdout; with `json_output`, log one event instead."""
    ready = f"ready: {url(settings)} serves {settings.served_model_name} (started in {seconds:.1f} s)"
    if settings.json_output:
        logger.info(ready)
    else:
        with suppress(OSError):  # the server runs even if stdout is on a full disk
            print(f"\n{ready}\n\n{example(settings)}\n", flush=True)
    if settings.is_local_by_default:
        logger.info(local_only(settings))


def url(settings: ResolvedSettings) -> str:
    """URL of the router for clients on this machine."""
    host = "localhost" if settings.hostname in (*EVERY_ADDRESS, "127.0.0.1", "::1") else settings.hostname
    scheme = "http" if settings.tls_pair is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


QUESTION = "What is the capital of France?"
# For each task, a route and an example body.
_EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}),
    "embed": ("/v1/embeddings", {"input": [QUESTION]}),
    "classify": ("/predict", {"inputs": QUESTION}),
}


def example(settings: ResolvedSettings) -> str:
    """Example shell command; the API key comes from a shell variable."""
    path, body = _EXAMPLES[settings.task]
    if path.startswith("/v1/"):
        body = {"model": settings.served_model_name} | body
    key = """-H "Authorization: Bearer $API_KEY" """ if settings.api_key or settings.api_key_file else ""
    return f"curl {url(settings)}{path} -H 'Content-Type: application/json' {key}-d '{json.dumps(body)}'"
