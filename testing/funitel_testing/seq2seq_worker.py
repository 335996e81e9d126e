"""One rank of an encoder-decoder, in a process of its own: what it writes for the prompts of a job, greedily.

Usage: seq2seq_worker.py FOLDER_WITH_JOB RANK. Writes RANK.json: for each folder of the job the completions of the
requests that are this rank's own, by number.
"""

import json
import sys
from pathlib import Path

from funitel.proto.step import Generation
from funitel_testing.executors import ids_of, load_executor, run_out, start


def main() -> None:
    work, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads((work / "job.json").read_text())
    completions = []
    for place, folder in enumerate(job["folders"]):
        ranks = {"sharded": True, "rank": rank, "world_size": job["size"], "master_port": job["ports"][place]}
        executor = load_executor(Path(folder), **ranks)
        starts = [start(i, ids, job["count"], ignore_eos=False) for i, ids in enumerate(job["prompts"])]
        found: dict[int, list[Generation]] = {}
        run_out(executor, executor.prefill(1, starts), found)
        completions.append({i: ids_of(generations) for i, generations in found.items()})
        executor.parallel.leave()
    (work / f"{rank}.json").write_text(json.dumps(completions))


if __name__ == "__main__":
    main()
