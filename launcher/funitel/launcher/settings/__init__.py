"""Every setting of the launcher: its own and those it passes on to shards and router, in one `--help`."""

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
    """Serve a model: start its shards and the router, watch them, stop them in order."""

    model_id: str = setting(
        "smollm2-135m-instruct", "Catalogue name, hub repository, local folder, or path of a .gguf file."
    )
    revision: str | None = _shard("revision", "Hub revision.")
    cache_dir: str | None = _shard(
        "cache_dir",
        "Folder for models fetched and converted; ~/.cache/funitel when not given.",
        env="FUNITEL_CACHE",
    )
    huggingface_hub_cache: str | None = setting(None, "Folder of the Hugging Face hub cache.")
    validation_workers: int = _router("validation_workers", "Threads that tokenize prompts.")
    sharded: bool | None = setting(None, "Whether to split the model over several shards.", takes_value=True)
    num_shard: ShardCount | int | None = setting(
        None,
        "Number of shards; when not given, the number of GPUs that CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES "
        "names, or 1; auto: of those that nvidia-smi lists where neither does.",
        bounds=AT_LEAST_ONE,
    )
    num_replicas: int = setting(
        1,
        "Copies of the model, each of --num-shard shards; a request goes where its beginning is computed already.",
        bounds=AT_LEAST_ONE,
    )
    device: str = _shard("device", "Where the model runs.", choices=DEVICES)
    dtype: str | None = _shard(
        "dtype",
        "Precision of weights and KV. When not given, bfloat16 on a GPU; on a CPU the blocks of a GGUF stay as they "
        "are, floating-point weights become int8 and KV float16, or all float32 where the fused step cannot be built.",
        choices=DTYPES,
    )
    quantize: str | None = _shard(
        "quantize",
        "How the checkpoint's weights must be quantised; as its config.json says when not given. int8 also makes "
        "int8 of floating-point weights as they are loaded, and fp8 float8 on a GPU; on a CPU gguf keeps the blocks of "
        "a GGUF.",
        choices=QUANTIZATIONS,
        refused=REFUSED_VALUES["quantize"],
    )
    kv_cache_dtype: str | None = _shard(
        "kv_cache_dtype",
        "Precision of the KV pool on a GPU, where it is not that of --dtype; with the checkpoint's scales of keys and "
        "values, if it has some.",
        choices=KV_CACHE_DTYPES,
    )
    model_spec: str | None = _shard(
        "model_spec",
        "JSON file that describes the model, instead of what its architecture says; see docs/models.md.",
    )
    trust_remote_code: bool = _shard("trust_remote_code", "Run the code that comes with a model no other way serves.")
    rope_scaling: str | None = _shard(
        "rope_scaling",
        "How rotary positions are stretched, instead of as the checkpoint says; linear when only a factor is given.",
        choices=("linear",),
        refused=REFUSED_VALUES["rope_scaling"],
    )
    rope_factor: float | None = _shard(
        "rope_factor", "How far rotary positions, and with them the model's context, are stretched; 1 when not given."
    )
    block_size: int = _shard("block_size", "Tokens per KV block.")
    cpu_offload_gb: float = _shard(
        "cpu_offload_gb",
        "GiB of a shard's weights that stay in the host's memory and come to the GPU in every step, a layer at a time, "
        "while the one before it computes.",
    )
    kv_host_gb: float = _shard(
        "kv_host_gb",
        "GiB of the host's memory of each shard for prefix blocks that the KV pool has no room for; they are copied "
        "back when a prompt begins with them, instead of being computed again.",
    )
    attention: str | None = _shard(
        "attention",
        "Kernels of attention on a GPU: triton, flash (flash-attn, if installed) or torch; when not given, or given as "
        "TGI's name of what is not here, the fastest of those that are right.",
        choices=ATTENTIONS,
    )
    cuda_graphs: BatchSizes | None = _shard(
        "cuda_graphs",
        "Numbers of decoding rows for which a step is recorded as a CUDA graph, such as 1,2,4; 0 for none; 1, 2, 4, 8 "
        "and every eighth up to 256 when not given. A step takes the smallest that holds it.",
    )
    num_threads: int | None = _shard(
        "num_threads",
        "Compute threads of each shard; when not given, as many as a probe at start finds best of the cores, which are "
        "shared out evenly over all shards.",
    )
    thread_spin_us: int | None = _shard(
        "thread_spin_us",
        "Microseconds that threads of the fused CPU step spin before they sleep; found by a probe at start when "
        "not given.",
    )
    numa: bool = setting(
        False,
        "Pin each shard's threads and memory to a NUMA node, one shard for each when --num-shard is not given; where "
        "there is one node, pin each shard to its share of the cores.",
    )
    prefill_chunking: bool = _shard(
        "prefill_chunking",
        "Compute long prompts in chunks that share steps with running sequences.",
        takes_value=True,
    )
    prefix_caching: bool = _shard(
        "prefix_caching",
        "Let sequences that begin with the same tokens share what was computed for them.",
        takes_value=True,
    )
    enable_prefill_logprobs: bool = _shard("enable_prefill_logprobs", "Allow log-probabilities of prompt tokens.")
    disable_forced_spans: bool = _shard(
        "disable_forced_spans", "Compute every token by itself, those that alone can follow in a grammar too."
    )
    watermark_gamma: float = _shard("watermark_gamma", "Share of the vocabulary that a watermark favours.")
    watermark_delta: float = _shard("watermark_delta", "What a watermark adds to the scores of the tokens it favours.")
    cuda_memory_fraction: float = _shard(
        "cuda_memory_fraction",
        "Share of a whole GPU's memory that a shard may fill, weights and steps included; on a CPU, of the KV pool's.",
    )
    max_concurrent_requests: int = _router(
        "max_concurrent_requests", "Requests in flight at once; more are answered with 429."
    )
    max_queued_tokens: int | None = _router(
        "max_queued_tokens",
        "Most prompt tokens that wait for their first step; more are answered with 429. Unbounded when not given.",
    )
    max_best_of: int = _router("max_best_of", "Largest `best_of`.")
    max_stop_sequences: int = _router("max_stop_sequences", "Most stop sequences of a request.")
    max_top_n_tokens: int = _router("max_top_n_tokens", "Largest `top_n_tokens` and `top_logprobs`.")
    max_input_tokens: int | None = _router(
        "max_input_tokens", "Most prompt tokens of a request; measured when not given."
    )
    max_input_length: int | None = setting(None, "Legacy name of --max-input-tokens.")
    max_total_tokens: int | None = _router(
        "max_total_tokens", "Most prompt and completion tokens of a request; measured when not given."
    )
    waiting_served_ratio: float = setting(
        0.3,
        "Without chunked prefill: pause running sequences for waiting ones once there are this many waiting "
        "per running.",
    )
    max_batch_prefill_tokens: int | None = setting(
        None, "Most prompt tokens computed in one step; 4096 or the model's context when not given."
    )
    max_batch_total_tokens: int | None = _router(
        "max_batch_total_tokens", "Size of the KV pool in tokens; as much as memory allows when not given."
    )
    max_waiting_tokens: int = _router(
        "max_waiting_tokens",
        "Without chunked prefill: steps after which waiting requests are let in whatever the ratio.",
    )
    max_batch_size: int | None = _router("max_batch_size", "Most sequences running at once.")
    pipeline_steps: int = _router(
        "pipeline_steps",
        "Steps the shards are sent before the first is answered: 2 hides the router's latency, 1 does not.",
    )
    step_timeout_s: float = _router(
        "step_timeout_s",
        "Seconds a step may take before its shards are taken to hang and are started again, and that a shard may not "
        "answer before it is killed.",
    )
    target_itl_ms: float | None = _router(
        "target_itl_ms",
        "Most milliseconds between the tokens of a running stream while prompts are computed beside it; "
        "2.5 times a step without them when not given.",
    )
    target_ttft_ms: float | None = _router(
        "target_ttft_ms",
        "Most milliseconds until the first token of a request: one for which more is foreseen is refused with 429. "
        "No bound when not given.",
    )
    hostname: str | None = _router(
        "hostname",
        "Address to listen on; when not given, 0.0.0.0 where clients need a key or certificate, else 127.0.0.1.",
    )
    default_hostname: str | None = _router(
        "default_hostname",
        "Address to listen on when --hostname is not given, or is this machine's name; the image sets 0.0.0.0.",
    )
    port: int = _router("port", "Port to listen on.", short="-p")
    prometheus_port: int | None = _router(
        "prometheus_port", "A second port that answers /metrics and nothing else; /metrics is on --port anyway."
    )
    shard_uds_path: str | None = setting(
        None,
        "Unix socket of the shards, followed by -RANK; /tmp/text-generation-server, or a path of "
        "its own when another instance holds that one.",
    )
    master_addr: str = _shard("master_addr", "Host of rank 0 for torch.distributed.")
    master_port: int | None = setting(
        None,
        "Port of rank 0 for torch.distributed; further replicas have the next ones; free ones when not given.",
    )
    tokenizer_config_path: str | None = _router(
        "tokenizer_config_path", "A tokenizer_config.json to use instead of the model's own (chat template)."
    )
    served_model_name: str | None = _router(
        "served_model_name", "Name clients see for the model; the model id when not given."
    )
    max_client_batch_size: int = _router("max_client_batch_size", "Most prompts of one completions request.")
    max_client_texts: int = _router(
        "max_client_texts", "Most texts of one request for embeddings, ranks or predictions."
    )
    disable_grammar_support: bool = _router("disable_grammar_support", "Refuse requests that ask for a grammar.")
    tool_call_parser: str = _router(
        "tool_call_parser",
        "How the model writes tool calls; told from its chat template when auto.",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = _router(
        "reasoning_parser",
        "How the model marks what it thinks before it answers; told from its chat template when auto.",
        choices=REASONING_PARSERS,
    )
    payload_limit: int = _router("payload_limit", "Largest request body in bytes.")
    max_connections: int | None = _router(
        "max_connections",
        "Most connections at once; past it the one that has rested for longest gives its place. When not given, 16384, "
        "or as many as the limit on open files leaves room for.",
    )
    max_header_bytes: int = _router(
        "max_header_bytes", "Largest header of a request in bytes; a larger one is answered with 431."
    )
    header_timeout_seconds: float = _router(
        "header_timeout_seconds", "Seconds from the first byte of a request to the end of its header."
    )
    body_timeout_seconds: float = _router(
        "body_timeout_seconds", "Seconds from the end of a header to the end of its body."
    )
    idle_timeout_seconds: float = _router(
        "idle_timeout_seconds", "Seconds that a connection is kept open for another request."
    )
    max_total_body_bytes: int = _router(
        "max_total_body_bytes",
        "Most bytes of bodies that are not whole yet, over all connections; past it the largest is cut.",
    )
    max_unread_bytes: int = _router(
        "max_unread_bytes",
        "Most bytes of a streamed answer that wait for a client to read; past it its connection is cut.",
    )
    max_total_unread_bytes: int = _router(
        "max_total_unread_bytes",
        "Most bytes that wait to be read, over all connections; past it the one with most of them is cut.",
    )
    unread_timeout_seconds: float = _router(
        "unread_timeout_seconds",
        "Seconds that a client may leave what it was sent unread; then its connection is cut.",
    )
    max_stored_responses: int = _router(
        "max_stored_responses", "Most answers of /v1/responses kept in memory; 0 keeps none."
    )
    max_stored_response_bytes: int = _router(
        "max_stored_response_bytes", "Most bytes of JSON that those answers may take."
    )
    api_key: str | None = _router("api_key", "Bearer token that requests must carry.")
    api_key_file: str | None = _router(
        "api_key_file",
        "File of keys, one a line, of which a request must carry one; read again when it changes. See docs/access.md.",
    )
    protect_all_routes: bool = _router(
        "protect_all_routes",
        "Ask for a key on every route but those of health: for /metrics, /info, /docs and /v1/models too.",
    )
    tls_cert: str | None = _router("tls_cert", "PEM file of a certificate and its chain: answer HTTPS, with --tls-key.")
    tls_key: str | None = _router("tls_key", "PEM file of the key of --tls-cert, without a passphrase.")
    tls_client_ca: str | None = _router(
        "tls_client_ca", "PEM file of authorities: a client must show a certificate of theirs."
    )
    tls_probe_cert: str | None = setting(
        None,
        "PEM file of the certificate that the launcher shows when it asks for the health; with --tls-client-ca "
        "--tls-cert when not given.",
    )
    tls_probe_key: str | None = setting(None, "PEM file of the key of --tls-probe-cert.")
    cors_allow_origin: tuple[str, ...] = _router(
        "cors_allow_origin", "Allowed CORS origin, repeatable; any when not given."
    )
    otlp_endpoint: str | None = _router(
        "otlp_endpoint",
        "Where spans are sent by OTLP over gRPC, such as http://localhost:4317; nowhere when not given.",
    )
    otlp_service_name: str = _router(
        "otlp_service_name", "What the spans say they are from; those of the shards end in .server when not given."
    )
    otlp_decode_tokens: int = _router(
        "otlp_decode_tokens",
        "Tokens of an answer for which a trace has one span; 1 shows every step, and costs as much.",
    )
    memory_bandwidth: float | None = _router(
        "memory_bandwidth",
        "GB/s that a shard's memory gives at best, as `funitel bench kernels` finds; the metrics then tell what share "
        "of it decoding steps reach.",
    )
    debug_routes: bool = _router(
        "debug_routes", "Answer /debug/scheduler, which `funitel top` shows; with a key, or on loopback, only."
    )
    config: str | None = setting(
        None,
        "File of settings, one VARIABLE=value a line, which beat the environment; read again on SIGHUP, see "
        "docs/restarts.md.",
        env="FUNITEL_CONFIG",
    )
    env: bool = setting(False, "Log what this program runs on, then go on.", short="-e", env=None)
    json_output: bool = _router("json_output", "Log JSON lines.")
    log_level: str = _router("log_level", "Least severe log level: debug, info, warning, error.")
    max_restarts: int = setting(
        5,
        "Times in a row that a replica whose shard has ended is started again; its requests wait for it meanwhile. "
        "With 0, as with TGI, they fail and the last replica takes the launcher with it.",
        bounds=NOT_NEGATIVE,
    )
    graceful_termination_timeout: int = setting(
        90,
        "Seconds each process is given to stop before it is killed.",
        short="-g",
        bounds=NOT_NEGATIVE,
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
        """What the HTTP port shows; None where HTTP is plain."""
        return Pair(self.tls_cert, self.tls_key) if self.tls_cert is not None and self.tls_key is not None else None

    @property
    def tls_probe_pair(self) -> Pair | None:
        """What the launcher shows the HTTP port; None where nothing must be shown."""
        if self.tls_probe_cert is not None and self.tls_probe_key is not None:
            return Pair(self.tls_probe_cert, self.tls_probe_key, "--tls-probe")
        return None if self.tls_client_ca is None else self.tls_pair
