"""Every metric of the router, by TGI's names where TGI has one, so that its dashboards keep working.

Knows neither the engine nor HTTP, which call the small methods below. Each `Metrics` has a registry, so that routers in
one process do not share numbers.
"""

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    generate_latest,
)

from funitel.proto.errors import FunitelError
from funitel.proto.step import ShardMemory, StepResult
from funitel.router.core.request import Limits
from funitel.router.core.stream import Timings
from funitel.router.telemetry.adapter_metrics import AdapterMetrics
from funitel.router.telemetry.collectors import FastCounter, FastHistogram, FastSummary
from funitel.router.telemetry.live import LiveNumbers
from funitel.router.telemetry.media_metrics import MediaMetrics
from funitel.router.telemetry.model_states import ModelStates
from funitel.router.telemetry.recent_requests import RecentRequests
from funitel.router.telemetry.replica_metrics import RankNumbers, ReplicaMetrics, ReplicaNumbers
from funitel.router.telemetry.roofline import Roofline

CONTENT_TYPE = CONTENT_TYPE_LATEST
DURATION_BUCKETS = tuple(0.0001 * 1.5**k for k in range(1, 36))  # TGI's, 0.15 ms .. 146 s
LOAD_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
UNKNOWN_LIMIT = 2048  # scale of the token histograms until the limits are measured

# prometheus_client adds `_total` to every counter; TGI's names have no suffix.
_TGI_COUNTER = re.compile(rb"^((?:# (?:HELP|TYPE) )?tgi_\w+)_total(?=[ {])", re.MULTILINE)

disable_created_metrics()  # type: ignore[no-untyped-call]


def _linear(top: int) -> tuple[float, ...]:
    """TGI's hundred equal buckets up to `top`."""
    return tuple(top * k / 100 for k in range(1, 101))


def with_names_of_tgi(page: bytes) -> bytes:
    """Return a page of metrics with the names that TGI's counters have there."""
    return _TGI_COUNTER.sub(rb"\1", page)


def _drop(gauge: Gauge, *labels: str) -> None:
    """Forget a series of a gauge, if it is there."""
    with suppress(KeyError):
        gauge.remove(*labels)


class Metrics:
    """Counters, gauges and histograms of one router. Not thread-safe: call it on the event loop."""

    _first_rank = 0  # ranks are numbered across replicas: those of a second replica of two shards are 2 and 3
    _num_ranks = 0
    _parts: dict[Gauge, float] | None = None  # of each gauge, what one of several replicas adds to it
    _of_replica: ReplicaNumbers | None = None  # those of the replica, where it is one's metrics
    _is_removed = False

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.recent = RecentRequests()
        self._make_request_metrics()
        self._make_batch_metrics()
        self._make_engine_metrics()
        self._make_token_histograms(UNKNOWN_LIMIT, UNKNOWN_LIMIT)

    def child(self, replica_id: int | None = None, num_ranks: int = 0) -> "Metrics":
        """Return the metrics of one of several replicas: the same series, but each gauge is the sum of all children.

        Args:
            replica_id: of the replica, which has series of its own too; None for what is none.
            num_ranks: of the replica; they get numbers that no rank of another one has.
        """
        child = copy(self)
        child._parts = {}
        if replica_id is not None:
            child._first_rank, child._num_ranks = self._ranks.take(num_ranks), num_ranks
            child._of_replica = self.replicas.add(replica_id)
        return child

    def retire(self) -> None:
        """Take the parts of this replica out of every gauge: it is lost."""
        for gauge in tuple(self._parts or ()):
            self._set(gauge, 0)
        if self._of_replica is not None:
            self._of_replica.retire()

    def remove(self) -> None:
        """Take every series of this replica and of its ranks away: it does not come back."""
        if self._is_removed or self._of_replica is None:
            return
        self.retire()
        self._is_removed = True
        self.replicas.remove(self._of_replica)
        self._ranks.give_back(self._first_rank, self._num_ranks)
        for rank in map(str, range(self._first_rank, self._first_rank + self._num_ranks)):
            for gauge in (self._weight_bytes, self._sharded_weight_bytes, self._kv_bytes):
                _drop(gauge, rank)
            _drop(self._memory, rank, "resident")
            _drop(self._memory, rank, "peak")
            self._forwards.remove(rank)
            self.roofline.remove(int(rank))

    def _set(self, gauge: Gauge, value: float) -> None:
        if self._is_removed:
            return
        if self._parts is None:
            gauge.set(value)
            return
        gauge.inc(value - self._parts.get(gauge, 0))
        self._parts[gauge] = value

    def _set_of_rank(self, gauge: Gauge, rank: int, value: float, *labels: str) -> None:
        """Set what one rank of this replica has, unless it is removed: then its number may be another one's."""
        if not self._is_removed:
            self._set(gauge.labels(self._first_rank + rank, *labels), value)

    def exposition(self) -> bytes:
        """Render everything in Prometheus' text format."""
        return with_names_of_tgi(generate_latest(self.registry))

    def live(self) -> LiveNumbers:
        """What the console shows of a model: the same numbers as `exposition`, without its text."""
        num_steps, step_seconds = self._step_duration.total
        return LiveNumbers(
            requests=int(self._request_count.total),
            queried_tokens=int(self._prefix_queried.total),
            cached_tokens=int(self._prefix_hits.total),
            steps=int(num_steps),
            step_seconds=step_seconds,
            replicas=self.replicas.numbers(),
        )

    # Requests

    def set_limits(self, limits: Limits) -> None:
        """Scale the token histograms to the measured limits, and reset them; a child leaves that to its parent."""
        if self._parts is not None:
            return
        for histogram in (self._input_length, self._generated_tokens, self._max_new_tokens):
            self.registry.unregister(histogram)
        self._make_token_histograms(limits.max_input_tokens, limits.max_total_tokens)

    def set_connections(self, count: int) -> None:
        """Set how many connections are open."""
        self._connections.set(count)

    def count_cut(self, reason: str) -> None:
        """Count a connection that was refused or closed by a limit."""
        self._cut.labels(reason).inc()

    def count_request(self) -> None:
        """Note that a request for a generation arrived."""
        self._request_count.inc()

    def count_response(self, route: str, status: int) -> None:
        """Count an answer that began."""
        self._responses.inc(1, route, str(status))

    @contextmanager
    def counting_failures(self) -> Iterator[None]:
        """Count what leaves the block as an error, by its `metric`; leaving by cancellation is `dropped`."""
        try:
            yield
        except FunitelError as error:
            self._request_failure.labels(error.metric).inc()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._request_failure.labels("dropped").inc()
            raise
        except Exception:
            self._request_failure.labels(FunitelError.metric).inc()
            raise

    def count_aborted(self) -> None:
        """Count a request that was ended, by its id, before its answer was whole."""
        self._request_failure.labels("aborted").inc()

    def observe_prompt(self, num_tokens: int, max_new_tokens: int) -> None:
        """Note the lengths of a request that passed validation."""
        self._input_length.observe(num_tokens)
        self._max_new_tokens.observe(max_new_tokens)

    def observe_first_token(self, seconds: float, num_tokens: int) -> None:
        """Note the time from submission to a request's first token, and how many came with it."""
        self._first_token.observe(seconds)
        self._skipped_tokens.observe(num_tokens - 1)

    def observe_next_token(self, seconds: float, num_tokens: int) -> None:
        """Note the time between two tokens of one request, and how many came with the second."""
        self._inter_token.observe(seconds)
        self._skipped_tokens.observe(num_tokens - 1)

    def observe_success(self, validation_seconds: float, timings: Timings, num_tokens: int) -> None:
        """Note that a request got its whole answer of so many tokens."""
        inference = timings.inference_seconds
        queue = timings.queue_seconds
        self._request_success.inc()
        self._request_duration.observe(validation_seconds + queue + inference)
        self._validation_duration.observe(validation_seconds)
        self._queue_duration.observe(queue)
        self._inference_duration.observe(inference)
        self._token_duration.observe(inference / max(num_tokens, 1))
        self._generated_tokens.observe(num_tokens)

    def observe_texts(self, validation_seconds: float, timings: Timings, lengths: Sequence[int]) -> None:
        """Note that a request got the rows of all its texts, of so many tokens each."""
        self._request_success.inc()
        self._request_duration.observe(validation_seconds + timings.queue_seconds + timings.inference_seconds)
        self._validation_duration.observe(validation_seconds)
        self._queue_duration.observe(timings.queue_seconds)
        self._inference_duration.observe(timings.inference_seconds)
        for length in lengths:
            self._input_length.observe(length)

    # Steps

    def count_step(self, method: str) -> None:
        """Note that a step is about to be sent; `method` is `prefill`, `decode` or `encode`."""
        self._inference_count.inc(1, method)

    def count_step_failure(self, method: str) -> None:
        """Note that a step was answered by an error."""
        self._inference_failure.labels(method).inc()

    def observe_step(self, method: str, seconds: float, results: Sequence[StepResult]) -> None:
        """Note one answered step: the time the call took and every rank's result, in rank order."""
        slowest = max(results, key=lambda result: result.total_ns)
        self._inference_success.inc(1, method)
        self._step_duration.observe(seconds, method)
        self._forward_duration.observe(slowest.forward_ns / 1e9, method)
        self._decode_duration.observe(slowest.decode_ns / 1e9, method)
        if slowest.concat_ns is not None:
            # TGI's label, whatever the method.
            self._concat_duration.observe(slowest.concat_ns / 1e9, "decode")
        if all(result.batch is None and not result.generations for result in results):
            return  # planned before it was known that every sequence ends with the step before: nothing was computed
        self._steps.inc()
        for rank, result in enumerate(results if not self._is_removed else ()):
            self._forwards.inc(result.num_forwards, str(self._first_rank + rank))
        self._forward_rows.observe(results[0].num_forward_rows)
        self._forward_tokens.inc(results[0].num_forward_tokens)
        if results[0].num_draft_tokens:
            accepted = results[0].num_accepted_tokens
            self._draft_tokens.inc(accepted, "accepted")
            self._draft_tokens.inc(results[0].num_draft_tokens - accepted, "rejected")

    def observe_filter(self, method: str, seconds: float) -> None:
        """Note the time it took to drop finished sequences after a step."""
        self._filter_duration.observe(seconds, method)

    def observe_encoding(self, num_texts: int, num_tokens: int, seconds: float, forward_seconds: float) -> None:
        """Note one batch of an encoder that was answered: the time the call took, and the shard's own."""
        self._steps.inc()
        if not self._is_removed:
            self._forwards.inc(1, str(self._first_rank))
        self._forward_rows.observe(num_texts)
        self._forward_tokens.inc(num_tokens)
        if self._of_replica is not None:
            self._of_replica.num_requests += num_texts
            self._of_replica.prompt_tokens += num_tokens
        self._inference_success.inc(1, "encode")
        self._step_duration.observe(seconds, "encode")
        self._forward_duration.observe(forward_seconds, "encode")

    def observe_new_batch(self, size: int, reason: str | None = None) -> None:
        """Count waiting sequences that were admitted together.

        Args:
            size: sequences that start together.
            reason: for which they joined running ones: `backpressure`, `wait_exceeded`, `chunking`; or None.
        """
        self._next_size.observe(size)
        if reason is not None:
            self._concat.labels(reason).inc()

    def observe_decode(self, context_tokens: int, results: Sequence[StepResult]) -> None:
        """Observe the bytes and the time of a step that only decoded."""
        if not self._is_removed:
            self.roofline.observe(self._first_rank, context_tokens, results)

    # State

    def set_sequences(self, waiting: int, running: int) -> None:
        """Set how many sequences wait and run."""
        self._set(self._queue_size, waiting)
        self._set(self._current_size, running)
        self._set(self._sequences.labels("waiting"), waiting)
        self._set(self._sequences.labels("running"), running)
        if self._of_replica is not None:
            self._of_replica.num_waiting, self._of_replica.num_running = waiting, running

    def set_batch_tokens(self, num_tokens: int) -> None:
        """Set how many tokens the running sequences may come to hold."""
        self._set(self._current_max_tokens, num_tokens)

    def set_pool(self, used: int, free: int, cached: int) -> None:
        """Set how many KV blocks are used and free; and how many of the free ones are kept for their content."""
        self._set(self._blocks.labels("cached"), cached)
        self._set(self._blocks.labels("used"), used)
        self._set(self._blocks.labels("free"), free)
        if self._of_replica is not None:
            self._of_replica.used_blocks, self._of_replica.num_blocks = used, used + free

    def set_states(self, used: int, free: int, cached: int) -> None:
        """Set how many slots of recurrent states are used and free; and how many of the free ones are checkpoints."""
        self._set(self._states.labels("cached"), cached)
        self._set(self._states.labels("used"), used)
        self._set(self._states.labels("free"), free)

    def set_pool_tokens(self, num_tokens: int) -> None:
        """Set the size of the KV pool in tokens."""
        self._set(self._max_total_tokens, num_tokens)

    def set_cached_batches(self, count: int) -> None:
        """Set how many batches the shards keep."""
        self._set(self._cached_batches, count)

    def set_weights(self, rank: int, num_bytes: int, sharded_bytes: int) -> None:
        """Set what a rank holds of the weights, and how much of that is split between ranks."""
        self._set_of_rank(self._weight_bytes, rank, num_bytes)
        self._set_of_rank(self._sharded_weight_bytes, rank, sharded_bytes)

    def set_kv(self, rank: int, num_bytes: int) -> None:
        """Set the size of a rank's KV pool."""
        self._set_of_rank(self._kv_bytes, rank, num_bytes)

    def set_reads(self, rank: int, weight_bytes: int, token_bytes: float) -> None:
        """Set what a decoding step of a rank reads: the weights, and so much for each token of a context."""
        if not self._is_removed:
            self.roofline.set_reads(self._first_rank + rank, weight_bytes, token_bytes)

    def set_tasks(self, count: int) -> None:
        """Set how many tasks the router's event loop has."""
        self._tasks.set(count)

    def set_memory(self, rank: int, memory: ShardMemory) -> None:
        """Set what a rank holds of its host's memory, if it says."""
        if memory.resident_bytes:
            self._set_of_rank(self._memory, rank, memory.resident_bytes, "resident")
            self._set_of_rank(self._memory, rank, memory.peak_bytes, "peak")

    def count_cancelled(self) -> None:
        """Count a cancelled sequence."""
        self._cancelled.inc()

    def count_prefix(self, prompt_tokens: int, cached_tokens: int, loaded_tokens: int = 0, tier: str = "") -> None:
        """Count the tokens of a prompt, and of its cached prefix, of which some were loaded from a lower tier."""
        self._prefix_queried.inc(prompt_tokens)
        self._prefix_hits.inc(cached_tokens)
        if cached_tokens > loaded_tokens:
            self._tier_hits.inc(cached_tokens - loaded_tokens, "memory")
        if loaded_tokens:
            self._tier_hits.inc(loaded_tokens, tier)
        if self._of_replica is not None:
            self._of_replica.prompt_tokens += prompt_tokens

    def count_given(self, num_sequences: int = 1) -> None:
        """Count sequences that a replica was given, new ones and those of others."""
        if self._of_replica is not None:
            self._of_replica.num_requests += num_sequences

    def count_generated(self, num_tokens: int) -> None:
        """Count tokens that a replica has generated."""
        if self._of_replica is not None:
            self._of_replica.generated_tokens += num_tokens

    def count_loss(self) -> None:
        """Count the loss of a replica."""
        if self._of_replica is not None:
            self._of_replica.num_losses += 1

    def set_up(self) -> None:
        """Note that a replica serves or drains; `retire` ends that."""
        if self._of_replica is not None:
            self._of_replica.is_up = True

    def set_running_texts(self, count: int) -> None:
        """Set how many texts a replica of an encoder encodes; the totals count requests."""
        if self._of_replica is not None:
            self._of_replica.num_running = count

    def set_weight(self, weight: float) -> None:
        """Set the weight of a replica."""
        if self._of_replica is not None:
            self._of_replica.weight = weight

    def set_replicas(self, serving: int, lost: int, draining: int = 0) -> None:
        """Set how many replicas serve, are lost, and drain."""
        self._replicas.labels("serving").set(serving)
        self._replicas.labels("lost").set(lost)
        self._replicas.labels("draining").set(draining)

    def observe_attach(self, seconds: float) -> None:
        """Note the time from the first attempt to connect to the shards of a replica until it served."""
        self._attach_duration.observe(seconds)

    def set_load_seconds(self, seconds: float) -> None:
        """Set what the last load of the model took, from its launch until it served."""
        self.replicas.load_seconds = seconds

    def count_return(self) -> None:
        """Count a lost replica that serves again."""
        self._returns.inc()

    def count_moved(self, num_sequences: int = 1) -> None:
        """Count sequences that were moved from a replica that is lost or drains to another one."""
        self._moved.inc(num_sequences)

    def set_queue(self, num_preempted: int, num_tokens: int) -> None:
        """Set how many of the waiting sequences wait to be resumed, and the prompt tokens of all that wait."""
        self._set(self._waiting_preempted, num_preempted)
        self._set(self._queued_tokens, num_tokens)

    def count_refused(self, reason: str) -> None:
        """Count a request refused by admission, and its limit: see docs/scheduling.md."""
        self._refused.labels(reason).inc()

    def count_key_request(self, key: str) -> None:
        """Count an admitted request with an API key, by the key's name."""
        self._key_requests.labels(key).inc()

    def count_key_refused(self, key: str, reason: str) -> None:
        """Count a refused API key, by `route`, `model`, `requests`, `tokens` or `concurrency`."""
        self._key_refused.labels(key, reason).inc()

    def count_key_tokens(self, key: str, prompt: int, completion: int) -> None:
        """Note the tokens that a request with an API key has taken."""
        self._key_tokens.labels(key, "prompt").inc(prompt)
        self._key_tokens.labels(key, "completion").inc(completion)

    def count_batch_request(self, state: str) -> None:
        """Count a request of a batch that was `completed`, has `failed`, or is to be `retried`."""
        self._batch_requests.labels(state).inc()

    def set_batches(self, num_batches: int, num_running: int) -> None:
        """Set the batches that have not ended, and the requests of them that are under way."""
        self._set(self._batches, num_batches)
        self._set(self._batch_running, num_running)

    def count_expired(self, state: str) -> None:
        """Count a sequence that exceeded its deadline while it was `arriving`, `waiting` or `running`."""
        self._expired.labels(state).inc()

    def set_tier(self, num_used: int, num_free: int) -> None:
        """Set slots of the lower tier."""
        self._set(self._tier_slots.labels("used"), num_used)
        self._set(self._tier_slots.labels("free"), num_free)

    def count_cache(self, num_expired: int, num_lost: int, num_swapped: int) -> None:
        """Count expired blocks, lost slots, and sequences swapped out."""
        self._prefix_expired.inc(num_expired)
        self._lost_slots.inc(num_lost)
        self._swapped.inc(num_swapped)

    def count_preempted(self, num_sequences: int, num_tokens: int) -> None:
        """Count preempted sequences, and tokens recomputed by resumed ones."""
        self._preempted.inc(num_sequences)
        self._recomputed.inc(num_tokens)

    # Making

    def _make_request_metrics(self) -> None:
        self._request_count = self._sum("tgi_request_count", "Requests for a generation.")
        self._request_success = self._sum("tgi_request_success", "Requests that got their whole answer.")
        self._request_failure = self._counter("tgi_request_failure", "Requests that failed.", "err")
        self._responses = FastCounter("funitel_responses", "HTTP answers.", self.registry, "route", "status")
        self._connections = self._gauge("funitel_connections", "Connections that are open.")
        self._cut = self._counter("funitel_cut_connections", "Connections refused or cut.", "reason")
        self._key_requests = self._counter("funitel_key_requests", "Requests let in, by name of the API key.", "key")
        self._key_refused = self._counter(
            "funitel_key_refused", "Requests an API key did not suffice for.", "key", "reason"
        )
        self._key_tokens = self._counter(
            "funitel_key_tokens", "Tokens of requests, by name of the API key.", "key", "kind"
        )
        self._request_duration = self._duration("tgi_request_duration", "Arrival until the whole answer.")
        self._validation_duration = self._duration("tgi_request_validation_duration", "Arrival until queued.")
        self._queue_duration = self._duration("tgi_request_queue_duration", "Queued until its first step.")
        self._inference_duration = self._duration("tgi_request_inference_duration", "First step until the end.")
        self._token_duration = self._duration(
            "tgi_request_mean_time_per_token_duration", "Inference time by token of a request."
        )
        self._skipped_tokens = FastSummary(
            "tgi_request_skipped_tokens", "Tokens beyond the first that a step gave.", self.registry
        )
        self._first_token = self._duration("funitel_time_to_first_token_seconds", "Submitted until the first token.")
        self._inter_token = self._duration("funitel_inter_token_latency_seconds", "Time between two tokens.")

    def _make_batch_metrics(self) -> None:
        self._queue_size = self._gauge("tgi_queue_size", "Waiting sequences.")
        self._current_size = self._gauge("tgi_batch_current_size", "Running sequences.")
        self._current_max_tokens = self._gauge(
            "tgi_batch_current_max_tokens", "Tokens the running sequences may come to hold."
        )
        self._max_total_tokens = self._gauge("tgi_batch_max_total_tokens", "Size of the KV pool in tokens.")
        self._next_size = FastHistogram(
            "tgi_batch_next_size", "Sequences let in together.", SIZE_BUCKETS, self.registry
        )
        self._concat = self._counter("tgi_batch_concat", "Batches that joined a running one.", "reason")
        self._concat_duration = self._duration("tgi_batch_concat_duration", "Time to join batches.", "method")
        self._inference_count = FastCounter("tgi_batch_inference_count", "Steps sent.", self.registry, "method")
        self._inference_success = FastCounter("tgi_batch_inference_success", "Steps answered.", self.registry, "method")
        self._inference_failure = self._counter("tgi_batch_inference_failure", "Steps failed.", "method")
        self._step_duration = self._duration("tgi_batch_inference_duration", "Time of a step's call.", "method")
        self._forward_duration = self._duration("tgi_batch_forward_duration", "Time of a forward pass.", "method")
        self._decode_duration = self._duration("tgi_batch_decode_duration", "Time to settle texts and stops.", "method")
        self._filter_duration = self._duration(
            "tgi_batch_filter_duration", "Time to drop finished sequences.", "method"
        )

    def _make_engine_metrics(self) -> None:
        self._steps = self._sum("funitel_steps", "Steps answered.")
        self._forwards = FastCounter("funitel_forwards", "Forward passes of a rank.", self.registry, "rank")
        self._forward_rows = FastHistogram("funitel_forward_rows", "Sequences in a step.", SIZE_BUCKETS, self.registry)
        self._forward_tokens = self._sum("funitel_forward_tokens", "Tokens computed.")
        self._draft_tokens = FastCounter("funitel_draft_tokens", "Draft tokens verified.", self.registry, "outcome")
        self._weight_bytes = self._gauge("funitel_weight_bytes", "Weights a rank holds.", "rank")
        self._sharded_weight_bytes = self._gauge(
            "funitel_sharded_weight_bytes", "Weights a rank holds that are split between ranks.", "rank"
        )
        self._kv_bytes = self._gauge("funitel_kv_bytes", "Size of a rank's KV pool.", "rank")
        self._memory = self._gauge("funitel_memory_bytes", "Memory of its host that a rank holds.", "rank", "kind")
        self.roofline = Roofline(self.registry)
        self.adapters = AdapterMetrics(self.registry)
        self.media = MediaMetrics(self.registry)
        self._blocks = self._gauge("funitel_blocks", "KV blocks.", "state")
        self._states = self._gauge("funitel_state_slots", "Slots of recurrent states.", "state")
        self._sequences = self._gauge("funitel_sequences", "Sequences.", "state")
        self._cached_batches = self._gauge("funitel_cached_batches", "Batches the shards keep.")
        self._tasks = self._gauge("funitel_tasks", "Tasks of the router's event loop.")
        self._cancelled = self._sum("funitel_cancelled", "Sequences cancelled.")
        self._replicas = self._gauge("funitel_replicas", "Replicas.", "state")
        self._returns = self._counter("funitel_replica_returns", "Replicas that served again after they were lost.")
        self._moved = self._counter("funitel_moved", "Sequences moved to another replica: theirs was lost or drains.")
        self.replicas = ReplicaMetrics(self.registry)
        self.models = ModelStates(self.registry)
        self._ranks = RankNumbers()
        self._attach_duration = FastHistogram(
            "funitel_replica_attach_seconds",
            "First attempt to connect to a replica until it served.",
            LOAD_BUCKETS,
            self.registry,
        )
        self._waiting_preempted = self._gauge("funitel_queue_preempted", "Waiting sequences that are to be resumed.")
        self._queued_tokens = self._gauge("funitel_queue_tokens", "Prompt tokens of waiting sequences.")
        self._refused = self._counter("funitel_refused", "Sequences that found no place.", "reason")
        self._batch_requests = self._counter("funitel_batch_requests", "Requests of batches.", "state")
        self._batches = self._gauge("funitel_batches", "Batches that have not ended.")
        self._batch_running = self._gauge("funitel_batch_running_requests", "Requests of batches under way.")
        self._expired = self._counter("funitel_expired", "Sequences that exceeded their deadline.", "state")
        self._preempted = self._sum("funitel_preempted", "Sequences preempted.")
        self._recomputed = self._sum("funitel_recomputed_tokens", "Tokens computed again after a preemption.")
        self._prefix_queried = self._sum("funitel_prefix_cache_queried_tokens", "Prompt tokens of new sequences.")
        self._prefix_hits = self._sum(
            "funitel_prefix_cache_hit_tokens", "Prompt tokens of new sequences that were cached."
        )
        self._tier_hits = FastCounter(
            "funitel_prefix_cache_tier_hit_tokens", "The same by where they were found.", self.registry, "tier"
        )
        self._prefix_expired = self._sum(
            "funitel_prefix_cache_expired_blocks", "Cached blocks that --prefix-cache-ttl has forgotten."
        )
        self._tier_slots = self._gauge("funitel_tier_slots", "Slots of the lower tier of the prefix cache.", "state")
        self._lost_slots = self._sum("funitel_tier_lost_slots", "Slots that were damaged or could not be written.")
        self._swapped = self._sum("funitel_swapped", "Preempted sequences with blocks saved to the lower tier.")

    def _make_token_histograms(self, max_input: int, max_total: int) -> None:
        self._input_length = self._tokens("tgi_request_input_length", "Prompt tokens of a request.", max_input)
        self._generated_tokens = self._tokens(
            "tgi_request_generated_tokens", "Completion tokens of a request.", max_total
        )
        self._max_new_tokens = self._tokens(
            "tgi_request_max_new_tokens", "Completion tokens a request may have.", max_total
        )

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(name, help, labels, registry=self.registry)

    def _sum(self, name: str, help: str) -> FastCounter:
        return FastCounter(name, help, self.registry)

    def _duration(self, name: str, help: str, label: str | None = None) -> FastHistogram:
        return FastHistogram(name, help, DURATION_BUCKETS, self.registry, label)

    def _tokens(self, name: str, help: str, top: int) -> FastHistogram:
        return FastHistogram(name, help, _linear(top), self.registry)
