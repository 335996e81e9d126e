"""Run the keeper of a deployment: `python -m funitel.launcher.keeper --socket PATH --listen-fd N [N ...]`."""

import argparse
import logging
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

from funitel.launcher.keeper.keeper import Keeper
from funitel.proto.keeper.channel import listen
from funitel.proto.keeper.kernel import counts_bytes
from funitel.proto.process import logs
from funitel.proto.process.deployment_file import end_with_launcher

logger = logging.getLogger("funitel.launcher.keeper")


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="funitel.launcher.keeper", description=__doc__, allow_abbrev=False)
    parser.add_argument("--socket", required=True, help="path of the socket on which routers connect")
    parser.add_argument("--listen-fd", type=int, nargs="+", required=True, help="descriptors of listening sockets")
    parser.add_argument("--adopt-timeout", type=float, default=30.0, help="seconds that connections wait for a router")
    parser.add_argument("--exit-with-parent", type=int, help="process id of the parent; end with it")
    parser.add_argument("--deployment-file", help="file that names another launcher once the parent has ended")
    parser.add_argument("--json-output", action="store_true", help="log JSON lines")
    parser.add_argument("--log-level", default="info", help="least severe log level")
    return parser.parse_args(argv)


def main() -> int:
    """Hold connections until SIGTERM; returns the exit code."""
    given = _parsed(sys.argv[1:])
    logs.configure("keeper", json_output=given.json_output, level=given.log_level)
    if not counts_bytes():
        print("error: this kernel does not count the bytes of connections: start with --keeper false", file=sys.stderr)
        return 1
    with suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        control = listen(given.socket)
        file = os.stat(given.socket)
    except OSError as error:
        print(f"error: the keeper cannot listen on {given.socket}: {error.strerror or error}", file=sys.stderr)
        return 1
    keeper = Keeper([socket.socket(fileno=descriptor) for descriptor in given.listen_fd], control, given.adopt_timeout)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: keeper.stop())
    end_with_launcher(given.exit_with_parent, given.deployment_file)
    logger.debug("keeping connections of %d listening sockets", len(given.listen_fd))
    try:
        keeper.run()
    finally:
        keeper.close()
        with suppress(FileNotFoundError):
            if os.path.samestat(file, os.stat(given.socket)):
                os.unlink(given.socket)
    return 0


if __name__ == "__main__":
    sys.exit(main())
