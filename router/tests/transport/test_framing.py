"""Requests that are ambiguous, oversized or of another protocol, each over a real socket: RFC 9112."""

import asyncio
import json
import random
from http import HTTPStatus

import pytest
from sockets import Raw, Served, served
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from funitel.proto.errors import PayloadTooLarge
from funitel.router.api.common.body import _read_bytes
from funitel.router.transport.framing import Framing, LimitExceeded

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HELLO = b"5\r\nhello\r\n0\r\n\r\n"
LIMITS = {"max_header_bytes": 1000, "payload_limit": 10_000}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with what has arrived."""
    request = Request(scope, receive)
    try:
        body = await _read_bytes(request, LIMITS["payload_limit"])
    except ClientDisconnect:
        return
    except PayloadTooLarge as error:
        await JSONResponse({"error": error.message}, 413)(scope, receive, send)
        return
    headers = [[name.decode(), value.decode("latin-1")] for name, value in scope["headers"]]
    found = {"path": scope["path"], "query": scope["query_string"].decode(), "version": scope["http_version"]}
    await JSONResponse({**found, "headers": headers, "body": body.decode()})(scope, receive, send)


async def asked(server: Served, sent: bytes) -> tuple[int, dict[str, object]]:
    """The status and body of the answer to some bytes."""
    client = await server.connect()
    client.send(sent)
    status, body = await client.response()
    client.close()
    return status, json.loads(body)


REFUSED = {
    # Host
    "no Host": (b"GET / HTTP/1.1\r\n\r\n", 400, "exactly one Host. Given: 0"),
    "two Hosts": (GET + b"Host: y\r\n\r\n", 400, "exactly one Host. Given: 2"),
    "the same Host twice": (GET + b"host: x\r\n\r\n", 400, "exactly one Host. Given: 2"),
    "two Hosts in HTTP/1.0": (b"GET / HTTP/1.0\r\nHost: x\r\nHost: x\r\n\r\n", 400, "exactly one Host"),
    "two Hosts with an upgrade": (GET + b"Host: y\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", 400, "one Host"),
    "a list of Hosts": (b"GET / HTTP/1.1\r\nHost: a, b\r\n\r\n", 400, "Host is not valid. Given: 'a, b'"),
    "a Host with a path": (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400, "Host is not valid"),
    "a Host with a user": (b"GET / HTTP/1.1\r\nHost: u@a\r\n\r\n", 400, "Host is not valid"),
    "a Host with a port that is none": (b"GET / HTTP/1.1\r\nHost: a:b\r\n\r\n", 400, "Host is not valid"),
    "a Host in high bytes": (b"GET / HTTP/1.1\r\nHost: \xe9\r\n\r\n", 400, "Host is not valid. Given: '\\xe9'"),
    # Transfer-Encoding
    "gzip, chunked": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + HELLO, 400, "Given: 'gzip, chunked'"),
    "gzip and chunked": (
        POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n" + HELLO,
        400,
        "Given: 'gzip, chunked'",
    ),
    "chunked not last": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n" + HELLO, 400, ""),
    "chunked twice": (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + HELLO, 400, ""),
    "chunked in two lines": (POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n" + HELLO, 400, ""),
    "identity": (POST + b"Transfer-Encoding: identity\r\n\r\n" + HELLO, 400, "must be chunked. Given: 'identity'"),
    "nothing, chunked": (POST + b"Transfer-Encoding: , chunked\r\n\r\n" + HELLO, 400, "must be chunked"),
    "chunked with parameters": (POST + b"Transfer-Encoding: chunked;a=b\r\n\r\n" + HELLO, 400, "must be chunked"),
    "xchunked": (POST + b"Transfer-Encoding: xchunked\r\n\r\n" + HELLO, 400, "must be chunked"),
    "a vertical tab": (POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + HELLO, 400, ""),
    "no coding": (POST + b"Transfer-Encoding:\r\n\r\n" + HELLO, 400, ""),
    "a space before the colon": (POST + b"Transfer-Encoding : chunked\r\n\r\n" + HELLO, 400, ""),
    "chunked in HTTP/1.0": (
        b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + HELLO,
        400,
        "Transfer-Encoding is not for HTTP/1.0",
    ),
    "a length and chunks": (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + HELLO, 400, ""),
    "chunks and a length": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + HELLO, 400, ""),
    # Content-Length
    **{
        f"a length of {length!r}": (POST + b"Content-Length: " + length + b"\r\n\r\nhello", 400, "")
        for length in (b"", b"-5", b"+5", b"5 5", b"5,5", b"0x5", b"5_0", b"5.0", b"five", b"9" * 30)
    },
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", 400, ""),
    "a length twice": (POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 400, ""),
    # Chunks
    "a chunk of 2^63 bytes": (CHUNKED + b"8000000000000000\r\nhello", 413, "at most 10000 bytes"),
    "a chunk of 2^64 bytes": (CHUNKED + b"10000000000000000\r\nhello", 413, "at most 10000 bytes"),
    "a chunk of 2^3200 bytes": (CHUNKED + b"8" + b"0" * 800 + b"\r\nhello", 413, "at most 10000 bytes"),
    "a chunk over the limit": (CHUNKED + b"2711\r\nhello", 413, "at most 10000 bytes"),
    "chunks over the limit": (CHUNKED + b"5\r\nhello\r\n270c\r\nhello", 413, "at most 10000 bytes"),
    **{
        f"a chunk of size {size!r}": (
            CHUNKED + size + b"\r\nhello\r\n0\r\n\r\n",
            400,
            "a chunk of the body has no size",
        )
        for size in (b"", b"-5", b"+5", b"0x5", b"5 ", b" 5", b"5_0", b"g", b"5\x00", b";a=b")
    },
    "a chunk without its line break": (CHUNKED + b"5\r\nhelloworld\r\n0\r\n\r\n", 400, ""),
    "chunks in bare line feeds": (CHUNKED + b"5\nhello\n0\n\n", 400, ""),
    "an extension of many bytes": (
        CHUNKED + b"5;a=" + b"b" * 2000 + b"\r\nhello\r\n0\r\n\r\n",
        431,
        "at most 1000 bytes",
    ),
    "many extensions": (CHUNKED + b"1;a=bcdef\r\nx\r\n" * 200 + b"0\r\n\r\n", 431, "at most 1000 bytes"),
    "many leading zeros": (CHUNKED + (b"0" * 100 + b"1\r\nx\r\n") * 20 + b"0\r\n\r\n", 431, "at most 1000 bytes"),
    "a trailer of many bytes": (CHUNKED + b"0\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431, "at most 1000 bytes"),
    # Lines
    "blank lines without end": (b"\r\n" * 600 + GET + b"\r\n", 431, "at most 1000 bytes"),
    "a folded line": (GET + b"A: b\r\n c\r\n\r\n", 400, ""),
    "a folded coding": (POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + HELLO, 400, ""),
    "a first line that is folded": (b"GET / HTTP/1.1\r\n Host: x\r\n\r\n", 400, ""),
    "a bare CR in a value": (GET + b"A: b\rc\r\n\r\n", 400, ""),
    "a bare LF after a value": (GET + b"A: b\nC: d\r\n\r\n", 400, ""),
    "bare LFs": (b"GET / HTTP/1.1\nHost: x\n\n", 400, ""),
    "a NUL in a value": (GET + b"A: b\x00c\r\n\r\n", 400, ""),
    "a NUL in a name": (GET + b"A\x00: b\r\n\r\n", 400, ""),
    "no name": (GET + b": b\r\n\r\n", 400, ""),
    "a space in a name": (GET + b"A b: c\r\n\r\n", 400, ""),
    "a line without a colon": (GET + b"Abc\r\n\r\n", 400, ""),
    # Request line
    "words behind the version": (b"GET / HTTP/1.1 x\r\nHost: x\r\n\r\n", 400, ""),
    "tabs": (b"GET\t/\tHTTP/1.1\r\nHost: x\r\n\r\n", 400, ""),
    "a method that is none": (b"FETCH / HTTP/1.1\r\nHost: x\r\n\r\n", 400, ""),
    "a method in small letters": (b"get / HTTP/1.1\r\nHost: x\r\n\r\n", 400, ""),
    "a method without end": (b"G" * 2000 + b" / HTTP/1.1\r\nHost: x\r\n\r\n", 431, "at most 1000 bytes"),
    "a tunnel": (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400, "no proxy"),
    "a control character in the path": (b"GET /\x01 HTTP/1.1\r\nHost: x\r\n\r\n", 400, ""),
    "a fragment": (b"GET /a#b HTTP/1.1\r\nHost: x\r\n\r\n", 400, "no fragment"),
    "an asterisk": (b"GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400, "must be a path or an http URL. Given: '*'"),
    "a URL of another scheme": (b"GET ftp://y/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, "Given: 'ftp://y/'"),
    "a URL with a user": (b"GET http://u:p@y/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, "must be a path or an http URL"),
    "a URL without a host": (b"GET http:///a HTTP/1.1\r\nHost: x\r\n\r\n", 400, ""),
    "another protocol": (b"PLAY rtsp://x/ RTSP/1.0\r\nHost: x\r\n\r\n", 400, ""),
    # Versions
    "HTTP/0.9": (b"GET /\r\n\r\n", 505, "must be HTTP/1.0 or HTTP/1.1. Given: HTTP/0.9"),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505, "Given: HTTP/2.0"),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, ""),
    "HTTP/1.10": (b"GET / HTTP/1.10\r\nHost: x\r\n\r\n", 400, ""),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a10_a_request_that_is_refused(name: str) -> None:
    sent, status, says = REFUSED[name]
    async with served(echo, **LIMITS) as server:
        client = await server.connect()
        client.send(sent)
        if status == 413:  # by the handler, and then the rest of the body is awaited for some seconds
            assert (found := await client.response())[0] == 413
            error = json.loads(found[1])["error"]
        else:
            head, _, body = (await client.answer()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d %b\r\n" % (status, HTTPStatus(status).phrase.encode()))
            assert b"connection: close" in head
            error = json.loads(body)["error"]
        assert says in error
        assert "\n" not in error


FIRST_SEEN_BY_THE_PARSER = ("a chunk of 2^64 bytes", "a chunk of 2^3200 bytes")  # which says 400


@pytest.mark.parametrize(
    "name",
    [name for name, (_, status, _) in REFUSED.items() if status != 431 and name not in FIRST_SEEN_BY_THE_PARSER],
)
async def test_a10_it_is_refused_however_it_is_divided(name: str) -> None:
    sent, status, _ = REFUSED[name]
    async with served(echo, **LIMITS) as server:
        client = await server.connect()
        for byte in sent:
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 %d " % status)


ACCEPTED = {
    "HTTP/1.0 without Host": (b"GET / HTTP/1.0\r\n\r\n", {"version": "1.0", "headers": []}),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nHost: x\r\n\r\n", {"version": "1.1"}),
    "an empty Host": (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", {"headers": [["host", ""]]}),
    "an address of IPv6": (b"GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", {"headers": [["host", "[::1]:80"]]}),
    "a URL": (
        b"GET http://y:1/a?b HTTP/1.1\r\nHost: x\r\n\r\n",
        {"path": "/a", "query": "b", "headers": [["host", "y:1"]]},
    ),
    "a URL without a path": (b"GET HTTP://y HTTP/1.1\r\nHost: x\r\n\r\n", {"path": "/", "headers": [["host", "y"]]}),
    "a URL with a query alone": (b"GET http://y?b HTTP/1.1\r\nHost: x\r\n\r\n", {"path": "/", "query": "b"}),
    "all of the server": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", {"path": "*"}),
    "a blank line before": (b"\r\n" + GET + b"\r\n", {"path": "/"}),
    "white space around values": (GET + b"A:\t b \t\r\n\r\n", {"headers": [["host", "x"], ["a", "b"]]}),
    "capital letters": (POST + b"TRANSFER-ENCODING: Chunked\r\n\r\n" + HELLO, {"body": "hello"}),
    "a length with zeros": (POST + b"Content-Length: 005\r\n\r\nhello", {"body": "hello"}),
    "zeros before a size": (CHUNKED + b"0" * 50 + b"5\r\nhello\r\n0\r\n\r\n", {"body": "hello"}),
    "an extension": (CHUNKED + b'5;a="b"\r\nhello\r\n0;c\r\n\r\n', {"body": "hello"}),
    "chunks up to the limit": (CHUNKED + b"2710\r\n" + b"x" * 10_000 + b"\r\n0\r\n\r\n", {"body": "x" * 10_000}),
    "many small chunks": (CHUNKED + b"1\r\nx\r\n" * 4000 + b"0\r\n\r\n", {"body": "x" * 4000}),
    "a chunk that holds requests": (CHUNKED + b"4\r\n\r\n\r\n\r\n0\r\n\r\n", {"body": "\r\n\r\n"}),
}


@pytest.mark.parametrize("name", ACCEPTED)
async def test_a10_a_request_that_is_understood(name: str) -> None:
    sent, expected = ACCEPTED[name]
    async with served(echo, **LIMITS) as server:
        status, answer = await asked(server, sent)
    assert status == 200
    assert {key: answer[key] for key in expected} == expected


async def test_a10_a_trailer_is_no_part_of_the_header() -> None:
    """A proxy may check the header alone."""
    trailer = b"X-Priority: 1\r\nAuthorization: Bearer x\r\nHost: evil\r\n"
    async with served(echo, **LIMITS) as server:
        client = await server.connect()
        client.send(CHUNKED + b"5\r\nhello\r\n0\r\n" + trailer + b"\r\n" + GET + b"\r\n")
        for _ in range(2):
            status, body = await client.response()
            assert status == 200
            assert {name for name, _ in json.loads(body)["headers"]} <= {"host", "transfer-encoding"}


async def test_a10_26_megabytes_of_blank_lines_are_refused_at_the_limit() -> None:
    async with served(echo) as server:
        client = await server.connect()

        async def send() -> None:
            for _ in range(400):
                client.send(b"\r\n" * 32_768)
                await client.writer.drain()

        sending = asyncio.create_task(send())
        assert (await client.answer()).startswith(b"HTTP/1.1 431 ")
        await asyncio.gather(sending, return_exceptions=True)
        assert server.num_cut("header_bytes") == 1


async def test_a10_what_hides_behind_a_refused_request_is_not_read() -> None:
    async with served(echo, **LIMITS) as server:
        client = await server.connect()
        client.send(POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + GET + b"\r\n")
        assert (await client.answer()).count(b"HTTP/1.1 ") == 1


async def one_by_one(client: Raw, num_requests: int) -> list[str]:
    return [json.loads((await client.response())[1])["body"] for _ in range(num_requests)]


@pytest.mark.parametrize("seed", range(10))
async def test_a10_requests_are_told_apart_however_they_are_divided(seed: int) -> None:
    rng = random.Random(seed)
    bodies, sent = [], b""
    for number in range(12):
        body = rng.choice([b"", b"\r\n\r\n", b"\r\n0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 3000, b"%d" % number])
        bodies.append(body.decode())
        if rng.random() < 0.5:
            sent += POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        else:
            cuts = sorted(rng.sample(range(len(body) + 1), min(3, len(body) + 1)))
            parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
            chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(part), rng.choice([b"", b";e"]), part) for part in parts if part)
            sent += CHUNKED + chunks + b"0\r\n" + rng.choice([b"", b"t: u\r\n"]) + b"\r\n"
    async with served(echo, **LIMITS) as server:
        client = await server.connect()
        reading = asyncio.create_task(one_by_one(client, len(bodies)))
        while sent:
            size = rng.choice([1, 2, 3, 7, 100, 5000])
            client.send(sent[:size])
            sent = sent[size:]
            await asyncio.sleep(0)
        assert await reading == bodies


async def test_a10_a_body_of_a_million_chunks_is_refused_before_they_cost_seconds() -> None:
    async with served(echo, payload_limit=2_000_000) as server:
        client = await server.connect()
        client.send(CHUNKED + b"1\r\nx\r\n" * 1_000_000 + b"0\r\n\r\n")
        head, _, body = (await client.answer()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413 ")
        assert json.loads(body)["error"] == "a body of 4101 bytes must have at most 4100 chunks"
        assert server.num_cut("chunks") == 1


async def test_a10_a_large_body_may_have_many_chunks() -> None:
    framing = Framing(1000, 100_000_000)
    framing.begin_body(None)
    for _ in range(10_000):
        assert len(list(framing.pieces(b"800\r\n" + b"x" * 2048 + b"\r\n"))) == 1


def test_a10_framing_divides_data_where_headers_and_bodies_end() -> None:
    framing, pieces = Framing(1000, 1000), []
    lengths = iter([5, None, 0])
    data = GET + b"\r\nhello" + CHUNKED + HELLO + GET + b"\r\n"
    for piece in framing.pieces(data):
        pieces.append(piece)
        if piece.endswith(b"\r\n\r\n") and piece[:1] in b"GP":
            framing.begin_body(next(lengths))
    assert pieces == [GET + b"\r\n", b"hello", CHUNKED, HELLO, GET + b"\r\n"]


def test_a10_the_bound_of_a_header_is_its_bytes() -> None:
    header = GET + b"A: " + b"b" * 1000 + b"\r\n\r\n"
    assert list(Framing(len(header), 0).pieces(header)) == [header]
    with pytest.raises(LimitExceeded, match=f"at most {len(header) - 1} bytes"):
        list(Framing(len(header) - 1, 0).pieces(header))
