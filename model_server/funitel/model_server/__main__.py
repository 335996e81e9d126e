"""Entry point `funitel-server`: `serve` one rank of a model, `download-weights`, `quantize` to a folder."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import typer
import uvloop

from funitel.model_server.device.cpu_affinity import pin
from funitel.model_server.hub import resolve
from funitel.model_server.settings import (
    DownloadSettings,
    KernelSettings,
    ModelServerSettings,
    ModelsSettings,
    QuantizeSettings,
    SpecSettings,
)
from funitel.proto import step_socket
from funitel.proto.errors import FunitelError, SettingsError
from funitel.proto.process import logs
from funitel.proto.process.locks import lock_of, remove_if_free
from funitel.proto.process.parent import is_parent_ending, stop_with_parent
from funitel.proto.settings.fields import as_command, run_app
from funitel.proto.settings.listen_address import is_loopback
from funitel.proto.tracing.export import export

logger = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 5.0
LAST_BREATH_SECONDS = 1.0  # in which a launcher that was killed lets go of its lock

app = typer.Typer(
    help="Model shards of funitel.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)


def download(settings: DownloadSettings) -> None:
    """Make a model's files present and whole; print their folder as the last line of stdout."""
    stop_with_parent(settings.exit_with_parent)
    cache_dir = Path(settings.cache_dir) if settings.cache_dir else None
    print(resolve.download_weights(settings.model_id, revision=settings.revision, cache_dir=cache_dir))


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


def bench_kernels(settings: KernelSettings) -> None:
    """Measure the matrix products of the fused CPU step."""
    from funitel.model_server.tools.kernel_bench.matmul import (
        measure_kernels,  # torch: seconds to import, not wanted for --help
    )

    measure_kernels(settings)


def spec(settings: SpecSettings) -> None:
    """Print the spec of a model, or what does not fit it; then the exit code is 1."""
    from funitel.model_server.tools import spec as spec_command  # torch: seconds to import, not wanted for --help

    cache_dir = Path(settings.cache_dir) if settings.cache_dir else None
    folder = resolve.resolve(settings.model_id, revision=settings.revision, cache_dir=cache_dir).folder
    if settings.action == "show":
        print(spec_command.show(folder, is_whole=settings.all_fields))
        return
    problems = spec_command.check(folder, settings.model_spec)
    print("\n".join(problems) or f"ok: every tensor of {folder} is in the spec, with its shape")
    if problems:
        raise typer.Exit(1)


def models(settings: ModelsSettings) -> None:
    """List what can be served, or say what one model takes; then the exit code is 1 where it does not fit."""
    from funitel.model_server.tools.models.report import list_all, tell_needs  # torch: seconds to import

    if not settings.model_id:
        print(list_all(is_json=settings.json))
        return
    text, fits = tell_needs(settings)
    print(text)
    if not fits:
        raise typer.Exit(1)


def serve(settings: ModelServerSettings) -> None:
    """Load one rank and serve it until SIGTERM or SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _abandon(settings))
    pin(settings)
    stop_with_parent(settings.exit_with_parent)
    with ExitStack() as stack:
        if settings.otlp_endpoint is not None:
            facts = {"funitel.rank": settings.rank}
            stack.callback(export(settings.otlp_endpoint, settings.otlp_service_name, **facts))
        failure = uvloop.run(_serve(settings))  # half of what asyncio's own loop costs a step
    if failure is not None:
        raise failure


async def _serve(settings: ModelServerSettings) -> FunitelError | None:
    """Serve until told to stop, or until the ranks have lost each other; the latter is returned."""
    # torch: seconds to import, not wanted for --help
    from funitel.model_server.loading.encoder import holds_encoder, load_encoder
    from funitel.model_server.loading.generator import load_generator
    from funitel.model_server.rpc.call_server import CallServer
    from funitel.model_server.rpc.encoder_servicer import EncoderServicer
    from funitel.model_server.rpc.servicer import Servicer, make_server

    loop = asyncio.get_running_loop()
    compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
    folder = await loop.run_in_executor(None, _resolve, settings)
    address, url = _address(settings)
    failures: list[FunitelError] = []
    stop = asyncio.Event()

    def fail(error: FunitelError) -> None:
        failures.append(error)
        stop.set()

    servicer: Servicer | EncoderServicer
    calls: CallServer | None = None
    if holds_encoder(folder):
        encoder, info = await loop.run_in_executor(compute, load_encoder, settings, folder)
        servicer, leave = EncoderServicer(encoder, info, [url], compute), encoder.parallel.leave
    else:
        executor, info = await loop.run_in_executor(compute, load_generator, settings, folder)
        urls = await loop.run_in_executor(compute, executor.parallel.exchange, url)
        info = replace(info, step_socket=_step_socket(settings))
        calls = CallServer(executor, info.world_size, info.step_socket, compute, fail)
        servicer, leave = Servicer(executor, info, urls, calls.calls), executor.parallel.leave
    server = make_server(servicer, address, is_traced=settings.otlp_endpoint is not None, tls=settings.shard_tls)
    try:
        if calls is not None:
            await calls.start()
        await server.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        logger.info("listening url=%s", url)
        await stop.wait()
    finally:
        await server.stop(STOP_GRACE_SECONDS)
        _remove_files(settings)
        if calls is not None:
            await _in_time(calls.stop(), failures)
    await _in_time(loop.run_in_executor(compute, leave), failures)
    compute.shutdown()
    return failures[0] if failures else None


def _abandon(settings: ModelServerSettings) -> NoReturn:
    """End while loading, which holds nothing that must be given back, and cannot be interrupted otherwise."""
    _remove_files(settings)
    os._exit(0)


async def _in_time(work: Awaitable[None], failures: list[FunitelError]) -> None:
    """Wait for work of the compute thread; end the process here if that thread hangs in a collective."""
    try:
        async with asyncio.timeout(STOP_GRACE_SECONDS):
            await work
    except TimeoutError:
        print(f"error: {failures[0].message if failures else 'a step did not end'}", file=sys.stderr, flush=True)
        os._exit(1 if failures else 0)


def _address(settings: ModelServerSettings) -> tuple[str, str]:
    """(address to bind, address to announce)."""
    if settings.listen is not None:
        host, separator, port = settings.listen.rpartition(":")
        if not separator or not host or not port.isdigit():
            raise SettingsError(f"--listen must be host:port, given {settings.listen!r}")
        if settings.shard_tls is None and not is_loopback(host):
            logger.warning(
                "--listen %s without --shard-tls-cert: whoever reaches it can run the model and read every request",
                settings.listen,
            )
        return settings.listen, f"tcp://{settings.listen}"
    _remove_sockets(settings)  # left by a run that was killed
    path = _socket(settings)
    return f"unix:{path}", f"unix://{path}"


def _socket(settings: ModelServerSettings) -> str:
    return f"{settings.uds_path}-{settings.rank}"


def _step_socket(settings: ModelServerSettings) -> str:
    """Path of the step socket; a shard that listens for other machines has none."""
    return "" if settings.listen is not None else _socket(settings) + step_socket.SUFFIX


def _remove_files(settings: ModelServerSettings) -> None:
    """Remove the sockets, and after a launcher that was killed its lock too."""
    _remove_sockets(settings)
    if is_parent_ending(settings.exit_with_parent):
        remove_if_free(lock_of(settings.uds_path), LAST_BREATH_SECONDS)


def _remove_sockets(settings: ModelServerSettings) -> None:
    if settings.listen is None:
        for name in (_socket(settings), _step_socket(settings)):
            Path(name).unlink(missing_ok=True)


def _resolve(settings: ModelServerSettings) -> Path:
    cache_dir = Path(settings.cache_dir) if settings.cache_dir else None
    return resolve.resolve(settings.model_id, revision=settings.revision, cache_dir=cache_dir).folder


def _log_as_shard(settings: ModelServerSettings) -> None:
    logs.configure(f"shard-{settings.rank}", json_output=settings.json_output, level=settings.logger_level)


def _log_as_download(settings: DownloadSettings) -> None:
    logs.configure("download", json_output=settings.json_output, level=settings.logger_level)


def _log_as_measurement(settings: KernelSettings) -> None:
    logs.configure("bench-kernels", json_output=False, level="INFO")


def _log_as_quantizer(settings: QuantizeSettings) -> None:
    logs.configure("quantize", json_output=settings.json_output, level=settings.logger_level)


app.command("serve")(
    as_command(ModelServerSettings, serve, {"model_id": "Model to serve."}, program="shard", set_up=_log_as_shard)
)
app.command("download-weights")(
    as_command(DownloadSettings, download, {"model_id": "Model to fetch."}, program="download", set_up=_log_as_download)
)
app.command("quantize")(
    as_command(
        QuantizeSettings,
        quantize,
        {"model_id": "Model to quantise.", "output_dir": "Folder to write, new or empty."},
        program="quantize",
        set_up=_log_as_quantizer,
    )
)
app.command("bench-kernels")(
    as_command(
        KernelSettings,
        bench_kernels,
        {"model_id": "Model whose matrices are measured."},
        set_up=_log_as_measurement,
    )
)


app.command("spec")(
    as_command(
        SpecSettings,
        spec,
        {"action": "show or check.", "model_id": "Model whose spec is shown or whose tensors are checked."},
    )
)


app.command("models")(
    as_command(
        ModelsSettings, models, {"model_id": "Model whose needs are told; all that can be served when left out."}
    )
)


def main() -> NoReturn:
    """Run the command line."""
    run_app(app)


if __name__ == "__main__":
    main()
