"""`funitel chat` as a person meets it, on a pseudo-terminal, and as a script does, through pipes."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from funitel_testing.fake_api import FakeApi, serving

PATIENCE_SECONDS = 20.0
COLOURS = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, process: "subprocess.Popen[bytes]", master: int) -> None:
        self.process = process
        self._master = master
        self.screen = ""
        self.written = ""  # all of it, with control sequences

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self, answer: str) -> None:
        """Press Ctrl-C until `answer` comes: Python forgets one that finds readline between a key and its next wait."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while answer not in self.screen:
            assert time.monotonic() < deadline, f"{answer!r} never came: {self.screen!r}"
            self.type("\x03")
            self._read_for(1.0, answer)
        self.screen = self.screen.partition(answer)[2]

    def wait_for(self, text: str) -> None:
        """Wait until `text` comes, and forget what came up to it."""
        self._read_for(PATIENCE_SECONDS, text)
        assert text in self.screen, f"{text!r} never came: {self.screen!r}"
        self.screen = self.screen.partition(text)[2]

    def _read_for(self, seconds: float, text: str) -> None:
        """Read until `text` is there, the time is over or the program has ended."""
        deadline = time.monotonic() + seconds
        while text not in self.screen and time.monotonic() < deadline:
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    read = os.read(self._master, 65536).decode()
                    self.written += read
                    self.screen += COLOURS.sub("", read)
                except OSError:  # the program has ended
                    return

    def end(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)


@contextmanager
def terminal(*words: str, **variables: str) -> Iterator[Terminal]:
    """`funitel` with these words, in charge of a terminal of its own."""
    master, slave = pty.openpty()
    take_charge = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    code = take_charge + "from funitel.launcher.__main__ import main; main()"
    path = ":".join(filter(None, sys.path))
    environ = {"PYTHONPATH": path, "TERM": "xterm", "LC_ALL": "C.UTF-8", "INPUTRC": "/dev/null"} | variables
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environ,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def run(*words: str, text: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    """`funitel` with these words, fed through a pipe."""
    environ = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-m", "funitel", *words]
    return subprocess.run(command, input=text, capture_output=True, env=environ, timeout=PATIENCE_SECONDS)


def test_a_chat_at_a_terminal() -> None:
    with (
        serving(FakeApi(words=("One", " two", " three"), waits_after=2)) as fake,
        terminal("chat", "--url", fake.url) as tty,
    ):
        tty.wait_for(f"fake at {fake.url}. /help lists commands.")
        tty.wait_for(">>> ")
        tty.type("Count\n")
        tty.wait_for("One two")
        tty.type("\x03")  # stops the answer, not the program
        tty.wait_for("(interrupted)")
        tty.wait_for(">>> ")
        fake.go_on.set()
        fake.waits_after = None
        tty.type("\x1b[200~first line\nsecond line\x1b[201~\n")  # as terminals mark what is pasted
        tty.wait_for("One two three")
        tty.wait_for(">>> ")
        tty.type("half a mess")
        tty.wait_for("half a mess")
        tty.interrupt("(/exit or Ctrl-D leaves)")
        tty.type('"""\nthird\nfourth"""\n')
        tty.wait_for("One two three")
        tty.wait_for(">>> ")
        tty.type("/nonsense\n")
        tty.wait_for("unknown command /nonsense: /help lists them")
        tty.type("/reset\n/system Be brief.\nAnew\n")
        tty.wait_for("One two three")
        tty.wait_for(">>> ")
        tty.type("/help\n")
        tty.wait_for("forget the conversation")
        tty.type("/exit\n")
        assert tty.end() == 0
    asked = [[message["content"] for message in body["messages"]] for body in fake.bodies]
    assert asked[1] == ["Count", "One two", "first line\nsecond line"]
    assert asked[2] == [*asked[1], "One two three", "third\nfourth"]
    assert asked[3:] == [["Be brief.", "Anew"]]


def test_a_failed_answer_does_not_end_a_chat_at_a_terminal() -> None:
    with (
        serving(FakeApi(status=422, refusal={"error": "too long"})) as fake,
        terminal("chat", "--url", fake.url) as tty,
    ):
        tty.wait_for(">>> ")
        tty.type("Hi\n")
        tty.wait_for("error: too long")
        fake.status = 200
        tty.wait_for(">>> ")
        tty.type("Hi\n")
        tty.wait_for("Hello there")
        tty.wait_for(">>> ")
        tty.type("\x04")
        assert tty.end() == 0


HOSTILE = ("\x1b[2J", "\x1b]0;owned\x07", "[bold red]", ":smile:", "\x9b31m", "a\r", "\r\nb\tc", " é\u200d…")


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}, {"FORCE_COLOR": "1"}])
def test_an_answer_does_not_control_the_terminal(variables: dict[str, str]) -> None:
    thoughts = ("\x1b[3J", "[/] hm")
    with (
        serving(FakeApi(words=HOSTILE, thoughts=thoughts, info={"model_id": "fa\x1bke"})) as fake,
        terminal("chat", "--url", fake.url, **variables) as tty,
    ):
        tty.wait_for(r"fa\x1bke at")
        tty.wait_for(">>> ")
        tty.type("Hi\n")
        tty.wait_for("?[3J[/] hm")
        tty.wait_for("?[2J?]0;owned?[bold red]:smile:?31ma")
        tty.wait_for("b")
        tty.wait_for("é\u200d…")
        tty.wait_for(">>> ")
        for sequence in ("\x1b[2J", "\x1b[3J", "\x1b]0", "\x9b", "\x07"):
            assert sequence not in tty.written
        assert not re.search("\x1b\\[[0-9;]*3[0-7]m", tty.written), "no colours"


def test_a_pipe_gets_the_text_of_the_model_as_it_is() -> None:
    with serving(FakeApi(words=HOSTILE)) as fake:
        for words in (("chat",), ("generate", "Hi")):
            done = run(*words, "--url", fake.url, text=b"Hi\n")
            assert done.stdout.decode() == "".join(HOSTILE) + "\n"


def test_a_refusal_is_one_line_without_controls() -> None:
    refusal = {"error": "\x1b[2Jno\n[red]room\x9b"}
    with serving(FakeApi(status=422, refusal=refusal)) as fake:
        done = run("generate", "Hi", "--url", fake.url)
    assert done.stderr.decode() == "error: \\x1b[2Jno [red]room\\x9b\n"


def test_a_chat_through_pipes_prints_answers_alone() -> None:
    with serving(FakeApi(thoughts=("Hm",))) as fake:
        done = run("chat", "--url", fake.url, text=b"Hi\n\nAgain\n/reset\nAnew\n/exit\nNever\n")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello there\n" * 3, b"")
        assert [len(body["messages"]) for body in fake.bodies] == [1, 3, 1]
        fake.status, fake.refusal = 422, {"error": "too long"}
        done = run("chat", "--url", fake.url, text=b"Hi\nAgain\n")
        assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"error: too long\n")


def test_a_prompt_through_a_pipe() -> None:
    with serving(FakeApi()) as fake:
        done = run("generate", "-", "--url", fake.url, text="Zwölf\nLinien\n".encode())
        assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello there\n", b"")
        assert fake.bodies[0]["inputs"] == "Zwölf\nLinien\n"
        done = run("generate", "-", "--url", fake.url, text=b"a\xff")
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr == b"error: the prompt must be UTF-8: byte 1 is not\n"


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    with serving(FakeApi(words=("word ",) * 200, waits_after=5)) as fake:
        command = [sys.executable, "-m", "funitel", "generate", "a", "--url", fake.url]
        environ = {"PYTHONPATH": ":".join(filter(None, sys.path))}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
        assert process.stdout is not None
        assert process.stdout.read(5) == b"word "
        process.stdout.close()
        fake.go_on.set()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGPIPE
        process.stderr.close()


@pytest.mark.parametrize("words", [("chat",), ("generate", "a")])
def test_ctrl_c_ends_what_is_piped(words: tuple[str, ...]) -> None:
    with serving(FakeApi(waits_after=1)) as fake:
        command = [sys.executable, "-m", "funitel", *words, "--url", fake.url]
        environ = {"PYTHONPATH": ":".join(filter(None, sys.path))}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Hi\n")
        process.stdin.flush()
        assert process.stdout.read(5) == b"Hello"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, err) == (130, b"")
