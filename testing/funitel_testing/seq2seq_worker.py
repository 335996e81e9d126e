"""One rank of an encoder-decoder, in a process of its own: what it writes for the prompts of a job, greedily.

`serve_rank` is the main function of a rank. It writes RANK.json: for each folder of the job the completions of the
requests that are this rank's own, by number.
"""

import json
from pathlib import Path

from funitel.proto.step import Generation
from funitel_testing.executors import ids_of, load_executor, prefill, run_out, start


def serve_rank(work: Path, rank: int) -> None:
    """Do the job of `work`."""
    job = json.loads((work / "job.json").read_text())
    completions = []
    for place, folder in enumerate(job["folders"]):
        ranks = {"sharded": True, "rank": rank, "world_size": job["size"], "master_port": job["ports"][place]}
        executor = load_executor(Path(folder), **ranks)
        starts = [start(i, ids, job["count"], ignore_eos=False) for i, ids in enumerate(job["prompts"])]
        found: dict[int, list[Generation]] = {}
        run_out(executor, prefill(executor, 1, starts), found)
        completions.append({i: ids_of(generations) for i, generations in found.items()})
        executor.parallel.leave()
    (work / f"{rank}.json").write_text(json.dumps(completions))
