"""Settings of `funitel bench`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from funitel.launcher.bench.apis import DIALECTS
from funitel.launcher.bench.workload import SHAREGPT_OUTPUT, SHAREGPT_PROMPT
from funitel.launcher.terminal_ui.http_client import Api, check_client_tls
from funitel.proto.settings.fields import require, setting
from funitel.proto.settings.options import Counts, Rates
from funitel.proto.settings.variables import variable_of_value

WORKLOADS = ("fixed", "sharegpt", "shared-prefix")
MAX_TOKENS = 1 << 20
MAX_STREAMS = 4096
MAX_REQUESTS = 1 << 20


def _flag(default: Any, help: str, **more: Any) -> Any:
    """A flag without an environment variable."""
    return setting(default, help, env=None, **more)


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Load servers with requests and measure latency and throughput; `funitel bench kernels` measures this CPU.

    The last line on stdout is one JSON object.
    """

    url: tuple[str, ...] = setting(
        ("http://127.0.0.1:3000",),
        "URL of a server, repeatable: several are measured in turns and compared.",
        env="FUNITEL_URL",
    )
    name: tuple[str, ...] = _flag((), "Name of a server in tables, one for each --url; its address when not given.")
    api: tuple[str, ...] = _flag(
        ("openai-chat",), f"API that a server speaks, one of {', '.join(DIALECTS)}: one for all, or one for each --url."
    )
    model_id: tuple[str, ...] = _flag(
        (), "Model name in requests: one for all, or one for each --url; the first that a server lists when not given."
    )
    api_key: tuple[str, ...] = setting(
        (),
        "Bearer token for the server, or one for each --url; that of a variable goes to this machine and, if it is "
        "FUNITEL_API_KEY, to the servers of FUNITEL_URL.",
        keeps_variable=True,
    )
    tls_ca: str | None = _flag(None, "PEM file of authorities to trust for https servers; the system's when not given.")
    tls_cert: str | None = _flag(None, "PEM file of a certificate to show to https servers.")
    tls_key: str | None = _flag(None, "PEM file of the key of --tls-cert.")
    concurrency: Counts | None = _flag(
        None, "Concurrent streams, such as 1,4,16: a level for each; 1,4,16 when no --request-rate is given."
    )
    request_rate: Rates | None = _flag(
        None, "Requests per second at random instants (a Poisson process), such as 0.5,2: a level for each."
    )
    num_requests: int | None = _flag(
        None, "Requests of a level in each round; when not given, 4 for each stream but at least 8, or 64 with a rate."
    )
    rounds: int = _flag(1, "Number of times that every level of every server is run, in turns; tables show medians.")
    warmup: int | None = _flag(
        None, "Requests to each server before measuring; the streams of the largest level when not given."
    )
    workload: str = _flag(
        "fixed",
        "Lengths and prompts: fixed, distributed like the conversations of ShareGPT, or groups that share a prefix.",
        choices=WORKLOADS,
    )
    prompt_tokens: int | None = _flag(
        None, f"Tokens of a prompt; 108 when not given; for sharegpt the mean, {SHAREGPT_PROMPT} when not given."
    )
    output_tokens: int | None = _flag(
        None, f"Tokens of an answer; 64 when not given; for sharegpt the mean, {SHAREGPT_OUTPUT} when not given."
    )
    prefix_tokens: int | None = _flag(
        None, "shared-prefix: tokens at the start of a prompt that its group shares; three quarters when not given."
    )
    num_groups: int = _flag(4, "shared-prefix: groups of requests.")
    ignore_eos: bool = _flag(
        True, "Ask servers to go on after the end token, where supported, so that all answers have the same length."
    )
    seed: int | None = _flag(
        None,
        "Seed of lengths, words and instants; random when not given, so that no server has cached the prompts of an "
        "earlier run.",
    )
    slo_ttft_ms: float | None = _flag(
        None, "Goodput counts requests with a time to first token of at most this many ms."
    )
    slo_itl_ms: float | None = _flag(
        None, "Goodput counts requests with a 99th percentile of gaps between tokens of at most this many ms."
    )
    timeout: float = _flag(600.0, "Seconds after which a request is aborted and counted as failed.")
    plot: str | None = _flag(None, "PNG file of latency against throughput; needs matplotlib.")

    def __post_init__(self) -> None:
        for url in self.url:
            Api(url)
        check_client_tls(self, *self.url)
        for flag, given in (("--api", self.api), ("--model-id", self.model_id)):
            require(
                len(given) in (0, 1, len(self.url)),
                f"{flag} must be given once or once for each of {len(self.url)} --url, given {len(given)} times",
            )
        hosts = {urlsplit(Api(url).url).hostname for url in self.url}
        is_given = any(variable_of_value(key) is None for key in self.api_key)
        require(
            not is_given or len(self.api_key) == len(self.url) or (len(self.api_key) == 1 and len(hosts) == 1),
            f"--api-key must be given once for each of {len(self.url)} --url, given {len(self.api_key)} times",
        )
        for api in self.api:
            require(api in DIALECTS, f"--api must be one of {', '.join(DIALECTS)}, given {api!r}")
        require(bool(self.api), "--api must be given at least once")
        require(bool(self.url), "--url must be given at least once")
        require(
            not self.name or len(self.name) == len(self.url),
            f"--name must be given for each of {len(self.url)} --url, given {len(self.name)} times",
        )
        names = [*map(self.name_of, range(len(self.url)))]
        require(
            len(set(names)) == len(names), f"two servers have the same name, give each a --name: {', '.join(names)}"
        )
        require(
            self.concurrency is None or self.request_rate is None,
            "give either --concurrency or --request-rate, not both",
        )
        self._check_numbers()
        self._check_prefix()
        if self.plot is not None:
            folder = Path(self.plot).absolute().parent
            require(folder.is_dir(), f"--plot {self.plot}: there is no folder {folder}")
            require(not Path(self.plot).is_dir(), f"--plot {self.plot} is a folder, not a file")

    def _check_numbers(self) -> None:
        for flag, value, most in (
            *(("--concurrency", count, MAX_STREAMS) for count in self.concurrency or ()),
            ("--num-requests", self.num_requests, MAX_REQUESTS),
            ("--rounds", self.rounds, 1000),
            ("--prompt-tokens", self.prompt_tokens, MAX_TOKENS),
            ("--output-tokens", self.output_tokens, MAX_TOKENS),
            ("--num-groups", self.num_groups, MAX_REQUESTS),
        ):
            require(value is None or 1 <= value <= most, f"{flag} must be within 1..{most}, given {value}")
        for flag, amount in (
            *(("--request-rate", rate) for rate in self.request_rate or ()),
            ("--slo-ttft-ms", self.slo_ttft_ms),
            ("--slo-itl-ms", self.slo_itl_ms),
            ("--timeout", self.timeout),
        ):
            require(amount is None or 0 < amount < 1e9, f"{flag} must be within (0, 1e9), given {amount}")
        require(self.warmup is None or self.warmup >= 0, f"--warmup must be >= 0, given {self.warmup}")

    def _check_prefix(self) -> None:
        if self.workload != "shared-prefix":
            require(self.prefix_tokens is None, f"--prefix-tokens is for --workload shared-prefix, not {self.workload}")
            require(self.num_groups == 4, f"--num-groups is for --workload shared-prefix, not {self.workload}")
            return
        prompt = self.prompt_length
        require(prompt >= 2, f"--prompt-tokens must be >= 2 to have a prefix, given {prompt}")
        require(
            self.prefix_tokens is None or 1 <= self.prefix_tokens < prompt,
            f"--prefix-tokens must be within 1..{prompt - 1} (--prompt-tokens - 1), given {self.prefix_tokens}",
        )

    @property
    def prompt_length(self) -> int:
        """Tokens of a prompt, or their mean."""
        return self.prompt_tokens or (SHAREGPT_PROMPT if self.workload == "sharegpt" else 108)

    @property
    def output_length(self) -> int:
        """Tokens of an answer, or their mean."""
        return self.output_tokens or (SHAREGPT_OUTPUT if self.workload == "sharegpt" else 64)

    @property
    def prefix_length(self) -> int:
        """Tokens of a prompt that its group shares."""
        if self.workload != "shared-prefix":
            return 0
        return self.prefix_tokens or max(1, self.prompt_length * 3 // 4)

    def name_of(self, index: int) -> str:
        """Name of a server in tables."""
        return self.name[index] if self.name else self.url[index].removeprefix("http://").rstrip("/")

    def api_key_of(self, index: int) -> str | None:
        """The key that was given for a server; `credential_for` decides whether it is sent there."""
        return self.api_key[index % len(self.api_key)] if self.api_key else None

    def api_of(self, index: int) -> str:
        """The API that a server speaks."""
        return self.api[index % len(self.api)]

    def model_of(self, index: int) -> str:
        """The model name in requests to a server; empty when the server decides."""
        return self.model_id[index % len(self.model_id)] if self.model_id else ""
