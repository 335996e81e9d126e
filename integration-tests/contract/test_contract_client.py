"""The contract client against a fake shard: a deterministic toy model under the contract's cache rules.

The contract's protobuf code and the product's cannot live in one process. So under the repository's pytest
this module imports neither: it has one test, which runs the module as a script, and that runs pytest on it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

HERE = Path(__file__).resolve()
OWN_PROCESS = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve() == HERE

if OWN_PROCESS or TYPE_CHECKING:
    sys.path.insert(0, str(HERE.parent))
    import client
    import contract_v3_pb2 as pb
    import contract_v3_pb2_grpc as pb_grpc

EOS, VOCAB = 7, 97
LIMITS = ["--max-input-tokens", "1500", "--max-total-tokens", "1600"]


# --- the toy model: a token is a byte, the next one a hash of all the tokens found in the cache slots


@dataclass
class Row:
    """A request on the shard."""

    request: pb.Request
    prompt: list[int]
    cached: int
    chunk: int | None
    new: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def prefilling(self) -> bool:
        return self.cached < len(self.prompt)

    def samples(self) -> bool:
        asked = self.request.parameters
        return asked.do_sample or asked.temperature != 1.0 or asked.top_k != 0 or asked.top_p < 1.0


@dataclass
class Flaws:
    """Ways in which a shard may break the contract; the tests switch one on and expect to hear of it."""

    keeps_popped_batches: bool = False
    mixes_slots: bool = False
    emits_everything: bool = False
    wrong_not_found: bool = False
    seed_always: bool = False
    drops_finished: bool = False


class FakeShard:
    """One rank. Keeps tokens in KV slots, so that overlapping or misnumbered slots change what comes out."""

    def __init__(self, rank: int, urls: list[str], chunking: bool, padded: bool, flaws: Flaws) -> None:
        self.rank, self.urls, self.chunking, self.padded, self.flaws = rank, urls, chunking, padded, flaws
        self.cache: dict[int, list[Row]] = {}
        self.kv: dict[int, int] = {}
        self.block_size = 1 if chunking else 16
        self.max_prefill = 0
        self.takes_spare_slots = False
        self.calls: list[Any] = []
        self.lock = threading.Lock()

    # -- the service

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:
        return pb.InfoResponse(
            requires_padding=self.padded,
            dtype="torch.float32",
            device_type="cpu",
            support_chunking=self.chunking,
            use_prefix_caching=self.chunking,
            attention_impl="flashinfer" if self.chunking else "paged",
            block_size=self.block_size,
        )

    def ServiceDiscovery(self, request: Any, context: grpc.ServicerContext) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=self.urls)

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
        return pb.HealthResponse()

    def ClearCache(self, request: pb.ClearCacheRequest, context: grpc.ServicerContext) -> pb.ClearCacheResponse:
        if request.HasField("id"):
            self.cache.pop(request.id, None)
        else:
            self.cache.clear()
        return pb.ClearCacheResponse()

    def Warmup(self, request: pb.WarmupRequest, context: grpc.ServicerContext) -> pb.WarmupResponse:
        self.calls.append(request)
        self.max_prefill = request.max_prefill_tokens
        return pb.WarmupResponse(
            max_supported_total_tokens=None if self.padded else 8192 - 16 * self.rank,
            max_input_tokens=request.max_input_tokens,
            max_total_tokens=request.max_total_tokens,
        )

    def FilterBatch(self, request: pb.FilterBatchRequest, context: grpc.ServicerContext) -> pb.FilterBatchResponse:
        rows = self.pop(request.batch_id, context)
        if not request.request_ids:
            context.abort(grpc.StatusCode.INTERNAL, "no requests to keep")
        self.cache[request.batch_id] = [row for row in rows if row.request.id in request.request_ids]
        return pb.FilterBatchResponse(batch=self.describe(request.batch_id))

    def Prefill(self, request: pb.PrefillRequest, context: grpc.ServicerContext) -> pb.PrefillResponse:
        self.calls.append(request)
        earlier, batch_id = [], request.batch.id
        if request.HasField("cached_batch"):
            batch_id = request.cached_batch.id
            earlier = self.pop(batch_id, context)
        rows = earlier + [self.row_of(asked) for asked in request.batch.requests]
        if request.batch.size != len(request.batch.requests):
            context.abort(grpc.StatusCode.INTERNAL, "size is not the number of requests")
        concat = 1 if request.HasField("cached_batch") else None
        return pb.PrefillResponse(**self.step(batch_id, rows), concat_ns=concat)

    def Decode(self, request: pb.DecodeRequest, context: grpc.ServicerContext) -> pb.DecodeResponse:
        rows = [row for batch in request.batches for row in self.pop(batch.id, context)]
        concat = 1 if len(request.batches) > 1 else None
        return pb.DecodeResponse(**self.step(request.batches[0].id, rows), concat_ns=concat)

    # -- the cache and the steps

    def pop(self, batch_id: int, context: grpc.ServicerContext) -> list[Row]:
        if batch_id not in self.cache:
            text = "no such batch" if self.flaws.wrong_not_found else f"Batch ID {batch_id} not found in cache"
            context.abort(grpc.StatusCode.INTERNAL, text)
        return self.cache[batch_id] if self.flaws.keeps_popped_batches else self.cache.pop(batch_id)

    def row_of(self, asked: pb.Request) -> Row:
        prompt = list(asked.inputs.encode())[-asked.truncate :]
        if "".join(chunk.text for chunk in asked.input_chunks.chunks) != asked.inputs:
            raise ValueError("input_chunks and inputs differ")
        reserved = len(prompt) + asked.stopping_parameters.max_new_tokens - 1
        spare = len(asked.slots) - reserved
        if not self.padded and (spare < 0 or (spare > 0 and not self.takes_spare_slots)):
            raise ValueError(f"{len(asked.slots)} slots for {reserved} tokens")
        if any(slot // self.block_size not in asked.blocks or slot < self.block_size for slot in asked.slots):
            raise ValueError("a slot outside the request's blocks")
        return Row(asked, prompt, asked.cache_len, asked.chunk_len if asked.HasField("chunk_len") else None)

    def forward_tokens(self, row: Row, size: int) -> int:
        if not row.prefilling:
            return 1
        budget = row.chunk if row.chunk is not None else max(1, self.max_prefill - (size - 1))
        return min(len(row.prompt) - row.cached, budget)

    def slot(self, row: Row, position: int) -> int:
        if self.padded:
            return (row.request.id + 1) * 10_000 + position
        return row.request.slots[position]

    def step(self, batch_id: int, rows: list[Row]) -> dict[str, Any]:
        generations = []
        for index, row in enumerate(rows):
            count = self.forward_tokens(row, len(rows))
            row.chunk = None
            tokens = row.prompt + row.new
            if row.finished:
                continue
            for position in range(row.cached, row.cached + count):
                place = rows[0] if self.flaws.mixes_slots and position < len(rows[0].request.slots) else row
                self.kv[self.slot(place, position)] = tokens[position]
            row.cached += count
            if not row.prefilling:
                generation = self.choose(row)
                owner = (index if self.padded else row.request.id) % len(self.urls)
                if owner == self.rank or self.flaws.emits_everything:
                    generations.append(generation)
        done = all(row.finished for row in rows)
        if self.flaws.drops_finished:
            rows = [row for row in rows if not row.finished]
        if not done:
            self.cache[batch_id] = rows
        times = {"forward_ns": 10, "decode_ns": 1, "total_ns": 12 + self.rank}
        return {"generations": generations, "batch": None if done else self.describe(batch_id), **times}

    def choose(self, row: Row) -> pb.Generation:
        asked, seen = row.request, [self.kv[self.slot(row, position)] for position in range(row.cached)]
        drawn = asked.parameters.seed if row.samples() else 0
        token = (zlib.crc32(bytes(seen)) + drawn) % VOCAB
        row.new.append(token)
        top = []
        if asked.top_n_tokens:
            ids = [(token + offset) % VOCAB for offset in range(asked.top_n_tokens)]
            top = [pb.Tokens(ids=ids, logprobs=[-float(i) for i in range(len(ids))], texts=map(text_of, ids))]
            top[0].is_special.extend(i == EOS for i in ids)
        return pb.Generation(
            request_id=asked.id,
            prefill_tokens=self.details(row) if asked.prefill_logprobs and len(row.new) == 1 else None,
            tokens=pb.Tokens(ids=[token], logprobs=[-0.5], texts=[text_of(token)], is_special=[token == EOS]),
            generated_text=self.end(row),
            top_tokens=top,
        )

    def details(self, row: Row) -> pb.Tokens:
        logprobs = [float("nan")] + [-1.0] * (len(row.prompt) - 1)
        return pb.Tokens(ids=row.prompt, logprobs=logprobs, texts=[chr(token) for token in row.prompt])

    def end(self, row: Row) -> pb.GeneratedText | None:
        stopping = row.request.stopping_parameters
        text = "".join(text_of(token) for token in row.new if token != EOS)
        if len(row.new) >= stopping.max_new_tokens:
            reason = pb.FINISH_REASON_LENGTH
        elif row.new[-1] == EOS and not stopping.ignore_eos_token:
            reason = pb.FINISH_REASON_EOS_TOKEN
        elif any(text.endswith(stop) for stop in stopping.stop_sequences):
            reason = pb.FINISH_REASON_STOP_SEQUENCE
        else:
            return None
        row.finished = True
        seed = row.request.parameters.seed if row.samples() or self.flaws.seed_always else None
        return pb.GeneratedText(text=text, generated_tokens=len(row.new), finish_reason=reason, seed=seed)

    def describe(self, batch_id: int) -> pb.CachedBatch:
        rows = self.cache[batch_id]
        return pb.CachedBatch(
            id=batch_id,
            request_ids=[row.request.id for row in rows],
            size=len(rows),
            max_tokens=sum(len(row.request.blocks) for row in rows) * self.block_size,
            current_tokens=sum(self.forward_tokens(row, len(rows)) for row in rows),
        )


def text_of(token: int) -> str:
    return "</s>" if token == EOS else f" w{token}."


@dataclass
class Replica:
    prefix: str
    shards: list[FakeShard]


Serve = Callable[..., contextlib.AbstractContextManager[Replica]]


@contextlib.contextmanager
def serve_replica(
    folder: Path, *, ranks: int = 1, chunking: bool = True, padded: bool = False, flaws: Any = None
) -> Iterator[Replica]:
    """Serve the ranks on sockets FOLDER/s-0, FOLDER/s-1, ..., one call at a time each."""
    urls = [f"unix://{folder}/s-{rank}" for rank in range(ranks)]
    shards = [FakeShard(rank, urls, chunking, padded, flaws or Flaws()) for rank in range(ranks)]
    servers = []
    for shard, url in zip(shards, urls, strict=True):
        server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.max_receive_message_length", -1)])
        pb_grpc.add_TextGenerationServiceServicer_to_server(shard, server)  # type: ignore[no-untyped-call]
        server.add_insecure_port(url.replace("unix://", "unix:"))
        server.start()
        servers.append(server)
    try:
        yield Replica(f"{folder}/s", shards)
    finally:
        for server in servers:
            server.stop(None).wait()


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    return partial(serve_replica, tmp_path)


def run_client(
    replica: Replica, capsys: pytest.CaptureFixture[str], tmp_path: Path, *extra: str
) -> tuple[int, dict[str, Any]]:
    """Run the client's main with a tokenizer for the toy model (a token is a byte)."""
    args = ["--uds", replica.prefix, *LIMITS, "--tokenizer", str(byte_tokenizer(tmp_path)), *extra]
    prompts = tmp_path / "prompts.json"
    texts = ["Hello there", "def f(x):\n    return", "a b c d", "0123456789 " * 9]
    prompts.write_text(json.dumps([{"name": text.split()[0], "prompt": text} for text in texts]))
    code = client.main([*args, "--prompts", str(prompts)])
    return code, json.loads(capsys.readouterr().out)


def byte_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def failed_checks(report: dict[str, Any]) -> dict[str, Any]:
    return {check["name"]: check["failures"] for check in report["checks"] if not check["ok"]}


class TestAllocator:
    __test__ = OWN_PROCESS

    def test_block_0_is_reserved_and_the_free_list_is_used_from_its_end(self) -> None:
        allocator = client.BlockAllocator(num_blocks=6, block_size=4)
        assert allocator.num_free == 5
        assert allocator.allocate(5) == [4, 5]
        assert allocator.allocate(12) == [1, 2, 3]
        with pytest.raises(MemoryError, match="1 tokens want 1 blocks, 0 are free"):
            allocator.allocate(1)

    def test_slots_are_the_expansion_truncated_to_the_tokens(self) -> None:
        allocator = client.BlockAllocator(num_blocks=9, block_size=4)
        assert allocator.slots([7, 2], 6) == [28, 29, 30, 31, 8, 9]

    def test_slots_repeat_over_a_window(self) -> None:
        allocator = client.BlockAllocator(num_blocks=9, block_size=2, window_size=4)
        blocks = allocator.allocate(7)
        assert blocks == [7, 8]
        assert allocator.slots(blocks, 7) == [14, 15, 16, 17, 14, 15, 16]

    def test_prefix_blocks_come_first_and_are_not_taken_again(self) -> None:
        allocator = client.BlockAllocator(num_blocks=9, block_size=4)
        first = allocator.allocate(8)
        assert allocator.allocate(10, prefix=first[:1]) == [first[0], 5, 6]
        assert allocator.allocate(4, prefix=first[:1]) == [first[0]]

    def test_freeing_twice_is_noticed(self) -> None:
        allocator = client.BlockAllocator(num_blocks=9, block_size=4)
        blocks = allocator.allocate(8)
        allocator.free(blocks)
        assert allocator.num_free == 8
        with pytest.raises(ValueError, match="freed twice"):
            allocator.free(blocks)


class TestMessages:
    __test__ = OWN_PROCESS

    def test_the_warmup_batch_fills_the_prefill_budget(self) -> None:
        batch = client.warmup_batch(100, 250, 160, None, image=True)
        assert [request.truncate for request in batch.requests] == [100, 100, 50]
        assert [request.stopping_parameters.max_new_tokens for request in batch.requests] == [60, 60, 110]
        assert batch.size == 3
        for request in batch.requests:
            assert request.id == 0
            assert not request.blocks
            assert not request.slots
            assert request.prefill_logprobs
            assert request.top_n_tokens == 20
            assert request.stopping_parameters.ignore_eos_token
            assert request.parameters == client.WARMUP_PARAMS.to_proto()
        kinds = [[chunk.WhichOneof("chunk") for chunk in r.input_chunks.chunks] for r in batch.requests]
        assert kinds == [["text", "image"], ["text"], ["text"]]
        image = batch.requests[0].input_chunks.chunks[1].image
        assert image.data.startswith(b"\x89PNG")
        assert image.mimetype == "image/jpeg;base64"
        assert "![](data:image/jpeg;base64,iVBOR" in batch.requests[0].inputs

    def test_the_warmup_batch_without_known_limits(self) -> None:
        batch = client.warmup_batch(None, 250, None, None, image=False)
        assert [request.truncate for request in batch.requests] == [250]
        assert batch.requests[0].stopping_parameters.max_new_tokens == 1

    def test_the_warmup_batch_stops_at_the_batch_size(self) -> None:
        assert client.warmup_batch(10, 250, None, 4, image=False).size == 4

    def test_the_png_is_one_pixel(self) -> None:
        left, sections = client.tiny_png()[8:], {}
        while left:
            length = int.from_bytes(left[:4])
            assert zlib.crc32(left[4 : 8 + length]) == int.from_bytes(left[8 + length : 12 + length])
            sections[left[4:8]] = left[8 : 8 + length]
            left = left[12 + length :]
        assert list(sections) == [b"IHDR", b"IDAT", b"IEND"]
        assert sections[b"IHDR"].startswith(b"\0\0\0\1\0\0\0\1")
        assert zlib.decompress(sections[b"IDAT"]) == b"\0\0\0\0"

    def test_neutral_sampling_params(self) -> None:
        neutral = pb.NextTokenChooserParameters(temperature=1, top_p=1, typical_p=1, repetition_penalty=1)
        assert client.GREEDY.to_proto() == neutral
        assert not client.GREEDY.samples
        assert client.SEEDED.samples


class TestScenario:
    __test__ = OWN_PROCESS

    @pytest.mark.parametrize("ranks", [1, 2, 3])
    @pytest.mark.parametrize("chunking", [True, False])
    def test_a_sound_replica_passes(
        self, serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path, ranks: int, chunking: bool
    ) -> None:
        with serve(ranks=ranks, chunking=chunking) as replica:
            code, report = run_client(replica, capsys, tmp_path, "--prefill-details", "yes")
            assert not any(shard.cache for shard in replica.shards)
        assert failed_checks(report) == {}
        assert code == 0
        expected = {"max_supported_total_tokens": 8192 - 16 * (ranks - 1), "max_input_tokens": 1500}
        assert report["warmup"] == expected | {"max_total_tokens": 1600}
        names = {check["name"] for check in report["checks"] if check["count"]}
        assert {
            "scenario.ran_to_its_end",
            "prefill.first_logprob_is_nan",
            "greedy.same_in_company_as_alone",
        } <= names
        assert ("chunk.tokens_appear" in names) == chunking
        assert ("prefix.ran" in names) == chunking

    def test_a_small_prefill_budget_takes_several_chunks(
        self, serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        with serve(ranks=2) as replica:
            code, report = run_client(replica, capsys, tmp_path, "--max-prefill-tokens", "16")
        assert failed_checks(report) == {}
        assert code == 0

    def test_without_a_tokenizer_lengths_are_upper_bounds(
        self, serve: Serve, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with serve(ranks=2) as replica:
            for shard in replica.shards:
                shard.takes_spare_slots = True
            code = client.main(["--uds", replica.prefix, *LIMITS])
        assert failed_checks(json.loads(capsys.readouterr().out)) == {}
        assert code == 0

    def test_a_padded_replica_passes_without_blocks(
        self, serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        with serve(ranks=2, chunking=False, padded=True) as replica:
            code, report = run_client(replica, capsys, tmp_path)
            prefills = [call for call in replica.shards[0].calls if isinstance(call, pb.PrefillRequest)]
        assert failed_checks(report) == {}
        assert not any(request.blocks or request.slots for call in prefills for request in call.batch.requests)

    def test_no_two_live_requests_share_a_block(
        self, serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        with serve() as replica:
            run_client(replica, capsys, tmp_path)
            for call in replica.shards[0].calls:
                requests = call.batch.requests
                blocks = [block for request in requests for block in request.blocks]
                assert len(blocks) == len(set(blocks))
                assert 0 not in blocks

    @pytest.mark.parametrize(
        ("flaw", "check"),
        [
            ("keeps_popped_batches", "decode_of_a_concatenated_batch.fails"),
            ("emits_everything", "generation.exactly_once_across_shards"),
            ("wrong_not_found", "decode_of_an_unknown_batch.text"),
            ("seed_always", "end.seed_only_when_sampling"),
            ("mixes_slots", "greedy.same_in_company_as_alone"),
            ("drops_finished", "partial.finished_stays_until_filter"),
        ],
    )
    def test_a_flaw_is_reported(
        self, serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path, flaw: str, check: str
    ) -> None:
        with serve(ranks=2, flaws=Flaws(**{flaw: True})) as replica:
            code, report = run_client(replica, capsys, tmp_path)
        assert code == 1
        assert check in failed_checks(report)
        assert report["num_failed"] == len(failed_checks(report))

    def test_the_oracle_is_compared_up_to_a_near_tie(
        self, serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        with serve() as replica:
            _, report = run_client(replica, capsys, tmp_path)
            solo = [r for r in report["requests"] if r["label"].startswith("solo/greedy/")]
            rows = [
                {"name": r["prompt"], "completion_ids": r["token_ids"], "gaps": [1.0] * len(r["token_ids"])}
                | {"finish_reason": "length"}
                for r in solo
            ]
            rows[0]["completion_ids"][3] += 1
            oracle = tmp_path / "oracle.json"
            oracle.write_text(json.dumps({"completions": rows}))
            code, report = run_client(replica, capsys, tmp_path, "--oracle", str(oracle))
            assert (code, list(failed_checks(report))) == (1, ["greedy.same_as_the_oracle"])
            rows[0]["gaps"][3] = 1e-5
            oracle.write_text(json.dumps({"completions": rows}))
            code, report = run_client(replica, capsys, tmp_path, "--oracle", str(oracle))
            assert (code, failed_checks(report)) == (0, {})

    def test_a_shard_that_is_not_there_is_reported(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        code = client.main(["--uds", str(tmp_path / "none"), "--timeout-seconds", "0.3"])
        assert code == 1
        assert list(failed_checks(json.loads(capsys.readouterr().out))) == ["scenario.ran_to_its_end"]


class TestClient:
    __test__ = OWN_PROCESS

    def test_a_failing_shard_is_named(self, serve: Serve) -> None:
        with serve(ranks=2) as replica, client.ContractClient(replica.prefix) as shards:
            unknown = pb.CachedBatch(id=5)
            with pytest.raises(client.ShardError, match="rank 1: INTERNAL: Batch ID 5 not found in cache") as error:
                shards.decode([unknown])
            assert sorted(error.value.failures) == [0, 1]

    def test_the_last_shard_s_generations_come_first(self, serve: Serve) -> None:
        with serve(ranks=3) as replica, client.ContractClient(replica.prefix) as shards:
            info = shards.info()
            shards.warmup(100, 100, 200)
            limits = client.Limits(max_input_tokens=100, max_prefill_tokens=100, max_total_tokens=200)
            session = client.Session(shards, info, limits, 4096, client.Checks(), lambda p: len(p.text))
            members = [session.request(str(i), client.Prompt(str(i), "abc"), 5) for i in range(3)]
            step = shards.prefill(session.batch_of(members))
            assert [generation.request_id for generation in step.generations] == [2, 0, 1]
            assert step.timings.total_ns == 14
            assert step.batch is not None
            assert list(step.batch.request_ids) == [0, 1, 2]

    def test_calls_time_out(self, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
        def slow(self: FakeShard, request: Any, context: grpc.ServicerContext) -> pb.HealthResponse:
            time.sleep(1)
            return pb.HealthResponse()

        monkeypatch.setattr(FakeShard, "Health", slow)
        with serve() as replica, client.ContractClient(replica.prefix, timeout_seconds=0.3) as shards:
            with pytest.raises(client.ShardError, match="DEADLINE_EXCEEDED"):
                shards.health()


class TestInItsOwnProcess:
    __test__ = not OWN_PROCESS

    def test_contract_client(self) -> None:
        done = subprocess.run([sys.executable, str(HERE)], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


if __name__ == "__main__":
    own = ["--noconftest", "-p", "no:cacheprovider", "--import-mode=importlib", "-o", "addopts=", "-q"]
    sys.exit(pytest.main([*own, *sys.argv[1:], str(HERE)]))
