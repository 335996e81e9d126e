"""The text that Prometheus reads: TGI's names, types, labels and buckets."""

import asyncio
import re

import pytest

from funitel.proto.errors import Overloaded
from funitel.proto.step import CachedBatch, StepResult
from funitel.router.core.request import Limits
from funitel.router.telemetry.metrics import DURATION_BUCKETS, Metrics

# Reference: TGI's metrics by name and type.
TGI = {
    "tgi_request_count": "counter",
    "tgi_request_success": "counter",
    "tgi_request_failure": "counter",
    "tgi_request_duration": "histogram",
    "tgi_request_validation_duration": "histogram",
    "tgi_request_queue_duration": "histogram",
    "tgi_request_inference_duration": "histogram",
    "tgi_request_mean_time_per_token_duration": "histogram",
    "tgi_request_generated_tokens": "histogram",
    "tgi_request_input_length": "histogram",
    "tgi_request_max_new_tokens": "histogram",
    "tgi_request_skipped_tokens": "summary",
    "tgi_queue_size": "gauge",
    "tgi_batch_current_size": "gauge",
    "tgi_batch_current_max_tokens": "gauge",
    "tgi_batch_next_size": "histogram",
    "tgi_batch_concat": "counter",
    "tgi_batch_concat_duration": "histogram",
    "tgi_batch_inference_count": "counter",
    "tgi_batch_inference_success": "counter",
    "tgi_batch_inference_failure": "counter",
    "tgi_batch_inference_duration": "histogram",
    "tgi_batch_forward_duration": "histogram",
    "tgi_batch_decode_duration": "histogram",
    "tgi_batch_filter_duration": "histogram",
    "tgi_batch_max_total_tokens": "gauge",
}
OURS = {
    "funitel_adapters": "gauge",
    "funitel_adapter_bytes": "gauge",
    "funitel_adapter_loads_total": "counter",
    "funitel_adapter_evictions_total": "counter",
    "vllm:lora_requests_info": "gauge",
    "funitel_media_encoded_total": "counter",
    "funitel_media_uses_total": "counter",
    "funitel_media_evictions_total": "counter",
    "funitel_media_encode_seconds_total": "counter",
    "funitel_media_bytes": "gauge",
    "funitel_replicas": "gauge",
    "funitel_replica_returns_total": "counter",
    "funitel_replica_up": "gauge",
    "funitel_replica_weight": "gauge",
    "funitel_replica_sequences": "gauge",
    "funitel_replica_kv_cache_utilisation": "gauge",
    "funitel_replica_requests_total": "counter",
    "funitel_replica_prompt_tokens_total": "counter",
    "funitel_replica_generated_tokens_total": "counter",
    "funitel_replica_losses_total": "counter",
    "funitel_replica_attach_seconds": "histogram",
    "funitel_kv_cache_utilisation": "gauge",
    "funitel_model_load_seconds": "gauge",
    "funitel_model_state": "gauge",
    "funitel_moved_total": "counter",
    "funitel_time_to_first_token_seconds": "histogram",
    "funitel_inter_token_latency_seconds": "histogram",
    "funitel_steps_total": "counter",
    "funitel_forwards_total": "counter",
    "funitel_forward_rows": "histogram",
    "funitel_forward_tokens_total": "counter",
    "funitel_draft_tokens_total": "counter",
    "funitel_weight_bytes": "gauge",
    "funitel_sharded_weight_bytes": "gauge",
    "funitel_kv_bytes": "gauge",
    "funitel_blocks": "gauge",
    "funitel_sequences": "gauge",
    "funitel_cached_batches": "gauge",
    "funitel_tasks": "gauge",
    "funitel_cancelled_total": "counter",
    "funitel_responses_total": "counter",
    "funitel_preempted_total": "counter",
    "funitel_state_slots": "gauge",
    "funitel_recomputed_tokens_total": "counter",
    "funitel_queue_preempted": "gauge",
    "funitel_queue_tokens": "gauge",
    "funitel_refused_total": "counter",
    "funitel_expired_total": "counter",
    "funitel_batch_requests_total": "counter",
    "funitel_batch_running_requests": "gauge",
    "funitel_batches": "gauge",
    "funitel_prefix_cache_queried_tokens_total": "counter",
    "funitel_prefix_cache_hit_tokens_total": "counter",
    "funitel_prefix_cache_tier_hit_tokens_total": "counter",
    "funitel_prefix_cache_expired_blocks_total": "counter",
    "funitel_tier_slots": "gauge",
    "funitel_tier_lost_slots_total": "counter",
    "funitel_swapped_total": "counter",
    "funitel_key_requests_total": "counter",
    "funitel_key_refused_total": "counter",
    "funitel_key_tokens_total": "counter",
    "funitel_connections": "gauge",
    "funitel_cut_connections_total": "counter",
    "funitel_memory_bytes": "gauge",
    "funitel_decode_read_bytes_total": "counter",
    "funitel_decode_read_seconds_total": "counter",
    "funitel_decode_bandwidth_bytes_per_second": "gauge",
    "funitel_decode_bandwidth_share": "gauge",
    "funitel_memory_bandwidth_bytes_per_second": "gauge",
}


def lines(metrics: Metrics) -> list[str]:
    return metrics.exposition().decode().splitlines()


def test_names_and_types() -> None:
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", Metrics().exposition().decode(), re.MULTILINE))
    assert types == TGI | OURS


def test_counters_of_tgi_have_no_suffix() -> None:
    metrics = Metrics()
    metrics.count_request()
    metrics.count_step("prefill")
    text = metrics.exposition().decode()
    assert "\ntgi_request_count 1.0\n" in text
    assert '\ntgi_batch_inference_count{method="prefill"} 1.0\n' in text
    assert not re.search(r"tgi_\w+_total[ {]", text)
    assert "_created" not in text


def test_a_step() -> None:
    metrics = Metrics()
    ranks = [
        StepResult(
            (),
            CachedBatch(0, (1,)),
            forward_ns=10**6,
            total_ns=2,
            num_forwards=1,
            num_forward_rows=3,
            num_forward_tokens=20,
            num_draft_tokens=5,
            num_accepted_tokens=2,
        ),
        StepResult((), None, forward_ns=2 * 10**6, total_ns=3, num_forwards=1, concat_ns=5),
    ]
    metrics.observe_step("decode", 0.004, ranks)
    text = lines(metrics)
    assert "funitel_steps_total 1.0" in text
    assert 'funitel_forwards_total{rank="0"} 1.0' in text
    assert 'funitel_forwards_total{rank="1"} 1.0' in text
    assert "funitel_forward_rows_sum 3.0" in text
    assert "funitel_forward_tokens_total 20.0" in text
    assert 'funitel_draft_tokens_total{outcome="accepted"} 2.0' in text
    assert 'funitel_draft_tokens_total{outcome="rejected"} 3.0' in text
    assert 'tgi_batch_forward_duration_sum{method="decode"} 0.002' in text
    assert 'tgi_batch_inference_success{method="decode"} 1.0' in text
    assert 'tgi_batch_concat_duration_count{method="decode"} 1.0' in text


def test_state() -> None:
    metrics = Metrics()
    metrics.set_sequences(waiting=2, running=3)
    metrics.set_pool(used=4, free=5, cached=2)
    metrics.set_weights(1, 100, 60)
    metrics.set_kv(1, 7)
    text = lines(metrics)
    assert "tgi_queue_size 2.0" in text
    assert "tgi_batch_current_size 3.0" in text
    assert 'funitel_sequences{state="running"} 3.0' in text
    assert 'funitel_blocks{state="free"} 5.0' in text
    assert 'funitel_blocks{state="cached"} 2.0' in text
    assert 'funitel_sharded_weight_bytes{rank="1"} 60.0' in text
    assert 'funitel_kv_bytes{rank="1"} 7.0' in text


def test_buckets() -> None:
    assert len(DURATION_BUCKETS) == 35
    assert DURATION_BUCKETS[0] == pytest.approx(0.00015)
    metrics = Metrics()
    metrics.set_limits(Limits(max_input_tokens=100, max_total_tokens=200, pool_tokens=0))
    text = lines(metrics)
    assert sum(line.startswith("tgi_request_input_length_bucket") for line in text) == 101
    assert 'tgi_request_input_length_bucket{le="1.0"} 0.0' in text
    assert 'tgi_request_max_new_tokens_bucket{le="200.0"} 0.0' in text


def test_failures_are_counted_by_kind() -> None:
    metrics = Metrics()
    for error in (Overloaded(""), asyncio.CancelledError(), ZeroDivisionError()):
        with pytest.raises(type(error)), metrics.counting_failures():
            raise error
    text = lines(metrics)
    for kind in ("overloaded", "dropped", "generation"):
        assert f'tgi_request_failure{{err="{kind}"}} 1.0' in text


def test_registries_are_apart() -> None:
    first, second = Metrics(), Metrics()
    first.count_request()
    assert "tgi_request_count 0.0" in lines(second)
