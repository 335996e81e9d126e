"""A hub of models on this machine: a few repositories, as `huggingface_hub` asks for them, with what was asked for."""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

MAIN = "main"


@dataclass
class FakeHub:
    """`repositories`: name -> revision -> path -> content. `token`: without it nothing is given.

    A file of `cut` is broken off once after so many bytes.
    """

    repositories: Mapping[str, Mapping[str, Mapping[str, bytes]]]
    token: str | None = None
    cut: dict[str, int] = field(default_factory=dict)
    fetched: list[tuple[str, int]] = field(default_factory=list)
    """Paths of files whose content was asked for, each with the first byte that was."""
    url: str = ""

    def environ(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a process that uses this hub, with caches in `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE"))}
        caches = {"HF_HOME": str(home / "hf"), "FUNITEL_CACHE": str(home / "cache"), "HF_HUB_DISABLE_XET": "1"}
        return kept | {"PYTHONPATH": ":".join(filter(None, sys.path)), "HF_ENDPOINT": self.url} | caches | more

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers for an address."""
        for name, revisions in self.repositories.items():
            if path == f"/api/models/{name}":
                path += f"/revision/{MAIN}"
            for kind in ("/api/models/{}/revision/", "/api/models/{}/tree/", "/{}/resolve/"):
                start = kind.format(name)
                if path.startswith(start):
                    revision, _, file = path.removeprefix(start).partition("/")
                    found = {commit_of(each): each for each in revisions} | {each: each for each in revisions}
                    if revision not in found:
                        return 404, b"", {"X-Error-Code": "RevisionNotFound"}
                    return self._of(kind, name, found[revision], file)
        return 404, b"", {"X-Error-Code": "RepoNotFound"}

    def _of(self, kind: str, name: str, revision: str, file: str) -> tuple[int, bytes, dict[str, str]]:
        files, commit = self.repositories[name][revision], commit_of(revision)
        if "resolve" in kind:
            if file not in files:
                return 404, b"", {"X-Error-Code": "EntryNotFound"}
            digest = hashlib.sha256(files[file]).hexdigest()
            return 200, files[file], {"X-Repo-Commit": commit, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if "tree" in kind:
            entries = [
                {"type": "file", "path": path, "oid": commit_of(path), "size": len(content)}
                for path, content in files.items()
            ]
            return 200, json.dumps(entries).encode(), {}
        info = {"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]}
        return 200, json.dumps(info).encode(), {}


def commit_of(revision: str) -> str:
    """The commit that a branch of a fake hub is at."""
    return hashlib.sha1(revision.encode()).hexdigest()


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve a hub; its `url` is that of the server."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            status, content, headers = hub.answer(path)
            if hub.token is not None and self.headers["Authorization"] != f"Bearer {hub.token}":
                status, content, headers = 401, b"", {"X-Error-Code": "GatedRepo"}
            start, size = 0, len(content)
            is_file = "/resolve/" in path and status == 200
            if is_file and (given := self.headers["Range"]):
                start = int(given.removeprefix("bytes=").partition("-")[0])
                content, status = content[start:], 206
                headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                if is_file:
                    file = path.partition("/resolve/")[2].partition("/")[2]
                    hub.fetched.append((file, start))
                    content = content[: hub.cut.pop(file, len(content))]
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
