"""One rank of a test of drafts: an executor that speculates, and what sequences get from it, one after the other."""

import json
from pathlib import Path

import torch

from funitel_testing.drafters import run_drafted
from funitel_testing.executors import ids_of, load_executor, start


def serve_drafting(work: Path, rank: int) -> None:
    """Do the job of `work`; saves the texts of this rank's sequences, and how many drafts were made and accepted."""
    job = json.loads((work / "job.json").read_text())
    torch.set_num_threads(1)
    place = {"sharded": True, "rank": rank, "world_size": job["size"], "master_port": job["port"]}
    executor = load_executor(Path(job["folder"]), **job["settings"], **place)
    answers = {}
    for i, prompt in job["prompts"]:
        found, drafted, accepted = run_drafted(executor, [start(i, prompt, 16)], job["settings"]["speculate"])
        answers[i] = ids_of(found.get(i, [])), drafted, accepted
    (work / f"answers-{rank}.json").write_text(json.dumps(answers))
