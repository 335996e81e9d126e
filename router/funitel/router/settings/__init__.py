"""Every setting of the router process; flags, variables and defaults are TGI's where TGI has them."""

import re
from dataclasses import dataclass
from typing import Any

from funitel.proto.security.keys import keys_of
from funitel.proto.security.tls import MutualTls
from funitel.proto.settings.adapter_list import AdapterList
from funitel.proto.settings.bounds import NOT_NEGATIVE, POSITIVE, Bounds
from funitel.proto.settings.fields import check_bounds, require, setting
from funitel.proto.settings.listen_address import EVERY_ADDRESS, LOOPBACK, is_loopback
from funitel.proto.settings.options import Counts
from funitel.proto.settings.variables import PREFIX, STRAY_KEY, variable_of_value

TOOL_CALL_PARSERS = (
    *(
        "auto",
        "harmony",
        "deepseek_v32",
        "deepseek_v3",
        "deepseek_v31",
        "kimi_k2",
        "minimax_m2",
        "qwen3_coder",
        "glm45",
    ),
    *("gemma4", "functiongemma", "granite", "hermes", "mistral", "lfm2", "olmo3", "pythonic", "llama3_json"),
    *("gemma_code", "json"),
)
REASONING_PARSERS = ("auto", "none", "harmony", "think", "mistral", "seed", "gemma4")
TEXT_PAYLOAD_LIMIT, MEDIA_PAYLOAD_LIMIT = 2_000_000, 64_000_000  # bytes of a body, by what the model takes
MAX_GB_S = 1_000_000  # a petabyte a second: more than any memory
MAX_TIMEOUT_SECONDS = 86_400  # a day
MAX_TARGET_ITL_MS = 600_000  # ten minutes
MAX_TARGET_TTFT_MS = 86_400_000  # a day, as for deadlines
MAX_TTL_SECONDS = 315_360_000  # ten years
RECOMPUTE, SWAP = PREEMPTION_MODES = "recompute", "swap"
VICTIMS = "newest", "longest", "random"
TIMEOUT = Bounds(above=0, maximum=MAX_TIMEOUT_SECONDS)
TOKEN_COUNT = Bounds(above=0, maximum=2**32 - 1)  # the wire counts tokens in 32 bits
_MEDIA_DOMAIN = re.compile(r"((\*\.)?[\w-]+(\.[\w-]+)*|\[[\da-fA-F:.]+\])(:\d{1,5})?", re.ASCII)
_REPLICA_ADDRESS = re.compile(r"unix:///.+|tcp://.+:\d+")


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """Validate, queue and batch HTTP requests and call the model shards."""

    tokenizer_name: str = setting(
        "smollm2-135m-instruct", "Folder with tokenizer.json and config.json, or a hub repository."
    )
    revision: str | None = setting(None, "Revision of the hub repository.")
    served_model_name: str | None = setting(None, "Name of the model in answers; the tokenizer name when not given.")
    tokenizer_config_path: str | None = setting(
        None, "A tokenizer_config.json to use instead of the model's own (chat template)."
    )
    master_shard_uds_path: str = setting("/tmp/text-generation-server-0", "Unix socket of the shard with rank 0.")
    master_shard_address: str | None = setting(
        None, "host:port of the shard with rank 0, when it listens on TCP instead of a Unix socket."
    )
    replica_address: tuple[str, ...] = setting(
        (),
        "unix:///path or tcp://host:port of rank 0 of a further replica of the same model, repeatable; "
        "--master-shard-uds-path or --master-shard-address names the first one.",
    )
    shard_connect_timeout: int = setting(
        600, "Timeout in seconds for shards to start; requests are answered with 503 meanwhile.", bounds=NOT_NEGATIVE
    )
    shard_return_timeout: int = setting(
        600,
        "Seconds that requests wait for lost shards to return when no replica is left; with 0 they fail at once and "
        "lost replicas are not reconnected.",
        bounds=NOT_NEGATIVE,
    )
    control_socket: str | None = setting(
        None,
        "Unix socket of the control plane, which says what models are served beside the one of --tokenizer-name.",
        env=None,
    )
    users: bool = setting(
        False,
        "Whether requests need an API key or a session of a user of the control plane; `funitel user new` adds the "
        "first one.",
    )
    no_model: bool = setting(
        False, "Serve no model but those that the control plane of --control-socket names.", env=None
    )
    wait_for_load: float = setting(
        600.0,
        "Seconds that a request waits for its model to be loaded before it is answered with 503; 0 does not wait.",
        bounds=Bounds(minimum=0, maximum=MAX_TIMEOUT_SECONDS),
    )
    lora_adapters: AdapterList | None = setting(
        None,
        "Adapters to serve beside the model, comma-separated: a hub repository, name=owner/repo@revision or "
        "name=/folder; `adapter_id` or `model` of a request names one.",
    )
    max_loras: int = setting(
        8,
        "Maximum of adapters in the memory of a shard; for another one, the least recently used of the idle ones is "
        "evicted.",
        bounds=POSITIVE,
    )
    lora_folder: str | None = setting(
        None, "Folder below which /v1/load_lora_adapter finds adapters; when not given, that route is refused."
    )
    step_timeout_s: float = setting(
        60.0,
        "Step timeout in seconds, after which shards count as hanging and are restarted: five times as many for first "
        "steps, ten times the measured cost of similar steps for long ones.",
        bounds=TIMEOUT,
    )
    hostname: str | None = setting(
        None,
        "Address to listen on; when not given, 0.0.0.0 if clients need a certificate, or a key that is not that of the "
        "variable API_KEY, else 127.0.0.1.",
    )
    default_hostname: str | None = setting(
        None, "Address to listen on when --hostname is not given, or is this machine's name; the image sets 0.0.0.0."
    )
    port: int = setting(3000, "Port to listen on.", short="-p", bounds=Bounds(minimum=0, maximum=65535))
    prometheus_port: int | None = setting(None, "A second port that serves only /metrics; --port serves /metrics too.")
    max_concurrent_requests: int = setting(
        128, "Maximum of requests in flight; more are answered with 429.", bounds=POSITIVE
    )
    max_queued_tokens: int | None = setting(
        None,
        "Maximum of prompt tokens in the waiting queue; more are answered with 429. Unbounded when not given.",
        bounds=POSITIVE,
    )
    max_best_of: int = setting(2, "Maximum of `best_of`, and of the beams of a search.", bounds=POSITIVE)
    max_stop_sequences: int = setting(4, "Maximum of stop sequences in a request.", bounds=NOT_NEGATIVE)
    default_stop: tuple[str, ...] = setting(
        (), "Text that ends every completion, repeatable; beside what a request asks for, and not with ignore_eos."
    )
    default_stop_token_ids: Counts | None = setting(
        None, "Tokens that end every completion, such as 2,107; beside those of the model and of a request."
    )
    max_top_n_tokens: int = setting(5, "Maximum of `top_n_tokens`.", bounds=NOT_NEGATIVE)
    max_logprobs: int = setting(
        20,
        "Maximum of `top_logprobs` and `logprobs` on OpenAI's routes, unless --max-top-n-tokens is more.",
        bounds=NOT_NEGATIVE,
    )
    max_input_tokens: int | None = setting(
        None, "Maximum of prompt tokens in a request; measured when not given.", bounds=TOKEN_COUNT
    )
    max_total_tokens: int | None = setting(
        None, "Maximum of prompt and completion tokens in a request; measured when not given.", bounds=TOKEN_COUNT
    )
    max_batch_prefill_tokens: int = setting(4096, "Maximum of prompt tokens computed in one step.", bounds=TOKEN_COUNT)
    max_batch_total_tokens: int | None = setting(
        None, "Size of the KV pool in tokens; as much as memory allows when not given.", bounds=TOKEN_COUNT
    )
    max_batch_size: int | None = setting(None, "Maximum of running sequences.", bounds=POSITIVE)
    waiting_served_ratio: float = setting(
        1.2,
        "Without chunked prefill: waiting per running sequences at which the running ones pause for a prefill.",
        bounds=NOT_NEGATIVE,
    )
    max_waiting_tokens: int = setting(
        20,
        "Without chunked prefill: steps after which waiting requests are admitted at any ratio.",
        bounds=NOT_NEGATIVE,
    )
    target_itl_ms: float | None = setting(
        None,
        "Target for the milliseconds between tokens of a running stream while prompts are computed; 2.5 times a step "
        "without prompts, or 40 if that is more, when not given.",
        bounds=Bounds(above=0, maximum=MAX_TARGET_ITL_MS),
    )
    target_ttft_ms: float | None = setting(
        None,
        "Target for the time to first token in milliseconds: a request with a longer estimate is refused with 429. No "
        "bound when not given.",
        bounds=Bounds(above=0, maximum=MAX_TARGET_TTFT_MS),
    )
    pipeline_steps: int | None = setting(
        None,
        "Steps in flight at the shards: 1 waits for the router between two steps. 3 on a GPU and 2 elsewhere "
        "when not given.",
        bounds=Bounds(minimum=1, maximum=3),
    )
    max_client_batch_size: int = setting(4, "Maximum of prompts in one completions request.", bounds=POSITIVE)
    max_client_texts: int = setting(
        2048, "Maximum of texts in one request for embeddings, ranks or predictions.", bounds=POSITIVE
    )
    disable_grammar_support: bool = setting(False, "Refuse requests with a grammar.")
    tool_call_parser: str = setting(
        "auto", "Format of the model's tool calls; auto detects it from the chat template.", choices=TOOL_CALL_PARSERS
    )
    reasoning_parser: str = setting(
        "auto", "Format of the model's reasoning; auto detects it from the chat template.", choices=REASONING_PARSERS
    )
    chat_special_tokens: bool = setting(
        False, "Read control tokens such as <|im_end|> in the texts of chats as control tokens, as TGI does."
    )
    validation_workers: int = setting(
        2, "Threads that tokenize prompts, and maximum of processes that tokenize long ones.", bounds=POSITIVE
    )
    strict_fields: bool = setting(
        False, "Refuse bodies with unknown fields, instead of ignoring those with one warning a name."
    )
    openai_errors: bool = setting(
        False, "Answer errors of /v1 routes that TGI has with OpenAI's statuses, error body and bounds, not TGI's."
    )
    allowed_media_domains: tuple[str, ...] = setting(
        (),
        "Host whose URLs of images are fetched, repeatable: a name, or *.example.com for all below it, with a port if "
        "that is not 80 or 443. When not given, nothing is fetched: requests carry images as data: URLs.",
    )
    max_image_fetch_size: int = setting(
        33_554_432, "Maximum size in bytes of an image that is fetched, or that a request carries.", bounds=POSITIVE
    )
    media_fetch_timeout_s: float = setting(
        10.0, "Timeout in seconds to fetch an image, redirects included.", bounds=TIMEOUT
    )
    allow_private_media_addresses: bool = setting(
        False, "Fetch images from private, loopback and other addresses that are not on the public internet, too."
    )
    max_media_items: int = setting(64, "Maximum of images and sounds in a request.", bounds=POSITIVE)
    max_media_pixels: int = setting(
        64_000_000, "Maximum of pixels of an image, before it is processed and on the way.", bounds=POSITIVE
    )
    media_processed_cache_mb: int = setting(
        256, "Memory in MiB for processed images, which are taken again where a chat repeats them.", bounds=NOT_NEGATIVE
    )
    payload_limit: int | None = setting(
        None,
        "Maximum size of a request body in bytes. When not given, 2000000, or 64000000 where the model takes images.",
        bounds=POSITIVE,
    )
    max_connections: int | None = setting(
        None,
        "Maximum of open connections; at the maximum, the connection that is idle for longest is closed. When not "
        "given, 16384, or as many as the limit on open files allows.",
        bounds=POSITIVE,
    )
    max_header_bytes: int = setting(
        32_768, "Maximum size of a request's header in bytes; a larger header is answered with 431.", bounds=POSITIVE
    )
    header_timeout_seconds: float = setting(
        20.0, "Timeout in seconds from the first byte of a request to the end of its header.", bounds=TIMEOUT
    )
    body_timeout_seconds: float = setting(
        60.0, "Timeout in seconds from the end of a header to the end of its body.", bounds=TIMEOUT
    )
    # Longer than the pools of common clients and proxies keep an idle connection.
    idle_timeout_seconds: float = setting(75.0, "Seconds after which an idle connection is closed.", bounds=TIMEOUT)
    max_total_body_bytes: int = setting(
        256_000_000,
        "Maximum bytes of incomplete bodies over all connections; above it, the connection of the largest is closed.",
        bounds=POSITIVE,
    )
    max_unread_bytes: int = setting(
        4_000_000,
        "Maximum bytes of a streamed answer that a client has not read; above it, its connection is closed.",
        bounds=POSITIVE,
    )
    max_total_unread_bytes: int = setting(
        256_000_000,
        "Maximum bytes of unread answers over all connections; above it, the connection with the most is closed.",
        bounds=POSITIVE,
    )
    unread_timeout_seconds: float = setting(
        60.0, "Seconds without reading after which the connection of a client is closed.", bounds=TIMEOUT
    )
    max_resume_seconds: int = setting(
        300,
        "Maximum seconds that a client may ask for with x-resume-seconds, in which a stream goes on without it and its "
        "events are kept; 0: none are. See docs/requests.md.",
        bounds=Bounds(minimum=0, maximum=MAX_TIMEOUT_SECONDS),
    )
    max_resume_bytes: int = setting(
        1 << 26,
        "Maximum bytes of all events that are kept for clients which lose their connection; above it, the stream with "
        "the most cannot be resumed any more.",
        bounds=POSITIVE,
    )
    max_stored_responses: int = setting(
        1000, "Maximum of answers of /v1/responses kept in memory; 0 keeps none.", bounds=NOT_NEGATIVE
    )
    max_stored_response_bytes: int = setting(64_000_000, "Maximum bytes of JSON of those answers.", bounds=POSITIVE)
    batch_dir: str | None = setting(
        None, "Folder of files and batches, which /v1/files and /v1/batches need; one router at a time has it."
    )
    max_batch_requests: int = setting(50_000, "Maximum of requests in a batch.", bounds=POSITIVE)
    max_batch_file_bytes: int = setting(
        200_000_000, "Maximum size in bytes of a file that is uploaded for a batch.", bounds=POSITIVE
    )
    max_audio_bytes: int = setting(
        25_000_000, "Maximum size in bytes of an audio file that is transcribed, or in a chat.", bounds=POSITIVE
    )
    max_audio_seconds: float = setting(
        1500.0,
        "Maximum length in seconds of a sound that is transcribed, or in a chat.",
        bounds=Bounds(minimum=1, maximum=86_400),
    )
    api_key: str | None = setting(None, "Bearer token that requests must carry.", keeps_variable=True)
    api_key_file: str | None = setting(
        None,
        "File of API keys, one a line; requests must carry one of them. Reloaded when it changes; see docs/access.md.",
    )
    max_wrong_keys: int = setting(
        0,
        "Wrong API keys of one address that ban it for --ban-seconds; 0: none does. Leave it off behind a proxy, whose "
        "address all its clients share.",
        bounds=NOT_NEGATIVE,
    )
    ban_seconds: float = setting(
        300.0,
        "Length of a ban by --max-wrong-keys in seconds, and the time in which wrong keys are counted together.",
        bounds=TIMEOUT,
    )
    share_prefixes: bool = setting(
        False, "Share cached prefixes between all API keys; by default only keys of one group share them."
    )
    prefix_cache_ttl: float | None = setting(
        None,
        "Seconds without use after which a cached prefix is forgotten, in memory and on disk; never when not given.",
        bounds=Bounds(above=0, maximum=MAX_TTL_SECONDS),
    )
    preemption_mode: str = setting(
        RECOMPUTE,
        "What becomes of the KV blocks of a preempted sequence: recompute them when it is resumed, or swap them out to "
        "slots of --kv-disk-gb or --kv-host-gb.",
        choices=PREEMPTION_MODES,
    )
    preemption_victim: str = setting(
        "newest",
        "Sequence that is preempted, of the key that holds most blocks and the least urgent of that: the newest, the "
        "longest, or a random one.",
        choices=VICTIMS,
    )
    protect_all_routes: bool = setting(
        False, "Require a key on every route except health checks: also /metrics, /info, /docs and /v1/models."
    )
    tls_cert: str | None = setting(None, "PEM file of a certificate and its chain; with --tls-key, serve HTTPS.")
    tls_key: str | None = setting(None, "PEM file of the key of --tls-cert, without a passphrase.")
    tls_client_ca: str | None = setting(
        None, "PEM file of certificate authorities; clients must present a certificate of one of them."
    )
    shard_tls_cert: str | None = setting(
        None, "PEM file of a certificate that is shown to shards on TCP; with --shard-tls-key and -ca.", env=None
    )
    shard_tls_key: str | None = setting(None, "PEM file of the key of --shard-tls-cert.", env=None)
    shard_tls_ca: str | None = setting(
        None, "PEM file of authorities: a shard on TCP must show a certificate of theirs.", env=None
    )
    cors_allow_origin: tuple[str, ...] = setting(
        (),
        "Allowed CORS origin, repeatable; when not given, any, or those of this machine if the server listens on "
        "loopback without a key.",
    )
    allowed_host: tuple[str, ...] = setting(
        (),
        "Host that requests may name beside loopback, repeatable, * for any; when not given, any, or none if the "
        "server listens on loopback without a key.",
    )
    aip_predict_route: str | None = setting(None, "A further path of /vertex; Vertex AI names it in this variable.")
    aip_health_route: str | None = setting(None, "A further path of /health; Vertex AI names it in this variable.")
    compute_type: str | None = setting(None, "Value of `x-compute-type`; shards and device when not given.")
    git_sha: str | None = setting(None, "Commit the server was built from, for /info.")
    docker_label: str | None = setting(None, "Label of the container image, for /info.")
    otlp_endpoint: str | None = setting(
        None, "Endpoint for spans by OTLP over gRPC, such as http://localhost:4317; no spans are sent when not given."
    )
    otlp_service_name: str = setting("text-generation-inference.router", "Service name of the spans.")
    otlp_decode_tokens: int = setting(
        32, "Tokens of an answer per span of a trace; 1 records every step, at its cost.", bounds=POSITIVE
    )
    memory_bandwidth: float | None = setting(
        None,
        "Peak memory bandwidth of a shard in GB/s, as `funitel bench kernels` measures it; metrics then report the "
        "fraction that decoding steps reach.",
        bounds=Bounds(above=0, maximum=MAX_GB_S),
    )
    console: bool = setting(True, "Serve the console for browsers at /ui.", takes_value=True)
    debug_routes: bool = setting(
        False, "Serve /debug/scheduler, the state of the scheduler; only with a key or on loopback."
    )
    json_output: bool = setting(False, "Log JSON lines.")
    log_level: str = setting("info", "Minimum log level: debug, info, warning, error.")
    listen_fd: tuple[int, ...] = setting(
        (), "Descriptor of a listening socket, instead of opening --port; a second one for --prometheus-port.", env=None
    )
    shutdown_delay: float = setting(
        0.0,
        "Seconds from SIGTERM in which requests are still taken, while `/health/ready` is 503 and every answer ends "
        "its connection, so that balancers find out before a request is refused.",
        bounds=Bounds(minimum=0, maximum=MAX_TIMEOUT_SECONDS),
    )
    ready_fd: int | None = setting(
        None,
        "Descriptor to write to once the shards are ready; connections are accepted from then on only, unless "
        "--accepts-early.",
        env=None,
    )
    accepts_early: bool = setting(
        False, "With --ready-fd, accept connections before the shards are ready too, and answer 503.", env=None
    )
    keeper: str | None = setting(
        None,
        "Socket of the keeper, which accepts connections for this router, and gives it those of an earlier one.",
        env=None,
    )
    generation: int = setting(
        0,
        "With --keeper, number of the deployment; routers of the same one take over from one another.",
        env=None,
        bounds=NOT_NEGATIVE,
    )
    exit_with_parent: int | None = setting(None, "Process id of the parent; this process stops when it ends.", env=None)
    deployment_file: str | None = setting(
        None,
        "With --exit-with-parent, file that names another launcher which has adopted this process, once its own has "
        "ended.",
        env=None,
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        check_api_key(self.api_key)
        check_access(self)
        require(
            not self.debug_routes or bool(self.api_key or self.api_key_file) or self._is_local,
            "--debug-routes needs --api-key or --api-key-file, or --hostname 127.0.0.1, given "
            f"{self.hostname or self.default_hostname}",
        )
        for name in ("aip_predict_route", "aip_health_route"):
            path = getattr(self, name)
            require(
                path is None or path.startswith("/"),
                f"--{name.replace('_', '-')} must be a path that begins with /, given {path!r}",
            )
        for address in self.replica_address:
            require(
                bool(_REPLICA_ADDRESS.fullmatch(address)),
                f"--replica-address must be unix:///path or tcp://host:port, given {address!r}",
            )
            require(
                [self.master_url, *self.replica_address].count(address) == 1,
                f"--replica-address {address} is the address of two replicas",
            )
        for domain in self.allowed_media_domains:
            require(
                bool(_MEDIA_DOMAIN.fullmatch(domain)),
                "--allowed-media-domains must be a name such as example.com, *.example.com or localhost:8000, given "
                f"{domain!r}",
            )
        require(
            self.shard_tls is None
            or self.control_socket is not None
            or any(url.startswith("tcp:") for url in (self.master_url, *self.replica_address)),
            "--shard-tls-cert, --shard-tls-key and --shard-tls-ca are for shards on TCP, of which no address is given",
        )
        require(not self.no_model or self.control_socket is not None, "--no-model needs --control-socket")
        check_prometheus_port(self.prometheus_port, self.port)
        check_token_limits(self.max_input_tokens, self.max_total_tokens, self.max_batch_total_tokens)
        require(
            self.max_batch_total_tokens is None or self.max_batch_prefill_tokens <= self.max_batch_total_tokens,
            f"--max-batch-prefill-tokens {self.max_batch_prefill_tokens} must be <= "
            f"--max-batch-total-tokens {self.max_batch_total_tokens}",
        )

    @property
    def _is_local(self) -> bool:
        """Whether the HTTP port is on loopback."""
        hostname = self.hostname or self.default_hostname
        return not opens_port(self) if hostname is None else is_loopback(hostname)

    @property
    def has_several_keys(self) -> bool:
        """Whether one API key must leave something to others."""
        return len(keys_of(self.api_key, self.api_key_file)) > 1

    @property
    def shard_tls(self) -> MutualTls | None:
        """TLS for shards on TCP; None for plain connections."""
        return MutualTls.of(self.shard_tls_cert, self.shard_tls_key, self.shard_tls_ca)

    @property
    def master_url(self) -> str:
        """Address of rank 0 of the first replica."""
        if self.master_shard_address is not None:
            return f"tcp://{self.master_shard_address}"
        return f"unix://{self.master_shard_uds_path}"


def check_api_key(api_key: str | None) -> None:
    """Raise SettingsError for an empty key, which a request without one would match."""
    require(api_key != "", "--api-key must not be empty: leave it out to let every request in")


def is_guarded(settings: Any) -> bool:
    """Whether clients are authenticated, by the settings of a router or a launcher."""
    given = (settings.api_key, settings.api_key_file, settings.tls_client_ca)
    return bool(settings.users) or any(value is not None for value in given)


def opens_port(settings: Any) -> bool:
    """Whether clients are authenticated by settings that were made for this server, a router or a launcher.

    The variable API_KEY does not count: other programs have it too, and it would open the port of a server by accident.
    """
    is_stray = variable_of_value(settings.api_key) == STRAY_KEY
    is_alone = settings.api_key_file is None and settings.tls_client_ca is None and not settings.users
    return is_guarded(settings) and not (is_stray and is_alone)


def local_only(settings: Any) -> str:
    """The line that says why a server without an address listens on loopback."""
    name = variable_of_value(settings.api_key)
    known = "there is no API key" if name is None else f"the API key is that of {name}, which other programs read too"
    own = "--api-key" if name is None else f"it as {PREFIX}{name} or --api-key"
    rest = "serve without a key" if name is None else "listen on all addresses"
    return (
        f"{known}: listening on {LOOPBACK}, for this machine only; for other machines give {own}, or "
        f"--hostname {EVERY_ADDRESS} to {rest}"
    )


def check_access(settings: Any) -> None:
    """Raise SettingsError when settings of keys and certificates, a router's or a launcher's, are incomplete."""
    has_key = settings.api_key is not None or settings.api_key_file is not None
    require(
        settings.api_key_file is None or variable_of_value(settings.api_key) != STRAY_KEY,
        f"{STRAY_KEY} is set in the environment and would be a key beside those of --api-key-file: "
        f"unset it, or give it as {PREFIX}{STRAY_KEY}",
    )
    require(has_key or not settings.protect_all_routes, "--protect-all-routes needs --api-key or --api-key-file")
    require(
        (settings.tls_cert is None) == (settings.tls_key is None),
        f"--tls-cert and --tls-key need each other, given {settings.tls_cert or settings.tls_key} alone",
    )
    require(
        settings.tls_client_ca is None or settings.tls_cert is not None,
        f"--tls-client-ca {settings.tls_client_ca} needs --tls-cert and --tls-key",
    )


def check_prometheus_port(prometheus_port: int | None, port: int) -> None:
    """Raise SettingsError when the second port is not valid, or is the first one."""
    require(
        prometheus_port is None or 1 <= prometheus_port <= 65535,
        f"--prometheus-port must be within 1..65535, given {prometheus_port}",
    )
    require(
        prometheus_port != port,
        f"--prometheus-port {prometheus_port} is --port: leave it out, /metrics is answered there anyway",
    )


def check_token_limits(max_input: int | None, max_total: int | None, max_batch_total: int | None) -> None:
    """Raise SettingsError when the given limits, in tokens, contradict each other."""
    require(
        max_input is None or max_total is None or max_input < max_total,
        f"--max-input-tokens {max_input} must be < --max-total-tokens {max_total}",
    )
    require(
        max_total is None or max_batch_total is None or max_total <= max_batch_total,
        f"--max-total-tokens {max_total} must be <= --max-batch-total-tokens {max_batch_total}",
    )
