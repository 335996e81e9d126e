"""The packages that come with the extras of funitel, and one line about an extra that is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from funitel.proto.errors import MissingPackage

PACKAGES = {
    "ray": ("ray",),
    "server": ("torch", "transformers", "numpy", "safetensors", "huggingface_hub", "gguf"),
    "llama-cpp": ("llama_cpp",),
    "otlp": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"),
    "postgres": ("psycopg",),
    "oidc": ("authlib", "httpx", "joserfc"),
}


def check_extra(extra: str, what: str) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Args:
        extra: a key of `PACKAGES`.
        what: what needs the extra, the subject of the message.

    Raises:
        MissingPackage: the message names a missing package, and how to install the extra.
    """
    missing = next((package for package in PACKAGES[extra] if not _is_installed(package)), None)
    if missing is not None:
        raise MissingPackage(
            f"{what} needs packages that are not installed, such as {missing}: pip install 'funitel[{extra}]'"
        )


@contextmanager
def requiring(extra: str, what: str) -> Iterator[None]:
    """Run imports, or a function that it decorates, after `check_extra`."""
    check_extra(extra, what)
    yield


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # of the package that holds it
        return False
