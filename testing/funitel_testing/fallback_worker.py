"""One rank of models that run through transformers, in a process of its own: logits of every position of the prompts.

`serve_rank` is the main function of a rank. It writes RANK.pt: for each folder of the job the logits of every prompt,
which are empty on all ranks but the first, the way the model is served, and what weights the rank holds.
"""

import json
from pathlib import Path

import torch

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel_testing.fallback import load
from funitel_testing.forward_worker import step_through


def serve_rank(work: Path, rank: int) -> None:
    """Do the job of `work`."""
    job = json.loads((work / "job.json").read_text())
    torch.set_num_threads(1)
    parallel = TensorParallel.join(rank, job["size"], "127.0.0.1", job["port"], torch.device("cpu"))
    found = []
    for folder in job["folders"]:
        model = load(Path(folder), parallel, rank=rank, world_size=job["size"], sharded=True)
        chunk = 11 if model.takes_chunks else max(map(len, job["prompts"]))
        logits = step_through(model.loaded.decoder, model.pools.make(200), job["prompts"], job["num_decode"], chunk)
        footprint = model.loaded.footprint
        facts = (footprint.held_bytes, footprint.sharded_bytes, footprint.total_sharded_bytes)
        found.append((logits, model.loaded.name, facts, model.pools.bytes_per_block))
    torch.save(found, work / f"{rank}.pt")
    parallel.leave()
