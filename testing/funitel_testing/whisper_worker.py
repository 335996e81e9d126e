"""One rank of a Whisper, in a process of its own: what it writes for the sounds of a job, greedily, with timestamps.

`serve_rank` is the main function of a rank. It writes RANK.json: the completions of the requests that are this rank's
own, by number.
"""

import json
from pathlib import Path

from funitel.proto.step import Generation
from funitel_testing.executors import ids_of, prefill, run_out
from funitel_testing.tiny_whisper import hear, mel_of, sound, transcription, whisper_executor


def serve_rank(work: Path, rank: int) -> None:
    """Do the job of `work`."""
    job = json.loads((work / "job.json").read_text())
    folder = Path(job["folder"])
    ranks = {"sharded": True, "rank": rank, "world_size": job["size"], "master_port": job["port"]}
    executor = whisper_executor(folder, **ranks)
    keys = [hear(executor, mel_of(folder, sound(seconds, int(seed)))) for seconds, seed in job["sounds"]]
    starts = [transcription(i, key, job["opening"], with_timestamps=True) for i, key in enumerate(keys)]
    found: dict[int, list[Generation]] = {}
    run_out(executor, prefill(executor, 1, starts), found)
    executor.parallel.leave()
    (work / f"{rank}.json").write_text(json.dumps({i: ids_of(generations) for i, generations in found.items()}))
