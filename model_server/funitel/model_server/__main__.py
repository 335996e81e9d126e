"""Entry point `funitel-server`: `serve` one rank of a model, `download-weights`, `quantize` to a folder."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import typer

from funitel.model_server.device.cpu_affinity import pin
from funitel.model_server.device.torch_import import import_torch, imports_kept
from funitel.model_server.hub import resolve
from funitel.model_server.rpc.listen_address import remove_files
from funitel.model_server.settings import (
    ARGUMENTS,
    LLAMA_CPP,
    CachedSettings,
    CheckSpecSettings,
    DownloadSettings,
    KernelSettings,
    ModelServerSettings,
    ModelsSettings,
    PerplexitySettings,
    QuantizeSettings,
    RemoveCachedSettings,
    SpecSettings,
)
from funitel.model_server.tools import control_plane
from funitel.proto.extras import check_extra, requiring
from funitel.proto.process import logs
from funitel.proto.process.deployment_file import end_with_launcher
from funitel.proto.process.standard_streams import open_standard_streams
from funitel.proto.settings.command import CommandGroup, SettingsCommand
from funitel.proto.settings.fields import as_command, run_app
from funitel.proto.tracing.export import export

app = typer.Typer(
    cls=CommandGroup, help="Model shards of funitel.", rich_markup_mode=None, pretty_exceptions_enable=False
)


@requiring("server", "fetching a model")
def download(settings: DownloadSettings) -> None:
    """Make a model's files present and whole; print their folder as the last line of stdout."""
    end_with_launcher(settings.exit_with_parent, None)
    resolve.serve_a_program(reports_progress=settings.reports_progress)
    if settings.draft_model is not None:
        resolve.download_weights(settings.draft_model, cache_dir=settings.cache_dir)
    if settings.engine == LLAMA_CPP:
        check_extra("llama-cpp", "--engine llama_cpp")
    revision, cache_dir = settings.revision, settings.cache_dir
    folder = resolve.download_weights(settings.model_id, revision=revision, cache_dir=cache_dir, engine=settings.engine)
    print(folder)


@requiring("server", "quantising a model")
def quantize(settings: QuantizeSettings) -> None:
    """Write a model with smaller weights to a folder; print the folder as the last line of stdout."""
    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        sys.exit(128 + number)  # an exception, which cleans up

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    from funitel.model_server.tools.quantize.command import run  # torch: seconds to import, not wanted for --help

    try:
        print(run(settings))
    except Exception:
        if received:  # native code makes errors of its own of an exception that a signal raised inside it
            sys.exit(128 + received[0])
        raise


@requiring("server", "a measurement")
def measure(settings: KernelSettings | PerplexitySettings) -> None:
    """Measure the matrix products of the fused CPU step, or how well a model predicts a text."""
    from funitel.model_server.tools.measurements import (
        measure as run,  # torch: seconds to import, not wanted for --help
    )

    run(settings)


@requiring("server", "the spec of a model")
def spec(settings: SpecSettings) -> None:
    """Print the spec of a model, or what does not fit it; then the exit code is 1."""
    from funitel.model_server.tools import spec as spec_command  # torch: seconds to import, not wanted for --help

    folder = resolve.resolve(settings.model_id, revision=settings.revision, cache_dir=settings.cache_dir).folder
    if settings.action == "show":
        print(spec_command.show(folder, is_whole=settings.all_fields, architecture=settings.architecture))
        return
    problems = spec_command.check(folder, settings.model_spec)
    print("\n".join(problems) or f"ok: every tensor of {folder} is in the spec, with its shape")
    if problems:
        raise typer.Exit(1)


@requiring("server", "the list of models")
def models(settings: ModelsSettings) -> None:
    """List what can be served, or say what one model takes; then the exit code is 1 where it does not fit."""
    from funitel.model_server.tools.models.report import list_all, tell  # torch: seconds to import

    if not settings.model_id:
        print(list_all(is_json=settings.json))
        return
    text, fits = tell(settings)
    print(text)
    if not fits:
        raise typer.Exit(1)


def cached(settings: CachedSettings) -> None:
    """List the models on this disk."""
    print(control_plane.list_cached(settings))


def remove_cached(settings: RemoveCachedSettings) -> None:
    """Delete a model from this disk, unless a process uses it."""
    print(control_plane.remove_cached(settings))


def check_spec(settings: CheckSpecSettings) -> None:
    """Check that a file describes a model that can be."""
    print(control_plane.check_spec(settings))


@requiring("server", "a shard")
def serve(settings: ModelServerSettings) -> None:
    """Load one rank and serve it until SIGTERM or SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _abandon(settings))
    pin(settings)
    end_with_launcher(settings.exit_with_parent, settings.deployment_file)  # a thread, pinned too
    with imports_kept():
        import_torch()
        from funitel.model_server.rpc.serve import run as serve_rank  # with torch: a second that --help does without

    with ExitStack() as stack:
        if settings.otlp_endpoint is not None:
            facts = {"funitel.rank": settings.rank}
            stack.callback(export(settings.otlp_endpoint, settings.otlp_service_name, **facts))
        failure = serve_rank(settings)
    if failure is not None:
        raise failure


def _abandon(settings: ModelServerSettings) -> NoReturn:
    """End the process while it loads: loading holds nothing to release, and cannot be interrupted otherwise."""
    remove_files(settings)
    os._exit(0)


def _log_as_shard(settings: ModelServerSettings) -> None:
    logs.configure(f"shard-{settings.rank}", json_output=settings.json_output, level=settings.logger_level)


def _log_as_download(settings: DownloadSettings) -> None:
    logs.configure("download", json_output=settings.json_output, level=settings.logger_level)


def _log_as_measurement(settings: KernelSettings) -> None:
    logs.configure("bench-kernels", json_output=False, level="INFO")


def _log_as_quantizer(settings: QuantizeSettings) -> None:
    logs.configure("quantize", json_output=settings.json_output, level=settings.logger_level)


def _log_as_perplexity(settings: PerplexitySettings) -> None:
    logs.configure("perplexity", json_output=settings.json_output, level=settings.logger_level)


def _command(name: str, cls: type[Any], run: Callable[[Any], None], **more: Any) -> None:
    app.command(name, cls=SettingsCommand)(as_command(cls, run, ARGUMENTS[cls], **more))


_command("serve", ModelServerSettings, serve, program="shard", set_up=_log_as_shard)
_command("download-weights", DownloadSettings, download, program="download", set_up=_log_as_download)
_command("quantize", QuantizeSettings, quantize, program="quantize", set_up=_log_as_quantizer)
_command("perplexity", PerplexitySettings, measure, set_up=_log_as_perplexity)
_command("bench-kernels", KernelSettings, measure, set_up=_log_as_measurement)
_command("spec", SpecSettings, spec)
_command("models", ModelsSettings, models)
_command("cached", CachedSettings, cached)
_command("remove-cached", RemoveCachedSettings, remove_cached)
_command("check-spec", CheckSpecSettings, check_spec)


def main() -> NoReturn:
    """Run the command line."""
    open_standard_streams()
    run_app(app)


if __name__ == "__main__":
    main()
