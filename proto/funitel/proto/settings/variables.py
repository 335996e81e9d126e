"""Environment variables of settings: their names, and which values of widely used ones count.

Every setting has the variable `FUNITEL_` and its name. Those that text-generation-inference has are read under TGI's
name too, which other programs, shells and container platforms may set for purposes of their own.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Self

PREFIX = "FUNITEL_"
DEFAULT_PREFIX = "FUNITEL_DEFAULT_"  # of defaults that a container image sets, which the file of --config overrides

# Names of TGI's launcher, router and shards that are settings here.
TGI_VARIABLES = frozenset(
    """
    AIP_HEALTH_ROUTE AIP_PREDICT_ROUTE API_KEY ATTENTION COMPUTE_TYPE CORS_ALLOW_ORIGIN CUDA_GRAPHS CUDA_MEMORY_FRACTION
    DISABLE_GRAMMAR_SUPPORT DTYPE ENABLE_PREFILL_LOGPROBS GRACEFUL_TERMINATION_TIMEOUT HOSTNAME HUGGINGFACE_HUB_CACHE
    JSON_OUTPUT KV_CACHE_DTYPE LOG_LEVEL LORA_ADAPTERS MASTER_ADDR MASTER_PORT MASTER_SHARD_UDS_PATH
    MAX_BATCH_PREFILL_TOKENS
    MAX_BATCH_SIZE MAX_BATCH_TOTAL_TOKENS MAX_BEST_OF MAX_CLIENT_BATCH_SIZE MAX_CONCURRENT_REQUESTS MAX_IMAGE_FETCH_SIZE
    MAX_INPUT_LENGTH
    MAX_INPUT_TOKENS MAX_STOP_SEQUENCES MAX_TOP_N_TOKENS MAX_TOTAL_TOKENS MAX_WAITING_TOKENS MODEL_ID NUM_SHARD
    OTLP_ENDPOINT OTLP_SERVICE_NAME PAYLOAD_LIMIT PORT PREFILL_CHUNKING PREFIX_CACHING PROMETHEUS_PORT QUANTIZE RANK
    REQUEST_LOGPROBS REVISION ROPE_FACTOR ROPE_SCALING SHARDED SHARD_UDS_PATH SPECULATE TOKENIZER_CONFIG_PATH
    TOKENIZER_NAME TRUST_REMOTE_CODE VALIDATION_WORKERS WAITING_SERVED_RATIO WATERMARK_DELTA WATERMARK_GAMMA WORLD_SIZE
    """.split()
)
STRAY_KEY = "API_KEY"  # a variable of TGI and of many other programs
# Settings that keep clients out: under these names, without PREFIX, they are refused rather than left unread.
PROTECTIVE = ("API_KEY_FILE", "TLS_CLIENT_CA", "PROTECT_ALL_ROUTES")
# Kubernetes sets NAME_PORT to such a value for each Service of the namespace: PROMETHEUS_PORT for one named prometheus.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)


class GivenBy(str):
    """The text of a setting that an environment variable gave; `variable` is its name."""

    variable: str

    @classmethod
    def of(cls, text: str, variable: str) -> Self:
        """Mark a text with its variable."""
        given = cls(text)
        given.variable = variable
        return given


def variable_of_value(value: object) -> str | None:
    """The environment variable that gave a value; None for one of a flag or a file."""
    return value.variable if isinstance(value, GivenBy) else None


def names_of(name: str) -> tuple[str, ...]:
    """The variables of a setting by the order in which they count; `name` is the one under which it is described."""
    if name in TGI_VARIABLES:
        return (PREFIX + name, name)
    return (name,)


def image_default(name: str, environ: Mapping[str, str]) -> str | None:
    """The default that a container image sets for the setting with a variable."""
    if name == "HOSTNAME":  # FUNITEL_DEFAULT_HOSTNAME is a setting
        return None
    return environ.get(DEFAULT_PREFIX + name.removeprefix(PREFIX)) or None


def first_set(names: Iterable[str], environ: Mapping[str, str]) -> str | None:
    """The first of some variables that has a value; an empty one counts as unset."""
    return next((name for name in names if environ.get(name)), None)


def disregarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with values that other software sets under our names, and the reason of each to be logged.

    The machine's own name as HOSTNAME, which containers and shells export, has no reason: it is expected.
    """
    found: dict[str, str] = {}
    for name in ("PORT", "PROMETHEUS_PORT", "MASTER_PORT"):
        for variable in names_of(name):
            if _SERVICE_LINK.match(environ.get(variable, "")):
                found[variable] = "it is what Kubernetes sets for a Service of that name"
    host = environ.get("HOSTNAME", "")
    if host == socket.gethostname():
        found["HOSTNAME"] = ""
    elif host and host != "localhost" and not is_address(host):
        found["HOSTNAME"] = "it is no address; --hostname gives the address to listen on"
    return found


def is_address(text: str) -> bool:
    """Whether a text is an address of IPv4 or IPv6."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@contextmanager
def overlaid(environ: MutableMapping[str, str], changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables, or remove those with None, and restore all of them at the end."""
    before = {name: environ.get(name) for name in changes}
    _apply(environ, changes)
    try:
        yield
    finally:
        _apply(environ, before)


def _apply(environ: MutableMapping[str, str], changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
