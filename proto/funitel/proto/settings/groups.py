"""The groups of all settings: the sections of `--help` and of the settings page, in their order."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """One group of settings.

    Attributes:
        name: as in `--help=NAME`.
        title: its heading.
        common: settings that the default page of `--help` shows, as field names.
        others: the rest.
    """

    name: str
    title: str
    common: tuple[str, ...]
    others: tuple[str, ...]


def _group(name: str, title: str, common: str, others: str = "") -> SettingGroup:
    return SettingGroup(name, title, tuple(common.split()), tuple(others.split()))


COMPATIBILITY = "compatibility"

GROUPS: tuple[SettingGroup, ...] = (
    _group("server", "Server to use", "url api", "name tls_ca"),
    _group(
        "model",
        "Model",
        "model_id tokenizer_name revision",
        "served_model_name cache_dir huggingface_hub_cache model_spec trust_remote_code tokenizer_config_path "
        "all_fields architecture engine",
    ),
    _group(
        "quality",
        "Text and reference of a measurement of quality",
        "text against tiers window stride max_text_tokens",
        "against_dtype against_quantize",
    ),
    _group(
        "precision",
        "Precision and quantisation",
        "dtype quantize method to tensor tier",
        "quantize_tensors inferflow_levels outliers activation_dtype kv_cache_dtype rope_scaling rope_factor",
    ),
    _group(
        "calibration",
        "Calibration of a quantised model",
        "",
        "groupsize act_order symmetric percdamp calibration_file num_samples sequence_length upload_to_model_id",
    ),
    _group(
        "hardware",
        "Devices, shards and threads",
        "device num_shard num_threads",
        "gpu_layers layer_parts num_replicas sharded partition layers expert_parallel numa thread_spin_us most_threads "
        "cores memory_node attention cuda_graphs rank world_size local_rank",
    ),
    _group(
        "memory",
        "Memory and KV cache",
        "cuda_memory_fraction",
        "max_batch_total_tokens block_size prefix_caching share_prefixes cpu_offload_gb kv_host_gb kv_disk_gb "
        "kv_disk_dir media_cache_gb prefix_cache_ttl preemption_mode preemption_victim replicas_on_host footprint_mib",
    ),
    _group(
        "batching",
        "Batching and latency",
        "max_batch_prefill_tokens",
        "max_batch_size prefill_chunking pipeline_steps target_itl_ms target_ttft_ms waiting_served_ratio "
        "max_waiting_tokens validation_workers disable_forced_spans speculate draft_model rows",
    ),
    _group("adapters", "Adapters (LoRA)", "lora_adapters", "max_loras max_lora_rank lora_folder reserved_loras"),
    _group(
        "limits",
        "Limits of requests",
        "max_input_tokens max_total_tokens max_concurrent_requests",
        "max_input_length max_queued_tokens max_best_of max_stop_sequences max_top_n_tokens max_logprobs "
        "max_client_batch_size max_client_texts payload_limit max_stored_responses max_stored_response_bytes "
        "requests_per_minute tokens_per_minute default_stop default_stop_token_ids",
    ),
    _group(
        "media",
        "Images and sounds in requests",
        "",
        "allowed_media_domains max_image_fetch_size max_media_items max_media_pixels media_processed_cache_mb "
        "media_fetch_timeout_s allow_private_media_addresses max_audio_bytes max_audio_seconds",
    ),
    _group("batches", "Batches", "batch_dir", "max_batch_requests max_batch_file_bytes"),
    _group(
        "api",
        "Behaviour of the APIs",
        "",
        "tool_call_parser reasoning_parser chat_special_tokens enable_prefill_logprobs disable_grammar_support "
        "strict_fields openai_errors "
        "watermark_gamma watermark_delta aip_predict_route aip_health_route compute_type git_sha docker_label",
    ),
    _group(
        "network",
        "Addresses and connections",
        "hostname port listen",
        "default_hostname address_file prometheus_port cors_allow_origin allowed_host max_connections max_header_bytes "
        "max_total_body_bytes max_unread_bytes max_total_unread_bytes header_timeout_seconds body_timeout_seconds "
        "idle_timeout_seconds unread_timeout_seconds max_resume_seconds max_resume_bytes",
    ),
    _group(
        "security",
        "Keys and TLS",
        "api_key api_key_file",
        "users oidc_issuer oidc_client_id oidc_client_secret_file oidc_redirect_url oidc_role_claim "
        "max_wrong_keys ban_seconds "
        "tls_cert tls_key protect_all_routes tls_client_ca tls_probe_cert tls_probe_key shard_tls_cert shard_tls_key "
        "shard_tls_ca",
    ),
    _group(
        "workers",
        "Other machines: workers, Ray",
        "join",
        "memory gpus worker_port worker_tls_cert worker_tls_key worker_tls_ca worker_hostname worker_timeout "
        "insecure_workers ray_address",
    ),
    _group(
        "models",
        "Many models on one server",
        "",
        "state_dir database memory_budget wait_for_load",
    ),
    _group(
        "fleet",
        "The model on the server",
        "replicas ttl pinned set wait",
        "executor worker request_limit priority retries weight add remove type persist check yes",
    ),
    _group("key", "The key", "group expires routes models"),
    _group(
        "internal",
        "Between the processes of a deployment",
        "master_shard_uds_path",
        "master_shard_address replica_address shard_uds_path uds_path master_addr master_port shard_connect_timeout "
        "shard_return_timeout listen_fd ready_fd accepts_early generation folder_fd exit_with_parent deployment_file "
        "control_socket no_model reports_progress",
    ),
    _group(
        "operation",
        "Start, restart and stop",
        "config",
        "env max_restarts step_timeout_s shutdown_delay graceful_termination_timeout keeper adopt_timeout",
    ),
    _group(
        "logs",
        "Logs, traces and metrics",
        "log_level logger_level",
        "json_output console debug_routes otlp_endpoint otlp_service_name otlp_decode_tokens memory_bandwidth",
    ),
    _group("sampling", "Sampling", "max_tokens temperature seed", "top_p top_k stop system"),
    _group(
        "load",
        "Load",
        "concurrency request_rate num_requests workload prompt_tokens output_tokens",
        "rounds warmup prefix_tokens num_groups ignore_eos timeout",
    ),
    _group("output", "Output", "json explain once interval picture", "slo_ttft_ms slo_itl_ms plot"),
    _group(COMPATIBILITY, "TGI's flags without effect, or refused", ""),
    _group("program", "This program", "version", "help"),
)

GROUP_OF: Mapping[str, SettingGroup] = {name: group for group in GROUPS for name in (*group.common, *group.others)}
"""The group of each setting, by the name of its field."""

COMMON = frozenset(name for group in GROUPS for name in group.common)
"""Settings on the default page of `--help`."""
