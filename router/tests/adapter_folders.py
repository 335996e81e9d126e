"""Folders in PEFT's layout with nothing in their weights, for routers, which never read them."""

import json
from pathlib import Path
from typing import Any

from funitel.router.adapters.folder import inspect
from funitel.router.core.request import Adapter


def write_adapter(folder: Path, **config: Any) -> Path:
    """Write the folder of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "base"} | config
    (folder / "adapter_config.json").write_text(json.dumps(content))
    (folder / "adapter_model.safetensors").write_bytes(b"{}")
    return folder


def adapters(folder: Path, count: int) -> list[Adapter]:
    """Write adapters named a0, a1 and so on, and look at them."""
    return [inspect(f"a{i}", write_adapter(folder / f"a{i}")).adapter for i in range(count)]
