"""The real shard, which goes wrong as a test says: a program that takes the model server's command line.

    python -m funitel_testing.faulty_shard serve MODEL --rank 0 ...

The file that FUNITEL_TEST_FAULTS names says what goes wrong: `Faults` writes it, at any time, and the shard looks at
it again before every step. Without the variable, or the file, nothing goes wrong. `faulty_launcher` starts such shards.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from funitel.model_server.__main__ import main

VARIABLE = "FUNITEL_TEST_FAULTS"
IN_FORWARD = ("raise", "no_memory", "memory_error", "hang", "slow", "held", "exit", "nan", "inf")
IN_ANSWER = ("garbage", "truncated", "stranger", "missing", "twice", "vocabulary", "ragged", "batch")
KINDS = (*IN_FORWARD, *IN_ANSWER)
STRANGER = 1 << 40  # id of a request that does not exist


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, and in which steps.

    `kind`, in the forward: "raise" a RuntimeError, "no_memory" torch's and "memory_error" Python's error, "hang" and
    "slow" for `seconds`, "held" until it is no longer among the faults, "exit" the process, "nan" or "inf" in the
    scores of every row with `text`. In the answer: "garbage" and "truncated" bytes, a token for a "stranger", a token
    "missing" or given "twice", one beyond the "vocabulary", "ragged" lists, or a "batch" of rows that are not in the
    step.
    """

    kind: str
    text: str = ""  # only in steps with a row that has this text in its prompt or completion
    rank: int | None = None  # only on this rank
    min_rows: int = 0  # only in steps of so many rows
    min_tokens: int = 0  # and tokens
    min_generated: int = 0  # only with a row that has so many tokens already
    times: int | None = None  # at most so often on a rank, over all processes that ever are that rank
    seconds: float = 3600.0

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"{self.kind} is none of {KINDS}"


class Faults:
    """The faults of every shard of a deployment, as a test sees them and as a shard does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._diary = path.with_name(f"{path.name}.fired")

    @property
    def environ(self) -> dict[str, str]:
        """What shards need in their environment."""
        return {VARIABLE: str(self.path)}

    def set(self, *faults: Fault) -> None:
        """Have these go wrong from the next step on, and nothing else."""
        written = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        written.write_text(json.dumps([asdict(fault) for fault in faults]))
        written.replace(self.path)

    def fired(self) -> list[dict[str, Any]]:
        """What went wrong so far, oldest first: the fields of the fault, and `by_rank`, `pid` and `time`."""
        return [json.loads(line) for line in self._diary.read_text().splitlines()] if self._diary.exists() else []

    def forget(self) -> None:
        """Let nothing have gone wrong so far; `times` begin anew."""
        self._diary.unlink(missing_ok=True)

    def get(self) -> list[Fault]:
        """What shall go wrong."""
        try:
            return [Fault(**fields) for fields in json.loads(self.path.read_text())]
        except FileNotFoundError:
            return []

    def note(self, fault: Fault, rank: int) -> None:
        """Write down that a fault has happened."""
        with self._diary.open("a") as diary:
            diary.write(json.dumps({**asdict(fault), "by_rank": rank, "pid": os.getpid(), "time": time.time()}) + "\n")


class FaultyForward:
    """The forward of an executor; stands in for it, and knows the rows of the step in flight."""

    def __init__(self, executor: Any, faults: Faults) -> None:
        self.rows: Sequence[tuple[Any, int]] = ()  # rows that compute, each with how many tokens
        self._executor = executor
        self._faults = faults
        self._decoder, self._compute = executor.runner.decoder, executor.sampling.compute
        executor.runner.decoder, executor.sampling.compute = self, self._noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def __call__(self, batch: Any, cache: Any) -> Any:
        fault = self.due(IN_FORWARD)
        if fault is not None:
            self._go_wrong(fault)
        logits = self._decoder(batch, cache)
        if fault is not None and fault.kind in ("nan", "inf") and logits is not None:
            self._spoil(logits, fault)
        return logits

    def due(self, kinds: tuple[str, ...]) -> Fault | None:
        """The first fault of `kinds` that is for this step; it is noted as having happened."""
        rank = self._executor.parallel.rank
        for fault in self._faults.get():
            if fault.kind in kinds and fault.rank in (None, rank) and self._fits(fault) and self._is_left(fault, rank):
                self._faults.note(fault, rank)
                return fault
        return None

    def _fits(self, fault: Fault) -> bool:
        if len(self.rows) < fault.min_rows or sum(count for _, count in self.rows) < fault.min_tokens:
            return False
        return any(self._is_struck(row, fault) for row, _ in self.rows)

    def _is_struck(self, row: Any, fault: Fault) -> bool:
        return row.num_generated >= fault.min_generated and fault.text in self._executor.codec.decode(row.tokens)

    def _is_left(self, fault: Fault, rank: int) -> bool:
        so_far = [one for one in self._faults.fired() if {**one, **asdict(fault)} == one and one["by_rank"] == rank]
        return fault.times is None or len(so_far) < fault.times

    def _noted(self, active: Any) -> Any:
        self.rows = active
        return self._compute(active)

    def _go_wrong(self, fault: Fault) -> None:
        import torch  # seconds to import, and there already once a step runs

        match fault.kind:
            case "raise":
                raise RuntimeError(f"told to raise {fault.text}".strip())
            case "no_memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate what there is not.")
            case "memory_error":
                raise MemoryError
            case "hang" | "slow":
                threading.Event().wait(fault.seconds)
            case "held":
                while fault in self._faults.get():
                    time.sleep(0.01)
            case "exit":
                os._exit(3)

    def _spoil(self, logits: Any, fault: Fault) -> None:
        at = 0
        for row, count in self.rows:
            size = count if row.owes_prompt_scores else int(count == row.num_pending)
            if self._is_struck(row, fault):
                logits[at : at + size, 7] = float(fault.kind)
            at += size


class Bytes:
    """An answer that was no message when it was encoded."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def SerializeToString(self) -> bytes:
        return self._payload


def lie(response: Any, kind: str) -> Any:
    """What is sent in place of an answer that has a token to give."""
    first = response.generations[0]
    match kind:
        case "garbage":
            return Bytes(b"\xff" * 64)
        case "truncated":
            return Bytes(response.SerializeToString()[:-5])
        case "stranger":
            first.request_id = STRANGER
        case "missing":
            del response.generations[0]
        case "twice":
            response.generations.append(first)
        case "vocabulary":
            first.tokens.ids[0] = 1 << 31
        case "ragged":
            first.tokens.texts.append("more")
        case "batch":
            response.batch.request_ids.append(STRANGER)
    return response


def infect(faults: Faults) -> None:
    """Have every executor that is loaded in this process go wrong by `faults`."""
    from funitel.model_server.loading import generator  # torch: seconds to import, not wanted for the download
    from funitel.model_server.rpc import dispatcher

    load, encode = generator.load_generator, dispatcher._encoded
    forwards: list[FaultyForward] = []

    def load_faulty(settings: Any, folder: Path) -> Any:
        executor, info = load(settings, folder)
        forwards.append(FaultyForward(executor, faults))
        return executor, info

    def encode_faulty(step: Any, response: Any, in_columns: bool) -> Any:
        encoded = encode(step, response, in_columns=False)
        fault = forwards[-1].due(IN_ANSWER) if encoded.generations else None
        return encoded if fault is None else lie(encoded, fault.kind)

    generator.load_generator = load_faulty
    dispatcher._encoded = encode_faulty


if __name__ == "__main__":
    if VARIABLE in os.environ and "serve" in sys.argv:
        infect(Faults(Path(os.environ[VARIABLE])))
    main()
