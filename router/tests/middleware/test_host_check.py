"""Which hosts and origins a server answers that only its own machine is to reach."""

import re

import httpx
import pytest
from fakes import FakeEngine, Serve

from funitel.router.middleware.host_check import LOOPBACK_ORIGIN

LOOPBACK = (
    *("localhost", "LocalHost:3000", "localhost.", "app.localhost:80", "127.0.0.1", "127.0.0.1:3000", "127.9.9.9"),
    *("[::1]", "[::1]:3000", "[::ffff:127.0.0.1]", "[0:0:0:0:0:0:0:1]:1", "localhost:"),
)
FOREIGN = (
    *(
        "evil.example",
        "evil.example:3000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil-localhost",
        "",
        " ",
    ),
    *("0.0.0.0:3000", "[::]", "192.168.1.2", "10.0.0.1:3000", "[fe80::1]", "169.254.169.254", "::1", "127.1"),
    *("localhost@evil.example", "evil.example#localhost", "localhost:80:80", "localhost/x", "local host", "127.0.0.1x"),
    *("[::1", "::ffff:127.0.0.1", "2130706433", "localhost..", ".", "évil"),
)
PAGES = (
    "http://localhost:5173",
    "https://localhost",
    "http://127.0.0.1:8080",
    "http://[::1]:3000",
    "http://a.localhost",
)
FOREIGN_PAGES = (
    *("http://evil.example", "null", "http://localhost.evil.example", "http://evil.example:3000", "file://"),
    *(
        "http://127.0.0.1.evil.example",
        "http://0.0.0.0:3000",
        "http://evillocalhost",
        "http://localhost:1@evil.example",
    ),
)
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
ALLOWED = "access-control-allow-origin"


async def status(client: httpx.AsyncClient, host: str, path: str = "/health") -> int:
    return (await client.get(path, headers={"host": host.encode("latin-1")})).status_code  # type: ignore[dict-item]


async def test_a5_a_local_server_answers_to_loopback_names_only(serve: Serve) -> None:
    async with serve(FakeEngine(), is_local=True) as client:
        assert {host: await status(client, host) for host in LOOPBACK} == dict.fromkeys(LOOPBACK, 200)
        assert {host: await status(client, host) for host in FOREIGN} == dict.fromkeys(FOREIGN, 403)
        for path in ("/metrics", "/info", "/docs", "/v1/models", "/", "/nowhere"):
            assert await status(client, "evil.example", path) == 403


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/generate", {"inputs": "Hi"}, lambda answer: answer["error"]),
        ("/v1/chat/completions", {"messages": []}, lambda answer: answer["error"]["message"]),
        ("/v1/messages", {}, lambda answer: answer["error"]["message"]),
    ],
)
async def test_a5_a_foreign_host_reaches_no_engine_and_is_named(
    path: str, body: object, where: object, serve: Serve
) -> None:
    engine = FakeEngine()
    async with serve(engine, is_local=True) as client:
        answer = await client.post(path, json=body, headers={"host": "evil.example:3000"})
        assert answer.status_code == 403
        said = where(answer.json())  # type: ignore[operator]
        assert said == "Host 'evil.example:3000' is neither loopback nor one that --allowed-host names"
    assert not engine.requests


async def test_a5_every_host_header_counts_and_none_is_no_browsers(serve: Serve) -> None:
    async with serve(FakeEngine(), is_local=True) as client:
        for hosts in (["localhost", "evil.example"], ["evil.example", "localhost"]):
            request = client.build_request("GET", "/health")
            request.headers = httpx.Headers([("host", host) for host in hosts])
            assert (await client.send(request)).status_code == 403
        request = client.build_request("GET", "/health")
        del request.headers["host"]
        assert (await client.send(request)).status_code == 200


async def test_a5_pages_of_this_machine_alone_may_read_a_local_server(serve: Serve) -> None:
    async with serve(FakeEngine(), is_local=True) as client:
        for page in (*PAGES, *FOREIGN_PAGES):
            expected = page if page in PAGES else None
            for answer in (
                await client.get("/health", headers={"origin": page}),
                await client.post("/generate", json={"inputs": "Hi"}, headers={"origin": page}),
                await client.post("/generate", json={}, headers={"origin": page}),
                await client.options("/generate", headers={"origin": page} | PREFLIGHT),
            ):
                assert answer.headers.get(ALLOWED) == expected, page
            assert answer.status_code == (200 if expected else 400)
            assert bool(re.fullmatch(LOOPBACK_ORIGIN, page)) == (expected is not None)


async def test_a5_origins_and_hosts_that_are_asked_for_are_allowed(serve: Serve) -> None:
    async with serve(FakeEngine(), is_local=True, cors_allow_origin=("*",), allowed_host=("LLM.lan",)) as client:
        assert (await client.get("/health", headers={"origin": "http://evil.example"})).headers[ALLOWED] == "*"
        assert [await status(client, host) for host in ("llm.lan:80", "localhost", "evil.example")] == [200, 200, 403]
    async with serve(FakeEngine(), is_local=True, cors_allow_origin=("http://mine",), allowed_host=("*",)) as client:
        assert (await client.get("/health", headers={"origin": "http://mine"})).headers[ALLOWED] == "http://mine"
        assert ALLOWED not in (await client.get("/health", headers={"origin": "http://localhost"})).headers
        assert await status(client, "evil.example") == 200


async def test_a5_elsewhere_it_is_as_with_tgi_unless_hosts_are_named(serve: Serve) -> None:
    async with serve(FakeEngine()) as client:
        assert [await status(client, host) for host in FOREIGN] == [200] * len(FOREIGN)
        assert (await client.get("/health", headers={"origin": "http://evil.example"})).headers[ALLOWED] == "*"
    async with serve(FakeEngine(), allowed_host=("llm.lan",)) as client:
        assert [await status(client, host) for host in ("llm.lan", "evil.example")] == [200, 403]
