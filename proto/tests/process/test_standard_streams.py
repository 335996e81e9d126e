"""A process that is started without standard streams, as some supervisors do."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, socket, sys
from funitel.proto.process.standard_streams import open_standard_streams
open_standard_streams()
with socket.socket() as sock, open(sys.argv[1], "w") as out:
    print("one"); print("two", file=sys.stderr); sys.stderr.isatty(); sys.stdin.read()
    targets = [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)]
    out.write(f"{sock.fileno()} {targets} {[os.get_inheritable(number) for number in (0, 1, 2)]}")
"""


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_no_socket_takes_the_number_of_a_closed_stream(closed: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = f'exec "$0" -c "$1" "$2" {closed}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, SCRIPT, str(told)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    number, _, rest = told.read_text().partition(" ")
    assert int(number) > 2
    assert rest.count("/dev/null") >= len(closed.split())
    assert rest.endswith("[True, True, True]")


def test_streams_that_are_open_stay_as_they_are() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "/dev/null"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\n", "two\n")
