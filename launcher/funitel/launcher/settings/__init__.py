"""Settings of the launcher: its own, and those that it passes to shards and router."""

import sys
from dataclasses import dataclass, fields
from typing import Any

from funitel.launcher.settings.memory_size import MemorySize
from funitel.launcher.settings.shard_count import ShardCount, is_auto
from funitel.launcher.settings.worker_port import WorkerPortSettings
from funitel.model_server.settings import ModelServerSettings
from funitel.model_server.settings.catalogue import model_names
from funitel.proto.security.tls import Pair
from funitel.proto.settings.adapter_list import AdapterList
from funitel.proto.settings.batch_sizes import BatchSizes
from funitel.proto.settings.bounds import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, Bounds
from funitel.proto.settings.fields import check_bounds, inherited, project, require, setting
from funitel.proto.settings.layer_parts import LayerParts
from funitel.proto.settings.options import Counts
from funitel.proto.settings.partition import Partition
from funitel.router.settings import (
    RouterSettings,
    check_access,
    check_api_key,
    check_prometheus_port,
    check_token_limits,
)

_SHARD = {field.name: field for field in fields(ModelServerSettings)}
_ROUTER = {field.name: field for field in fields(RouterSettings)}
_WORKER_PORT = {field.name: field for field in fields(WorkerPortSettings)}


def _shard(name: str, **changes: Any) -> Any:
    return inherited(_SHARD[name], **changes)


def _worker_port(name: str) -> Any:
    return inherited(_WORKER_PORT[name])


def _router(name: str, **changes: Any) -> Any:
    return inherited(_ROUTER[name], **changes)


@dataclass(frozen=True, kw_only=True)
class LauncherSettings:
    """Serve a model: start its shards and the router, supervise them, stop them in order."""

    model_id: str = setting(
        "smollm2-135m-instruct",
        "Catalogue name, hub repository, GGUF of one (owner/name:Q4_K_M or owner/name/file.gguf), local folder, or "
        "path of a .gguf file.",
        complete=model_names,
    )
    revision: str | None = _shard("revision")
    cache_dir: str | None = _shard("cache_dir")
    huggingface_hub_cache: str | None = setting(None, "Folder of the Hugging Face hub cache.")
    validation_workers: int = _router("validation_workers")
    sharded: bool | None = setting(None, "Whether to split the model over several shards.", takes_value=True)
    num_shard: ShardCount | int | None = setting(
        None,
        "Number of shards; when not given, the number of GPUs in CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES, or "
        "1; auto: the same, or the number of GPUs that nvidia-smi lists where neither is set.",
        bounds=AT_LEAST_ONE,
    )
    partition: Partition | None = _shard("partition")
    layers: Counts | None = _shard("layers")
    expert_parallel: bool = _shard("expert_parallel")
    num_replicas: int = setting(
        1,
        "Copies of the model, each of --num-shard shards; a request goes to the replica that has its prefix cached.",
        bounds=AT_LEAST_ONE,
    )
    engine: str | None = _shard("engine")
    device: str = _shard("device")
    gpu_layers: int | None = _shard("gpu_layers")
    layer_parts: LayerParts | None = _shard("layer_parts")
    dtype: str | None = _shard("dtype")
    quantize: str | None = _shard("quantize")
    quantize_tensors: str | None = _shard("quantize_tensors")
    activation_dtype: str = _shard("activation_dtype")
    kv_cache_dtype: str | None = _shard("kv_cache_dtype")
    model_spec: str | None = _shard("model_spec")
    trust_remote_code: bool = _shard("trust_remote_code")
    rope_scaling: str | None = _shard("rope_scaling")
    rope_factor: float | None = _shard("rope_factor")
    block_size: int = _shard("block_size")
    cpu_offload_gb: float = _shard("cpu_offload_gb")
    kv_host_gb: float = _shard("kv_host_gb")
    media_cache_gb: float | None = _shard("media_cache_gb")
    kv_disk_gb: float = _shard("kv_disk_gb")
    kv_disk_dir: str | None = _shard("kv_disk_dir")
    attention: str | None = _shard("attention")
    cuda_graphs: BatchSizes | None = _shard("cuda_graphs")
    num_threads: int | None = _shard("num_threads")
    thread_spin_us: int | None = _shard("thread_spin_us")
    numa: bool = setting(
        False,
        "Pin each shard's threads and memory to a NUMA node, with one shard per node when --num-shard is not given; on "
        "a single node, pin each shard to its share of the cores.",
    )
    prefill_chunking: bool = _shard("prefill_chunking")
    prefix_caching: bool = _shard("prefix_caching")
    enable_prefill_logprobs: bool = _shard("enable_prefill_logprobs", env="")
    disable_forced_spans: bool = _shard("disable_forced_spans")
    max_lora_rank: int = _shard("max_lora_rank")
    speculate: int | None = _shard("speculate")
    draft_model: str | None = _shard("draft_model")
    watermark_gamma: float = _shard("watermark_gamma")
    watermark_delta: float = _shard("watermark_delta")
    cuda_memory_fraction: float | None = _shard("cuda_memory_fraction")
    max_concurrent_requests: int = _router("max_concurrent_requests")
    max_queued_tokens: int | None = _router("max_queued_tokens")
    max_best_of: int = _router("max_best_of")
    max_stop_sequences: int = _router("max_stop_sequences")
    default_stop: tuple[str, ...] = _router("default_stop")
    default_stop_token_ids: Counts | None = _router("default_stop_token_ids")
    max_top_n_tokens: int = _router("max_top_n_tokens")
    max_logprobs: int = _router("max_logprobs")
    max_input_tokens: int | None = _router("max_input_tokens")
    max_input_length: int | None = setting(None, "Legacy name of --max-input-tokens.")
    max_total_tokens: int | None = _router("max_total_tokens")
    waiting_served_ratio: float = setting(
        0.3, "Without chunked prefill: pause running sequences for waiting ones at this ratio of waiting to running."
    )
    max_batch_prefill_tokens: int | None = setting(
        None, "Maximum of prompt tokens in one step; 4096 or the model's context when not given."
    )
    max_batch_total_tokens: int | None = _router("max_batch_total_tokens")
    max_waiting_tokens: int = _router("max_waiting_tokens")
    max_batch_size: int | None = _router("max_batch_size")
    pipeline_steps: int | None = _router("pipeline_steps")
    step_timeout_s: float = _router(
        "step_timeout_s",
        help="Timeout of a step in seconds: its shards are then killed as hung and restarted; also the timeout of "
        "health checks of a shard.",
    )
    target_itl_ms: float | None = _router("target_itl_ms")
    lora_adapters: AdapterList | None = _router("lora_adapters")
    max_loras: int = _router("max_loras")
    lora_folder: str | None = _router("lora_folder")
    target_ttft_ms: float | None = _router("target_ttft_ms")
    hostname: str | None = _router("hostname")
    default_hostname: str | None = _router("default_hostname")
    port: int = _router("port")
    prometheus_port: int | None = _router("prometheus_port")
    address_file: str | None = setting(
        None,
        "File that has the server's URL while it serves, for a health check on the same machine.",
        env="FUNITEL_ADDRESS_FILE",
    )
    shard_uds_path: str | None = setting(
        None,
        "Unix socket path of the shards, followed by -RANK; /tmp/text-generation-server when not given, or another "
        "path if another instance holds that one.",
    )
    master_addr: str = _shard("master_addr")
    master_port: int | None = setting(
        None, "Port of rank 0 for torch.distributed; further replicas use the next ports; free ports when not given."
    )
    tokenizer_config_path: str | None = _router("tokenizer_config_path")
    served_model_name: str | None = _router(
        "served_model_name", help="Model name for clients; the model id when not given."
    )
    max_client_batch_size: int = _router("max_client_batch_size")
    max_client_texts: int = _router("max_client_texts")
    disable_grammar_support: bool = _router("disable_grammar_support")
    tool_call_parser: str = _router("tool_call_parser")
    reasoning_parser: str = _router("reasoning_parser")
    chat_special_tokens: bool = _router("chat_special_tokens")
    strict_fields: bool = _router("strict_fields")
    openai_errors: bool = _router("openai_errors")
    allowed_media_domains: tuple[str, ...] = _router("allowed_media_domains")
    max_image_fetch_size: int = _router("max_image_fetch_size")
    media_fetch_timeout_s: float = _router("media_fetch_timeout_s")
    allow_private_media_addresses: bool = _router("allow_private_media_addresses")
    max_media_items: int = _router("max_media_items")
    max_media_pixels: int = _router("max_media_pixels")
    media_processed_cache_mb: int = _router("media_processed_cache_mb")
    payload_limit: int | None = _router("payload_limit")
    max_connections: int | None = _router("max_connections")
    max_header_bytes: int = _router("max_header_bytes")
    header_timeout_seconds: float = _router("header_timeout_seconds")
    body_timeout_seconds: float = _router("body_timeout_seconds")
    idle_timeout_seconds: float = _router("idle_timeout_seconds")
    max_total_body_bytes: int = _router("max_total_body_bytes")
    max_unread_bytes: int = _router("max_unread_bytes")
    max_total_unread_bytes: int = _router("max_total_unread_bytes")
    unread_timeout_seconds: float = _router("unread_timeout_seconds")
    max_resume_seconds: int = _router("max_resume_seconds")
    max_resume_bytes: int = _router("max_resume_bytes")
    wait_for_load: float = _router("wait_for_load")
    max_stored_responses: int = _router("max_stored_responses")
    max_stored_response_bytes: int = _router("max_stored_response_bytes")
    batch_dir: str | None = _router("batch_dir")
    max_batch_requests: int = _router("max_batch_requests")
    max_batch_file_bytes: int = _router("max_batch_file_bytes")
    max_audio_bytes: int = _router("max_audio_bytes")
    max_audio_seconds: float = _router("max_audio_seconds")
    api_key: str | None = _router("api_key")
    api_key_file: str | None = _router("api_key_file")
    max_wrong_keys: int = _router("max_wrong_keys")
    ban_seconds: float = _router("ban_seconds")
    share_prefixes: bool = _router("share_prefixes")
    prefix_cache_ttl: float | None = _router("prefix_cache_ttl")
    preemption_mode: str = _router("preemption_mode")
    preemption_victim: str = _router("preemption_victim")
    protect_all_routes: bool = _router("protect_all_routes")
    tls_cert: str | None = _router("tls_cert")
    tls_key: str | None = _router("tls_key")
    tls_client_ca: str | None = _router("tls_client_ca")
    tls_probe_cert: str | None = setting(
        None,
        "PEM file of the launcher's client certificate for health checks with --tls-client-ca; --tls-cert when not "
        "given.",
    )
    tls_probe_key: str | None = setting(None, "PEM file of the key of --tls-probe-cert.")
    cors_allow_origin: tuple[str, ...] = _router("cors_allow_origin")
    allowed_host: tuple[str, ...] = _router("allowed_host")
    otlp_endpoint: str | None = _router("otlp_endpoint")
    otlp_service_name: str = _router(
        "otlp_service_name", help="Service name of the spans; when not given, that of the shards ends in .server."
    )
    otlp_decode_tokens: int = _router("otlp_decode_tokens")
    memory_bandwidth: float | None = _router("memory_bandwidth")
    console: bool = _router("console")
    users: bool = _router("users")
    oidc_issuer: str | None = setting(
        None, "URL of a provider of OpenID Connect at which users of --users may log in; https, or this machine."
    )
    oidc_client_id: str = setting("funitel", "Name of this server at the provider of --oidc-issuer.")
    oidc_client_secret_file: str | None = setting(
        None, "File with the secret of this server at the provider of --oidc-issuer; without one it is a public client."
    )
    oidc_redirect_url: str | None = setting(
        None,
        "URL of /v1/auth/oidc/callback of this server as browsers reach it; by the address that a browser has asked "
        "when not given.",
    )
    oidc_role_claim: str | None = setting(
        None,
        "Claim with the role, in the provider's ID token or its userinfo, such as realm_access.roles; "
        "users when not given.",
    )
    debug_routes: bool = _router("debug_routes")
    state_dir: str | None = setting(
        None,
        "Folder in which models that are launched beside this one are kept for the next start; they are forgotten "
        "when not given.",
    )
    database: str | None = setting(
        None, "PostgreSQL database for the state instead of a file in --state-dir: postgresql+psycopg://user@host/name."
    )
    worker_port: int | None = _worker_port("worker_port")
    worker_hostname: str | None = _worker_port("worker_hostname")
    worker_tls_cert: str | None = _worker_port("worker_tls_cert")
    worker_tls_key: str | None = _worker_port("worker_tls_key")
    worker_tls_ca: str | None = _worker_port("worker_tls_ca")
    worker_timeout: float = _worker_port("worker_timeout")
    insecure_workers: bool = _worker_port("insecure_workers")
    ray_address: str | None = setting(
        None,
        "Ray cluster for launches with executor ray: HOST:PORT of its head, or auto for that of this machine.",
    )
    memory_budget: MemorySize | None = setting(
        None,
        "Memory that all models may take together, such as 16GiB; for another model, the least recently used of the "
        "idle ones is unloaded. When not given, 85 % of the memory of the machine or of its control group.",
        bounds=POSITIVE,
    )
    config: str | None = setting(
        None,
        "File of settings, one VARIABLE=value a line; flags and the environment override it. Reloaded on SIGHUP, see "
        "docs/restarts.md.",
        env="FUNITEL_CONFIG",
    )
    env: bool = setting(False, "Log the runtime environment, then start.", short="-e", env=None)
    json_output: bool = _router("json_output")
    log_level: str = _router("log_level")
    max_restarts: int = setting(
        5,
        "Maximum of restarts in a row of a replica whose shard has ended; its requests wait meanwhile. With 0, as with "
        "TGI, they fail, and the launcher ends with the last replica.",
        bounds=NOT_NEGATIVE,
    )
    shutdown_delay: float = _router("shutdown_delay")
    graceful_termination_timeout: int = setting(
        90, "Seconds that each process has to stop before it is killed.", short="-g", bounds=NOT_NEGATIVE
    )

    keeper: bool = setting(
        sys.platform.startswith("linux"),
        "Whether a process of its own accepts connections, and keeps them with the journal of their requests, so that "
        "a router that ends is replaced without a loss.",
        takes_value=True,
    )
    adopt_timeout: float = setting(
        30.0,
        "Seconds that connections wait for another router, and the processes of a launcher that has died for another "
        "launcher with the same settings; with 0 they end with it.",
        bounds=Bounds(minimum=0, maximum=86_400),
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        self.workers_port.check_worker_port()
        require(bool(self.model_id.strip()), "--model-id must not be empty")
        require(
            self.max_input_tokens is None or self.max_input_length is None,
            "--max-input-tokens and --max-input-length are the same setting: give one",
        )
        check_token_limits(
            self.max_input_tokens if self.max_input_length is None else self.max_input_length,
            self.max_total_tokens,
            self.max_batch_total_tokens,
        )
        require(
            not (self.sharded and self.num_shard == 1 and not is_auto(self.num_shard)),
            "--sharded true needs --num-shard > 1, given 1",
        )
        check_api_key(self.api_key)
        check_access(self)
        probe = (self.tls_probe_cert, self.tls_probe_key)
        require(
            (probe[0] is None) == (probe[1] is None),
            f"--tls-probe-cert and --tls-probe-key need each other, given {probe[0] or probe[1]} alone",
        )
        require(
            self.tls_probe_cert is None or self.tls_client_ca is not None,
            f"--tls-probe-cert {self.tls_probe_cert} needs --tls-client-ca",
        )
        require(self.users or self.oidc_issuer is None, f"--oidc-issuer {self.oidc_issuer} needs --users")
        claim, url = self.oidc_role_claim, self.oidc_redirect_url
        for flag, given in (("--oidc-role-claim", claim), ("--oidc-redirect-url", url)):
            require(self.oidc_issuer is not None or given is None, f"{flag} {given} needs --oidc-issuer")
        check_prometheus_port(self.prometheus_port, self.port)
        require(
            self.max_batch_total_tokens is None or self.max_batch_total_tokens >= self.block_size,
            f"--max-batch-total-tokens {self.max_batch_total_tokens} must be >= --block-size {self.block_size}",
        )
        highest = 65535 - (self.num_replicas - 1)
        require(
            self.master_port is None or 0 <= self.master_port <= highest,
            f"--master-port must be within 0..{highest}, given {self.master_port}",
        )
        require(
            self.target_itl_ms is None or self.prefill_chunking,
            f"--target-itl-ms {self.target_itl_ms} needs --prefill-chunking true, given false",
        )
        require(
            self.target_ttft_ms is None or self.prefill_chunking,
            f"--target-ttft-ms {self.target_ttft_ms} needs --prefill-chunking true, given false",
        )

    @property
    def workers_port(self) -> WorkerPortSettings:
        """Where workers join."""
        return project(self, WorkerPortSettings)

    @property
    def tls_pair(self) -> Pair | None:
        """Certificate of the HTTP port; None where HTTP is plain."""
        return Pair(self.tls_cert, self.tls_key) if self.tls_cert is not None and self.tls_key is not None else None

    @property
    def tls_probe_pair(self) -> Pair | None:
        """Client certificate of the launcher for the HTTP port; None where it needs none."""
        if self.tls_probe_cert is not None and self.tls_probe_key is not None:
            return Pair(self.tls_probe_cert, self.tls_probe_key, "--tls-probe")
        return None if self.tls_client_ca is None else self.tls_pair
