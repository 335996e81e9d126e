"""What a warm start of a whole deployment reads, writes and imports, process by process."""

import os
from pathlib import Path

import httpx

from funitel_testing.servers import PLAIN, serving, wait_until
from funitel_testing.tiny import save_tiny

CONTROL_PLANE_SECONDS = 60.0  # after the server is ready, in which it is imported beside the model

# `site` runs it in each process of a deployment: it tells how many modules are imported when the process ends.
COUNTS_MODULES = """
import atexit, os, sys
def tell():
    with open(os.path.join({folder!r}, str(os.getpid())), "w") as file:
        file.write(str(len(sys.modules)))
atexit.register(tell)
"""


def measure(folder: Path) -> dict[str, float | str]:
    """Rows of the start of a deployment of a tiny model."""
    model = folder / "model"
    model.mkdir()
    save_tiny("llama", model)
    (folder / "sitecustomize.py").write_text(COUNTS_MODULES.format(folder=str(folder)))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    rows: dict[str, float | str] = {}
    flags = ("--model-id", str(model), "--num-threads", "1")
    with serving(folder, *flags, environ={"PYTHONPATH": path}) as server:
        pids = {"launcher": server.process.pid, "router": server.router_pid(), "shard": server.shard_pids()[0]}
        # The launcher imports it in a thread, which the end of the process would cut off anywhere.
        workers = f"{server.url}/v1/workers"
        wait_until(lambda: httpx.get(workers, verify=PLAIN).status_code == 200, CONTROL_PLANE_SECONDS, workers)
        for name, pid in pids.items():
            fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
            rows[f"{name} KiB read"] = int(fields["rchar"]) / 1024
            rows[f"{name} KiB written"] = int(fields["wchar"]) / 1024
    return rows | {f"{name} modules": int((folder / str(pid)).read_text()) for name, pid in pids.items()}
