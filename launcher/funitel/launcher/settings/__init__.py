"""Settings of the launcher: its own, and those that it passes to shards and router."""

from dataclasses import MISSING, dataclass, fields
from typing import Any

from funitel.launcher.settings.shard_count import ShardCount, is_auto
from funitel.model_server.settings import (
    ATTENTIONS,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    ModelServerSettings,
)
from funitel.proto.security.tls import Pair
from funitel.proto.settings.batch_sizes import BatchSizes
from funitel.proto.settings.bounds import AT_LEAST_ONE, NOT_NEGATIVE
from funitel.proto.settings.fields import check_bounds, require, setting
from funitel.proto.settings.tgi_flags import REFUSED_VALUES
from funitel.router.settings import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    RouterSettings,
    check_access,
    check_api_key,
    check_prometheus_port,
    check_token_limits,
)

_SHARD = {field.name: field.default for field in fields(ModelServerSettings) if field.default is not MISSING}
_ROUTER = {field.name: field.default for field in fields(RouterSettings)}


def _shard(name: str, help: str, **more: Any) -> Any:
    return setting(_SHARD[name], help, **more)


def _router(name: str, help: str, **more: Any) -> Any:
    return setting(_ROUTER[name], help, **more)


@dataclass(frozen=True, kw_only=True)
class LauncherSettings:
    """Serve a model: start its shards and the router, supervise them, stop them in order."""

    model_id: str = setting(
        "smollm2-135m-instruct", "Catalogue name, hub repository, local folder, or path of a .gguf file."
    )
    revision: str | None = _shard("revision", "Hub revision.")
    cache_dir: str | None = _shard(
        "cache_dir", "Folder for fetched and converted models; ~/.cache/funitel when not given.", env="FUNITEL_CACHE"
    )
    huggingface_hub_cache: str | None = setting(None, "Folder of the Hugging Face hub cache.")
    validation_workers: int = _router("validation_workers", "Threads that tokenize prompts.")
    sharded: bool | None = setting(None, "Whether to split the model over several shards.", takes_value=True)
    num_shard: ShardCount | int | None = setting(
        None,
        "Number of shards; when not given, the number of GPUs in CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES, or "
        "1; auto: the same, or the number of GPUs that nvidia-smi lists where neither is set.",
        bounds=AT_LEAST_ONE,
    )
    num_replicas: int = setting(
        1,
        "Copies of the model, each of --num-shard shards; a request goes to the replica that has its prefix cached.",
        bounds=AT_LEAST_ONE,
    )
    device: str = _shard("device", "Where the model runs.", choices=DEVICES)
    dtype: str | None = _shard(
        "dtype",
        "Precision of weights and KV. When not given, bfloat16 on a GPU; on a CPU a GGUF keeps its quantised blocks, "
        "floating-point weights become int8 and KV float16, or all is float32 where the fused step cannot be built.",
        choices=DTYPES,
    )
    quantize: str | None = _shard(
        "quantize",
        "Quantisation of the checkpoint's weights; as in its config.json when not given. int8 also converts "
        "floating-point weights to int8 as they are loaded, and fp8 to float8 on a GPU; on a CPU gguf keeps the blocks "
        "of a GGUF.",
        choices=QUANTIZATIONS,
        refused=REFUSED_VALUES["quantize"],
    )
    kv_cache_dtype: str | None = _shard(
        "kv_cache_dtype",
        "Precision of the KV pool on a GPU if it differs from --dtype; the checkpoint's scales of keys and values are "
        "used if it has any.",
        choices=KV_CACHE_DTYPES,
    )
    model_spec: str | None = _shard(
        "model_spec", "JSON file that describes the model instead of the entry of its architecture; see docs/models.md."
    )
    trust_remote_code: bool = _shard(
        "trust_remote_code", "Run Python code of a model's repository, for models that nothing else supports."
    )
    rope_scaling: str | None = _shard(
        "rope_scaling",
        "Scaling of rotary positions instead of the checkpoint's; linear when only a factor is given.",
        choices=("linear",),
        refused=REFUSED_VALUES["rope_scaling"],
    )
    rope_factor: float | None = _shard(
        "rope_factor", "Factor by which rotary positions and the model's context are extended; 1 when not given."
    )
    block_size: int = _shard("block_size", "Tokens per KV block.")
    cpu_offload_gb: float = _shard(
        "cpu_offload_gb",
        "GiB of a shard's weights that stay in host memory; they are copied to the GPU in every step, a layer at a "
        "time, while the previous layer computes.",
    )
    kv_host_gb: float = _shard(
        "kv_host_gb",
        "GiB of host memory of each shard for cached prefix blocks evicted from the KV pool; they are copied back when "
        "a prompt begins with them, instead of being computed again.",
    )
    attention: str | None = _shard(
        "attention",
        "Attention kernels on a GPU: triton, flash (flash-attn, if installed) or torch; when not given, or for TGI's "
        "name of another backend, the fastest that passes its check.",
        choices=ATTENTIONS,
    )
    cuda_graphs: BatchSizes | None = _shard(
        "cuda_graphs",
        "Numbers of decoding rows for which a step is captured as a CUDA graph, such as 1,2,4; 0 for none; 1, 2, 4, 8 "
        "and multiples of 8 up to 256 when not given. A step uses the smallest graph that fits.",
    )
    num_threads: int | None = _shard(
        "num_threads",
        "Compute threads of each shard; when not given, the best number by a measurement at start, at most an equal "
        "share of the cores.",
    )
    thread_spin_us: int | None = _shard(
        "thread_spin_us",
        "Microseconds that threads of the fused CPU step spin before they sleep; measured at start when not given.",
    )
    numa: bool = setting(
        False,
        "Pin each shard's threads and memory to a NUMA node, with one shard per node when --num-shard is not given; on "
        "a single node, pin each shard to its share of the cores.",
    )
    prefill_chunking: bool = _shard(
        "prefill_chunking", "Compute long prompts in chunks, in the same steps as running sequences.", takes_value=True
    )
    prefix_caching: bool = _shard(
        "prefix_caching", "Share cached KV blocks among sequences with a common prefix.", takes_value=True
    )
    enable_prefill_logprobs: bool = _shard("enable_prefill_logprobs", "Allow log-probabilities of prompt tokens.")
    disable_forced_spans: bool = _shard(
        "disable_forced_spans", "Compute each token in its own step, also tokens that a grammar forces."
    )
    watermark_gamma: float = _shard("watermark_gamma", "Fraction of the vocabulary that a watermark favours.")
    watermark_delta: float = _shard("watermark_delta", "Value that a watermark adds to the logits of favoured tokens.")
    cuda_memory_fraction: float = _shard(
        "cuda_memory_fraction",
        "Fraction of the GPU's memory that a shard may use, with weights and activations; on a CPU, of the KV pool's.",
    )
    max_concurrent_requests: int = _router(
        "max_concurrent_requests", "Maximum of requests in flight; more are answered with 429."
    )
    max_queued_tokens: int | None = _router(
        "max_queued_tokens",
        "Maximum of prompt tokens in the waiting queue; more are answered with 429. Unbounded when not given.",
    )
    max_best_of: int = _router("max_best_of", "Maximum of `best_of`.")
    max_stop_sequences: int = _router("max_stop_sequences", "Maximum of stop sequences in a request.")
    max_top_n_tokens: int = _router("max_top_n_tokens", "Maximum of `top_n_tokens` and `top_logprobs`.")
    max_input_tokens: int | None = _router(
        "max_input_tokens", "Maximum of prompt tokens in a request; measured when not given."
    )
    max_input_length: int | None = setting(None, "Legacy name of --max-input-tokens.")
    max_total_tokens: int | None = _router(
        "max_total_tokens", "Maximum of prompt and completion tokens in a request; measured when not given."
    )
    waiting_served_ratio: float = setting(
        0.3, "Without chunked prefill: pause running sequences for waiting ones at this ratio of waiting to running."
    )
    max_batch_prefill_tokens: int | None = setting(
        None, "Maximum of prompt tokens in one step; 4096 or the model's context when not given."
    )
    max_batch_total_tokens: int | None = _router(
        "max_batch_total_tokens", "Size of the KV pool in tokens; as much as memory allows when not given."
    )
    max_waiting_tokens: int = _router(
        "max_waiting_tokens", "Without chunked prefill: steps after which waiting requests are admitted at any ratio."
    )
    max_batch_size: int | None = _router("max_batch_size", "Maximum of running sequences.")
    pipeline_steps: int = _router(
        "pipeline_steps", "Steps in flight at the shards: 2 hides the router's latency, 1 does not."
    )
    step_timeout_s: float = _router(
        "step_timeout_s",
        "Timeout of a step in seconds: its shards are then killed as hung and restarted; also the timeout of health "
        "checks of a shard.",
    )
    target_itl_ms: float | None = _router(
        "target_itl_ms",
        "Target for the milliseconds between tokens of a running stream while prompts are computed; 2.5 times a step "
        "without prompts when not given.",
    )
    target_ttft_ms: float | None = _router(
        "target_ttft_ms",
        "Target for the time to first token in milliseconds: a request with a longer estimate is refused with 429. No "
        "bound when not given.",
    )
    hostname: str | None = _router(
        "hostname",
        "Address to listen on; when not given, 0.0.0.0 if clients need a key or certificate, else 127.0.0.1.",
    )
    default_hostname: str | None = _router(
        "default_hostname",
        "Address to listen on when --hostname is not given, or is this machine's name; the image sets 0.0.0.0.",
    )
    port: int = _router("port", "Port to listen on.", short="-p")
    prometheus_port: int | None = _router(
        "prometheus_port", "A second port that serves only /metrics; --port serves /metrics too."
    )
    shard_uds_path: str | None = setting(
        None,
        "Unix socket path of the shards, followed by -RANK; /tmp/text-generation-server when not given, or another "
        "path if another instance holds that one.",
    )
    master_addr: str = _shard("master_addr", "Host of rank 0 for torch.distributed.")
    master_port: int | None = setting(
        None, "Port of rank 0 for torch.distributed; further replicas use the next ports; free ports when not given."
    )
    tokenizer_config_path: str | None = _router(
        "tokenizer_config_path", "A tokenizer_config.json to use instead of the model's own (chat template)."
    )
    served_model_name: str | None = _router("served_model_name", "Model name for clients; the model id when not given.")
    max_client_batch_size: int = _router("max_client_batch_size", "Maximum of prompts in one completions request.")
    max_client_texts: int = _router(
        "max_client_texts", "Maximum of texts in one request for embeddings, ranks or predictions."
    )
    disable_grammar_support: bool = _router("disable_grammar_support", "Refuse requests with a grammar.")
    tool_call_parser: str = _router(
        "tool_call_parser",
        "Format of the model's tool calls; auto detects it from the chat template.",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = _router(
        "reasoning_parser",
        "Format of the model's reasoning; auto detects it from the chat template.",
        choices=REASONING_PARSERS,
    )
    payload_limit: int = _router("payload_limit", "Maximum size of a request body in bytes.")
    max_connections: int | None = _router(
        "max_connections",
        "Maximum of open connections; at the maximum, the connection that is idle for longest is closed. When not "
        "given, 16384, or as many as the limit on open files allows.",
    )
    max_header_bytes: int = _router(
        "max_header_bytes", "Maximum size of a request's header in bytes; a larger header is answered with 431."
    )
    header_timeout_seconds: float = _router(
        "header_timeout_seconds", "Timeout in seconds from the first byte of a request to the end of its header."
    )
    body_timeout_seconds: float = _router(
        "body_timeout_seconds", "Timeout in seconds from the end of a header to the end of its body."
    )
    idle_timeout_seconds: float = _router("idle_timeout_seconds", "Seconds after which an idle connection is closed.")
    max_total_body_bytes: int = _router(
        "max_total_body_bytes",
        "Maximum bytes of incomplete bodies over all connections; above it, the connection of the largest is closed.",
    )
    max_unread_bytes: int = _router(
        "max_unread_bytes",
        "Maximum bytes of a streamed answer that a client has not read; above it, its connection is closed.",
    )
    max_total_unread_bytes: int = _router(
        "max_total_unread_bytes",
        "Maximum bytes of unread answers over all connections; above it, the connection with the most is closed.",
    )
    unread_timeout_seconds: float = _router(
        "unread_timeout_seconds", "Seconds without reading after which the connection of a client is closed."
    )
    max_stored_responses: int = _router(
        "max_stored_responses", "Maximum of answers of /v1/responses kept in memory; 0 keeps none."
    )
    max_stored_response_bytes: int = _router("max_stored_response_bytes", "Maximum bytes of JSON of those answers.")
    api_key: str | None = _router("api_key", "Bearer token that requests must carry.")
    api_key_file: str | None = _router(
        "api_key_file",
        "File of API keys, one a line; requests must carry one of them. Reloaded when it changes; see docs/access.md.",
    )
    protect_all_routes: bool = _router(
        "protect_all_routes",
        "Require a key on every route except health checks: also /metrics, /info, /docs and /v1/models.",
    )
    tls_cert: str | None = _router("tls_cert", "PEM file of a certificate and its chain; with --tls-key, serve HTTPS.")
    tls_key: str | None = _router("tls_key", "PEM file of the key of --tls-cert, without a passphrase.")
    tls_client_ca: str | None = _router(
        "tls_client_ca", "PEM file of certificate authorities; clients must present a certificate of one of them."
    )
    tls_probe_cert: str | None = setting(
        None,
        "PEM file of the launcher's client certificate for health checks with --tls-client-ca; --tls-cert when not "
        "given.",
    )
    tls_probe_key: str | None = setting(None, "PEM file of the key of --tls-probe-cert.")
    cors_allow_origin: tuple[str, ...] = _router(
        "cors_allow_origin", "Allowed CORS origin, repeatable; any when not given."
    )
    otlp_endpoint: str | None = _router(
        "otlp_endpoint",
        "Endpoint for spans by OTLP over gRPC, such as http://localhost:4317; no spans are sent when not given.",
    )
    otlp_service_name: str = _router(
        "otlp_service_name", "Service name of the spans; when not given, that of the shards ends in .server."
    )
    otlp_decode_tokens: int = _router(
        "otlp_decode_tokens", "Tokens of an answer per span of a trace; 1 records every step, at its cost."
    )
    memory_bandwidth: float | None = _router(
        "memory_bandwidth",
        "Peak memory bandwidth of a shard in GB/s, as `funitel bench kernels` measures it; metrics then report the "
        "fraction that decoding steps reach.",
    )
    debug_routes: bool = _router(
        "debug_routes", "Serve /debug/scheduler, which `funitel top` shows; only with a key or on loopback."
    )
    config: str | None = setting(
        None,
        "File of settings, one VARIABLE=value a line, which override the environment; reloaded on SIGHUP, see "
        "docs/restarts.md.",
        env="FUNITEL_CONFIG",
    )
    env: bool = setting(False, "Log the runtime environment, then start.", short="-e", env=None)
    json_output: bool = _router("json_output", "Log JSON lines.")
    log_level: str = _router("log_level", "Minimum log level: debug, info, warning, error.")
    max_restarts: int = setting(
        5,
        "Maximum of restarts in a row of a replica whose shard has ended; its requests wait meanwhile. With 0, as with "
        "TGI, they fail, and the launcher ends with the last replica.",
        bounds=NOT_NEGATIVE,
    )
    graceful_termination_timeout: int = setting(
        90, "Seconds that each process has to stop before it is killed.", short="-g", bounds=NOT_NEGATIVE
    )

    def __post_init__(self) -> None:
        check_bounds(self)
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
    def tls_pair(self) -> Pair | None:
        """Certificate of the HTTP port; None where HTTP is plain."""
        return Pair(self.tls_cert, self.tls_key) if self.tls_cert is not None and self.tls_key is not None else None

    @property
    def tls_probe_pair(self) -> Pair | None:
        """Client certificate of the launcher for the HTTP port; None where it needs none."""
        if self.tls_probe_cert is not None and self.tls_probe_key is not None:
            return Pair(self.tls_probe_cert, self.tls_probe_key, "--tls-probe")
        return None if self.tls_client_ca is None else self.tls_pair
