"""What the releases of libraries decide: whether each module can be imported, and a model be served.

`make lowest` runs this with the lowest releases that pyproject.toml allows.
"""

import importlib
import importlib.util
import json
import pkgutil
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import funitel
from funitel_testing.servers import Server

MODULES = sorted(found.name for found in pkgutil.walk_packages(funitel.__path__, "funitel."))
KERNELS = "kernels"  # in the names of modules that import triton


def test_every_module_can_be_imported() -> None:
    without_triton = importlib.util.find_spec("triton") is None
    for module in MODULES:
        if module != "funitel.__main__" and not (without_triton and KERNELS in module):
            importlib.import_module(module)
    assert len(MODULES) > 300


def test_only_modules_of_kernels_import_triton() -> None:
    for module in MODULES:
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.origin is not None
        if KERNELS not in module:
            names = re.findall(r"^(?:import|from) (\w+)", Path(found.origin).read_text(), re.MULTILINE)
            assert "triton" not in names, module


def test_a_model_is_served(launch: Callable[..., Server], tiny_model: Path) -> None:
    server = launch("--model-id", str(tiny_model), "--device", "cpu")
    body = {"inputs": "a b", "parameters": {"max_new_tokens": 3, "grammar": {"type": "regex", "value": "[a-z ]+"}}}
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["generated_text"]
    assert server.metrics()["tgi_request_success"] == 1
    assert server.stop() == 0
