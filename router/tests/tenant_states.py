"""States of tenants as the control plane says them: one user, ann, and what a test adds."""

import hashlib
from typing import Any

SECRET = "a secret"


def user(name: str = "ann", **fields: Any) -> dict[str, Any]:
    return {"name": name, "role": "user", "limits": {}, "generation": 0, "created": 1.0} | fields


def key(number: int = 1, text: str = "sesame", **fields: Any) -> dict[str, Any]:
    """A key as the control plane says it; its digest is that of `text`."""
    return {
        "id": number,
        "name": f"k{number}",
        "user": "ann",
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "routes": [],
        "models": [],
        "limits": {},
        "group": None,
        "expires": None,
        "is_banned": False,
    } | fields


def state(*keys: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = {"secret": SECRET, "users": [user()], "keys": list(keys), "prices": [], "ended_sessions": []}
    return content | {"watcher": 1, "version": 1} | fields
