"""A token of the hub goes to the hub alone: not to the host that its files are redirected to."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0" * 40
BLOB = b'{"model_type": "llama"}'
REPOSITORY = f'{{"id": "org/tiny", "sha": "{COMMIT}", "siblings": [{{"rfilename": "config.json"}}]}}'.encode()
TREE = f'[{{"type": "file", "path": "config.json", "oid": "{COMMIT}", "size": {len(BLOB)}}}]'.encode()


class Host:
    """A server of the hub, or of its files; `tokens` are the Authorization headers that it got."""

    def __init__(self, address: str, blobs: str | None = None) -> None:
        self.tokens: list[str | None] = []
        tokens = self.tokens

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                tokens.append(self.headers["Authorization"])
                is_file = "/resolve/" in self.path
                content = b"" if is_file else BLOB if blobs is None else TREE if "/tree/" in self.path else REPOSITORY
                self.send_response(302 if is_file else 200)
                if is_file:
                    self.send_header("Location", f"{blobs}/config.json")
                    self.send_header("X-Repo-Commit", COMMIT)
                    self.send_header("X-Linked-Etag", '"etag"')
                    self.send_header("X-Linked-Size", str(len(BLOB)))
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer((address, 0), Handler)
        self.url = f"http://{address}:{self.server.server_port}"


@contextmanager
def running(host: Host) -> Iterator[Host]:
    with host.server as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield host
        finally:
            server.shutdown()
            thread.join()


def test_the_token_stays_with_the_hub(tmp_path: Path) -> None:
    code = "from funitel.model_server.hub.huggingface import fetch_repository as fetch; "
    code += "print(fetch('org/tiny', 'org/tiny', None, None))"
    with ExitStack() as stack:
        blobs = stack.enter_context(running(Host("127.0.0.2")))
        hub = stack.enter_context(running(Host("127.0.0.1", blobs.url)))
        variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HOME": str(tmp_path)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environ = kept | {"PYTHONPATH": ":".join(filter(None, sys.path))} | variables
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "config.json").read_bytes() == BLOB
    assert "Bearer hf_secret" in hub.tokens
    assert set(blobs.tokens) == {None}
