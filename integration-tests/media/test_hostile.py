"""Pictures, sounds and addresses that are there to do harm: one line says what is wrong, and the server goes on."""

import asyncio
import base64
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from funitel_testing.clients import client_of
from funitel_testing.hostile_media import (
    BOMBS,
    MIME,
    NARROW,
    PICTURE_KINDS,
    SOUND_BOMBS,
    SOUND_KINDS,
    blank_png,
    mutant,
    url_of,
)
from funitel_testing.media_host import Host, hosting
from funitel_testing.servers import PLAIN, Server, free_port
from funitel_testing.sound_files import wav
from funitel_testing.soundness import problem_of, refusal_of, staying_sound
from funitel_testing.vision_models import VisionOracle, picture, save_vision
from funitel_testing.vision_requests import content_of, data_url
from funitel_testing.whisper_models import save_tiny_whisper, sound

SEED = 20  # of the mutants; another one makes others
IN_SHORT, IN_FULL = 300, 20_000  # mutants of all kinds
AT_ONCE = 4
LIMITS = ("--dtype", "float32", "--max-batch-total-tokens", "8192", "--max-input-tokens", "2000", "--max-total-tokens")
OF_PICTURES = r"image|messages|inputs|input\b|source"  # what a refusal of a picture names
OF_SOUNDS = r"\bfile\b"
PICTURE = picture(60, 45)
QUESTION = "What is this? "


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model that sees."""
    return save_vision("llava", tmp_path_factory.mktemp("llava") / "model")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model that hears."""
    return save_tiny_whisper(tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture
def seeing(launch: Any, llava: Path) -> Server:
    """A server that fetches nothing, which is the default."""
    server: Server = launch("--model-id", str(llava), *LIMITS, "2500")
    return server


@pytest.fixture
def hearing(launch: Any, whisper: Path) -> Server:
    """A server of a Whisper."""
    server: Server = launch("--model-id", str(whisper), "--dtype", "float32")
    return server


@pytest.fixture
async def client(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[Server], httpx.AsyncClient]]:
    """Makes a client of a server."""
    made: list[httpx.AsyncClient] = []

    def make(server: Server) -> httpx.AsyncClient:
        made.append(client_of(server.url))
        return made[-1]

    yield make
    for each in made:
        await each.aclose()


def body_of(content: Any, **fields: Any) -> dict[str, Any]:
    """A chat of one message."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0} | fields


def with_url(url: Any) -> dict[str, Any]:
    """A chat with a picture at a URL."""
    return body_of([{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": url}}])


def post(server: Server, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=120, verify=PLAIN)


def tokens_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def answer_of(server: Server, url: str, max_tokens: int = 6) -> list[int]:
    """Token ids of a greedy answer to the question with a picture."""
    body = with_url(url) | {"max_tokens": max_tokens, "return_token_ids": True}
    return tokens_of(post(server, "/v1/chat/completions", body))


def seen(server: Server) -> Callable[[], None]:
    """A normal request with a picture, always another one: an answer from a cache would prove less."""
    numbers = iter(range(1000, 2000))

    def ask() -> None:
        assert len(answer_of(server, data_url(picture(60, 45, next(numbers))))) > 0

    return ask


def transcribe(server: Server, content: bytes, name: str = "sound.wav", **fields: str) -> httpx.Response:
    files = {"file": (name, content, "application/octet-stream")}
    url = f"{server.url}/v1/audio/transcriptions"
    return httpx.post(url, files=files, data={"model": "any"} | fields, timeout=300, verify=PLAIN)


def heard(server: Server) -> Callable[[], None]:
    """A normal request with a sound."""
    numbers = iter(range(1000, 2000))

    def ask() -> None:
        answer = transcribe(server, wav(sound(0.5, next(numbers))))
        assert answer.status_code == 200, answer.text
        assert isinstance(answer.json()["text"], str)

    return ask


async def problems(send: Callable[[int], Any], numbers: Sequence[int], field: str) -> dict[int, str]:
    """What is wrong with the answers to several requests, some of them at once."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> tuple[int, str]:
        async with turns:
            try:
                return number, problem_of(await send(number), field)
            except httpx.TransportError as error:
                return number, f"no answer: {error!r}"

    return {number: problem for number, problem in await asyncio.gather(*map(one, numbers)) if problem}


# Damaged files ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def num_mutants(is_full: bool) -> int:
    """Of each kind."""
    return (IN_FULL if is_full else IN_SHORT) // (len(PICTURE_KINDS) + len(SOUND_KINDS))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", PICTURE_KINDS)
async def test_damaged_pictures(kind: str, seeing: Server, client: Any, num_mutants: int) -> None:
    asking = client(seeing)

    async def send(number: int) -> httpx.Response:
        url = url_of(mutant(kind, SEED, number), MIME[kind])
        return await asking.post("/v1/chat/completions", json=with_url(url))

    with staying_sound(seeing, seen(seeing)):
        found = await problems(send, range(num_mutants), OF_PICTURES)
    assert not found, f"{len(found)} of {num_mutants}: {dict(list(found.items())[:5])}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", SOUND_KINDS)
async def test_damaged_sounds(kind: str, hearing: Server, client: Any, num_mutants: int) -> None:
    asking = client(hearing)

    async def send(number: int) -> httpx.Response:
        files = {"file": (f"a.{kind}", mutant(kind, SEED, number), MIME[kind])}
        return await asking.post("/v1/audio/transcriptions", files=files, data={"model": "any"})

    with staying_sound(hearing, heard(hearing)):
        found = await problems(send, range(num_mutants), OF_SOUNDS)
    assert not found, f"{len(found)} of {num_mutants}: {dict(list(found.items())[:5])}"


@pytest.mark.parametrize("name", BOMBS)
def test_small_files_of_large_pictures(name: str, seeing: Server) -> None:
    content, mime = BOMBS[name]()
    with staying_sound(seeing, seen(seeing)):
        began = time.monotonic()
        response = post(seeing, "/v1/chat/completions", with_url(url_of(content, mime)))
        assert problem_of(response, OF_PICTURES) == ""
        assert time.monotonic() - began < 30
    if "frames" not in name and "text" not in name and "colours" not in name:  # of frames the first may be taken
        refusal_of(response)


async def test_many_bombs_at_once(seeing: Server, client: Any) -> None:
    asking = client(seeing)
    bodies = [with_url(url_of(*BOMBS[name]())) for name in BOMBS] * 2

    async def send(number: int) -> httpx.Response:
        return await asking.post("/v1/chat/completions", json=bodies[number])

    with staying_sound(seeing, seen(seeing), peak_mib=2500):
        assert await problems(send, range(len(bodies)), OF_PICTURES) == {}


@pytest.mark.parametrize("name", NARROW)
def test_narrow_pictures(name: str, seeing: Server) -> None:
    with staying_sound(seeing, seen(seeing)):
        response = post(seeing, "/v1/chat/completions", with_url(url_of(NARROW[name]())))
        assert problem_of(response, OF_PICTURES) == ""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SOUND_BOMBS)
def test_sounds_that_say_more_than_they_hold(name: str, hearing: Server) -> None:
    with staying_sound(hearing, heard(hearing)):
        response = transcribe(hearing, SOUND_BOMBS[name]())
        assert problem_of(response, OF_SOUNDS) == ""
    if response.status_code == 200:
        assert not re.search("nan|inf", response.text, re.IGNORECASE)


# URLs that hold no picture ----------------------------------------------------------------------------------------

PNG = base64.b64decode(data_url(picture(8, 8)).partition(",")[2])
TIFF = b"II*\0\x08\0\0\0\x01\0\0\x01\x03\0\x01\0\0\0\x01\0\0\0\0\0\0\0"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n"
WRONG_URLS: dict[str, Any] = {
    "letters that are not base64": "data:image/png;base64,@@@@",
    "base64 cut short": data_url(picture(8, 8))[:-3],
    "base64 of other letters": "data:image/png;base64," + "é" * 40,
    "no base64": "data:image/png,%89PNG",
    "nothing behind the comma": "data:image/png;base64,",
    "no comma": "data:image/png;base64",
    "only the scheme": "data:",
    "empty": "",
    "spaces": "   ",
    "base64 alone": base64.b64encode(PNG).decode(),
    "SVG": url_of(SVG, "image/svg+xml"),
    "SVG that says PNG": url_of(SVG),
    "TIFF": url_of(TIFF, "image/tiff"),
    "TIFF that says PNG": url_of(TIFF),
    "EPS that says PNG": url_of(EPS),
    "text": url_of(b"What do you see?", "text/plain"),
    "HTML": url_of(b"<html><script>alert(1)</script>", "text/html"),
    "PDF": url_of(b"%PDF-1.7\n1 0 obj\n", "application/pdf"),
    "a sound": url_of(wav(sound(0.1)), "audio/wav"),
    "zeros": url_of(bytes(1000)),
    "a pickle": url_of(b"cos\nsystem\n(S'true'\ntR."),
    "a zip": url_of(b"PK\x03\x04" + bytes(60), "application/zip"),
    "a long kind": f"data:{'x' * 5000};base64,AAAA",
    "no text": None,
    "a number": 7,
    "a list": ["data:image/png;base64,AAAA"],
    "an object": {"url": "data:image/png;base64,AAAA"},
}


@pytest.mark.parametrize("name", WRONG_URLS)
def test_urls_that_hold_no_picture(name: str, seeing: Server) -> None:
    with staying_sound(seeing, seen(seeing)):
        response = post(seeing, "/v1/chat/completions", with_url(WRONG_URLS[name]))
    assert re.search(OF_PICTURES, refusal_of(response)), response.text
    assert "root:" not in response.text


@pytest.mark.parametrize("kind", ["jpeg", "gif", "webp"])
def test_a_picture_of_another_kind_than_its_url_says(kind: str, seeing: Server) -> None:
    """Clients often say PNG of what is none; the content decides, where it is let in at all."""
    wrong = data_url(PICTURE).replace("image/png", f"image/{kind}")
    response = post(seeing, "/v1/chat/completions", with_url(wrong) | {"max_tokens": 6, "return_token_ids": True})
    if response.status_code == 200:
        assert tokens_of(response) == answer_of(seeing, data_url(PICTURE))
    else:
        assert re.search(OF_PICTURES, refusal_of(response))


def test_wrong_parts(seeing: Server) -> None:
    parts: list[Any] = [
        {"type": "image_url"},
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": 3},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": []},
        {"type": "image_url", "image_url": {"detail": "low"}},
        {"type": "image", "image_url": {"url": ""}},
    ]
    with staying_sound(seeing, seen(seeing)):
        for part in parts:
            assert re.search(OF_PICTURES, refusal_of(post(seeing, "/v1/chat/completions", body_of([part])))), part


def test_wrong_blocks_of_anthropic(seeing: Server) -> None:
    png = base64.b64encode(PNG).decode()
    sources: list[Any] = [
        None,
        {},
        "data:image/png;base64,AAAA",
        {"type": "base64"},
        {"type": "base64", "media_type": "image/png"},
        {"type": "base64", "media_type": "image/png", "data": ""},
        {"type": "base64", "media_type": "image/png", "data": "@@@@"},
        {"type": "base64", "media_type": "image/svg+xml", "data": base64.b64encode(SVG).decode()},
        {"type": "base64", "media_type": "image/png", "data": png[:-9]},
        {"type": "file", "file_id": "file_1"},
        {"type": "nonsense", "data": png},
    ]
    with staying_sound(seeing, seen(seeing)):
        for source in sources:
            block = {"type": "image", "source": source}
            body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": [block]}]}
            assert re.search(OF_PICTURES, refusal_of(post(seeing, "/v1/messages", body))), source


# Where pictures do not belong -------------------------------------------------------------------------------------


def test_too_many_pictures(seeing: Server) -> None:
    part = {"type": "image_url", "image_url": {"url": url_of(blank_png(2, 2))}}
    with staying_sound(seeing, seen(seeing)):
        line = refusal_of(post(seeing, "/v1/chat/completions", body_of([part] * 3000)))
    assert re.search(r"\d", line), line


@pytest.mark.parametrize("role", ["system", "assistant", "developer", "tool"])
def test_a_picture_in_a_message_of_another_role(role: str, seeing: Server, llava: Path) -> None:
    """It is seen where the message stands, or refused by name: never left out."""
    content = content_of(["Look: ", PICTURE])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": role, "content": content}]
    if role in ("system", "developer"):
        messages.reverse()
    if role == "tool":
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages[1:1] = [{"role": "assistant", "tool_calls": [call]}]
        messages[2]["tool_call_id"] = "c"
    messages.append({"role": "user", "content": "What is it?"})
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    response = post(seeing, "/v1/chat/completions", body)
    if response.status_code != 200:
        assert re.search(r"messages|image", refusal_of(response))
        return
    assert response.json()["usage"]["prompt_tokens"] > 16  # those of the picture
    if role in ("system", "assistant"):
        oracle = VisionOracle("llava", llava)
        texts = {"user": "Hi", role: f"Look: {oracle.row.marker}"}
        order = [role, "user"] if role == "system" else ["user", role]
        prompt = "".join(f"[{each}] {texts[each]}\n" for each in order) + "[user] What is it?\n[assistant]"
        assert tokens_of(response) == oracle.generate(prompt, [PICTURE], 6)


def test_markers_in_texts_of_users_are_no_pictures(seeing: Server, llava: Path) -> None:
    """Neither with a picture beside them nor without one."""
    marked = "<image> <image>"
    alone = post(seeing, "/v1/chat/completions", body_of(marked, max_tokens=6, return_token_ids=True))
    spelt = len(f"[user] {marked}\n[assistant]")
    assert alone.status_code == 200, alone.text
    assert alone.json()["usage"]["prompt_tokens"] == spelt
    beside = post(seeing, "/v1/chat/completions", body_of(content_of([marked, PICTURE, marked])))
    assert beside.status_code == 200, beside.text
    assert beside.json()["usage"]["prompt_tokens"] == spelt + len(marked) + 16


def test_pictures_and_sounds_for_a_model_of_texts(launch: Any, tiny_model: Path, tmp_path: Path) -> None:
    server: Server = launch("--model-id", str(tiny_model), "--dtype", "float32", "--max-batch-total-tokens", "4096")
    png = base64.b64encode(PNG).decode()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png}}
    message = {"role": "user", "content": [{"type": "input_image", "image_url": url_of(PNG)}]}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", with_url(url_of(PNG))),
        ("/v1/messages", {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": [block]}]}),
        ("/v1/responses", {"input": [message], "max_output_tokens": 2}),
    ]
    for path, body in requests:
        line = refusal_of(post(server, path, body))
        assert re.search("image", line), line
        assert re.search("model|only `text`|not supported", line), line
    line = refusal_of(transcribe(server, wav(sound(0.1))))
    assert re.search("model|audio|transcri", line), line
    assert "Traceback" not in server.log.read_text()


# Addresses: nothing is fetched unless it is allowed ---------------------------------------------------------------


TRAP_PORT, HOST_PORT = free_port(), free_port()  # which servers are told at their start


@pytest.fixture
def trap() -> Iterator[Host]:
    """A server on every address of this machine, which nothing may ever ask."""
    with hosting({"/a.png": (PNG, "image/png")}, "::", TRAP_PORT) as host:
        yield host


# Names that are allowed, and are this machine or its network all the same.
ALLOWED = ("localhost", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0.0.0.0", "10.255.255.1")
LINK_LOCAL = "169.254.169.254"  # where clouds keep their keys
SPELLINGS = (
    *ALLOWED[:-1],
    *("LOCALHOST", "localhost.", "127.0.0.1.", "127.255.255.254", "0", "%6cocalhost", "\u2460\u2461\u2466.0.0.1"),
    *("[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]", "[::127.0.0.1]"),
    *("[::1%25lo]", "[64:ff9b::7f00:1]", "user:password@localhost", "localhost#@", "a.localhost"),
)
SCHEMES = (
    *("file:///etc/passwd", "FILE:///etc/passwd", "file:/etc/passwd", "file://localhost/etc/passwd", "/etc/passwd"),
    *("ftp://localhost:{port}/a.png", "gopher://localhost:{port}/_GET%20/a.png", "//localhost:{port}/a.png"),
    *(
        "http:localhost:{port}/a.png",
        "http:/localhost:{port}/a.png",
        "ws://localhost:{port}/",
        "dict://localhost:{port}/",
    ),
    *("unix:///tmp/socket", "jar:http://localhost:{port}/a.png!/", "javascript:alert(1)", "http://", "http:///a.png"),
    *("http://localhost:{port}0000/a.png", "http://localhost:-1/a.png", "http://[::1/a.png", "http://localhost:x/"),
    *("ht\ttp://localhost:{port}/a.png", "http://local\r\nhost:{port}/a.png", "http://localhost:{port}/a\r\nX: y"),
)


def ways_of(url: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests that name a picture by its URL, on every route that takes pictures."""
    block = {"type": "image", "source": {"type": "url", "url": url}}
    message = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    return [
        ("/v1/chat/completions", with_url(url)),
        ("/v1/messages", {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": [block]}]}),
        ("/v1/responses", {"input": [message], "max_output_tokens": 2}),
    ]


def assert_refused(server: Server, url: str) -> None:
    for path, body in ways_of(url):
        began = time.monotonic()
        response = post(server, path, body)
        assert re.search(OF_PICTURES, refusal_of(response)), (path, url, response.text)
        assert time.monotonic() - began < 10, (path, url)
        assert "root:" not in response.text


def test_nothing_is_fetched_by_default(seeing: Server, trap: Host) -> None:
    with staying_sound(seeing, seen(seeing)):
        for url in (trap.url("/a.png"), trap.url("/a.png", scheme="https"), trap.url("/a.png", "[::1]")):
            assert_refused(seeing, url)
        for scheme in SCHEMES:
            assert_refused(seeing, scheme.format(port=trap.port))
    assert (trap.connections, trap.paths) == (0, [])
    line = refusal_of(post(seeing, "/v1/chat/completions", with_url(trap.url("/a.png"))))
    assert "--allowed-media-domains" in line, "what to set is not said"


def test_a_link_of_generate_is_not_fetched_by_default(seeing: Server, trap: Host) -> None:
    """It is refused by name, or it is a text."""
    body = {"inputs": f"See ![]({trap.url('/a.png')})", "parameters": {"max_new_tokens": 2}}
    response = post(seeing, "/generate", body)
    assert problem_of(response, OF_PICTURES) == ""
    assert trap.connections == 0


@pytest.fixture
def fetching(launch: Any, llava: Path) -> Server:
    """A server that may fetch from some names, but from no private address."""
    names = (*(f"{name}:{TRAP_PORT}" for name in ALLOWED), *ALLOWED, LINK_LOCAL)
    flags = [word for name in names for word in ("--allowed-media-domains", name)]
    server: Server = launch("--model-id", str(llava), *LIMITS, "2500", *flags)
    return server


def test_no_private_address_is_asked_however_it_is_spelt(fetching: Server, trap: Host) -> None:
    with staying_sound(fetching, seen(fetching)):
        for host in SPELLINGS:
            for scheme in ("http", "https"):
                assert_refused(fetching, trap.url("/a.png", host, scheme))
        for scheme in SCHEMES:
            assert_refused(fetching, scheme.format(port=trap.port))
    assert (trap.connections, trap.paths) == (0, [])


@pytest.mark.parametrize("host", [LINK_LOCAL, "10.255.255.1"])
def test_private_networks_are_refused_at_once(host: str, fetching: Server) -> None:
    """Asking would take until the time is up."""
    began = time.monotonic()
    assert_refused(fetching, f"http://{host}/latest/meta-data/")
    assert time.monotonic() - began < 3


def test_names_that_are_not_allowed_are_not_even_looked_up(fetching: Server) -> None:
    for host in ("example.com", "localhost.example.com", "notlocalhost", "127.0.0.1.example.com", "x.127.0.0.1"):
        began = time.monotonic()
        assert_refused(fetching, f"http://{host}/a.png")
        assert time.monotonic() - began < 3


# Addresses that are allowed ---------------------------------------------------------------------------------------

MAX_FETCHED, MAX_PIXELS, FETCH_SECONDS = 900_000, 100_000, 2
BIG = base64.b64decode(data_url(picture(700, 600)).partition(",")[2])
LARGE = base64.b64decode(data_url(picture(400, 300)).partition(",")[2])


@pytest.fixture
def host() -> Iterator[Host]:
    """A server that may be asked."""
    files = {
        "/a.png": (base64.b64decode(data_url(PICTURE).partition(",")[2]), "image/png"),
        "/a": (base64.b64decode(data_url(PICTURE).partition(",")[2]), "application/octet-stream"),
        "/big.png": (BIG, "image/png"),
        "/large.png": (LARGE, "image/png"),
        "/text.png": (b"root:x:0:0", "image/png"),
        "/page": (b"<html>root:", "text/html"),
        "/empty.png": (b"", "image/png"),
        **{f"/mutant-{kind}": (mutant(kind, SEED, 1), MIME[kind]) for kind in PICTURE_KINDS},
    }
    with hosting(files, port=HOST_PORT) as running:
        yield running


@pytest.fixture
def trusting(launch: Any, llava: Path) -> Server:
    """A server that may fetch from 127.0.0.1, within tight limits."""
    flags = ("--allowed-media-domains", f"127.0.0.1:{HOST_PORT}", "--allow-private-media-addresses")
    limits = ("--media-fetch-timeout-s", str(FETCH_SECONDS), "--max-image-fetch-size", str(MAX_FETCHED))
    pixels = ("--max-media-pixels", str(MAX_PIXELS))
    server: Server = launch("--model-id", str(llava), *LIMITS, "2500", *flags, *limits, *pixels)
    return server


def test_a_fetched_picture_is_the_same_picture(trusting: Server, host: Host, llava: Path) -> None:
    oracle = VisionOracle("llava", llava)
    expected = oracle.generate(f"[user] {QUESTION}{oracle.row.marker}\n[assistant]", [PICTURE], 6)
    assert answer_of(trusting, host.url("/a.png")) == answer_of(trusting, data_url(PICTURE)) == expected
    assert answer_of(trusting, host.url("/a")) == expected
    for path, body in ways_of(host.url("/a.png")):
        response = post(trusting, path, body)
        assert response.status_code == 200, (path, response.text)
    assert set(host.paths) == {"/a.png", "/a"}
    details = {"max_new_tokens": 6, "details": True}
    answers = [
        post(trusting, "/generate", {"inputs": f"See ![]({url})", "parameters": details}).json()["details"]["tokens"]
        for url in (host.url("/a.png"), data_url(PICTURE))
    ]
    assert answers[0] == answers[1]


def test_redirects_lead_nowhere_else(trusting: Server, host: Host, trap: Host) -> None:
    targets = {
        "/to-name": trap.url("/a.png", "localhost"),
        "/to-address": trap.url("/a.png", "127.0.0.2"),
        "/to-ipv6": trap.url("/a.png", "[::1]"),
        "/to-mapped": trap.url("/a.png", "[::ffff:127.0.0.2]"),
        "/to-file": "file:///etc/passwd",
        "/to-ftp": trap.url("/a.png", "127.0.0.1", "ftp"),
        "/to-gopher": trap.url("/_GET", "127.0.0.1", "gopher"),
        "/to-data": data_url(PICTURE),
        "/to-nothing": "",
        "/to-nonsense": "http://[::1",
    }
    host.redirects |= targets
    with staying_sound(trusting, seen(trusting)):
        for path in targets:
            response = post(trusting, "/v1/chat/completions", with_url(host.url(path)))
            if path == "/to-data" and response.status_code == 200:
                continue  # it holds nothing but what its host could have sent
            assert re.search(OF_PICTURES, refusal_of(response)), (path, response.text)
            assert "root:" not in response.text
        assert (trap.connections, trap.paths) == (0, [])
        asked = len(host.paths)
        assert re.search(OF_PICTURES, refusal_of(post(trusting, "/v1/chat/completions", with_url(host.url("/loop")))))
        assert len(host.paths) - asked <= 20


def test_a_redirect_to_what_is_allowed_may_be_followed(trusting: Server, host: Host) -> None:
    with hosting(host.files) as other:
        host.redirects |= {"/here": host.url("/a.png"), "/there": other.url("/a.png")}
        for path in host.redirects:
            response = post(
                trusting,
                "/v1/chat/completions",
                with_url(host.url(path)) | {"max_tokens": 6, "return_token_ids": True},
            )
            if response.status_code == 200:
                assert tokens_of(response) == answer_of(trusting, data_url(PICTURE))
            else:
                assert re.search(OF_PICTURES, refusal_of(response)), response.text
    assert set(other.paths) <= {"/a.png"}


CONFUSED = (
    "http://127.0.0.1@localhost:{trap}/a.png",
    "http://127.0.0.1:{host}@localhost:{trap}/a.png",
    "http://localhost:{trap}#@127.0.0.1:{host}/a.png",
    "http://localhost:{trap}?@127.0.0.1:{host}/a.png",
    "http://localhost:{trap}\\@127.0.0.1:{host}/a.png",
    "http://localhost:{trap}/@127.0.0.1:{host}/a.png",
    "http://127.0.0.1.localhost:{trap}/a.png",
    "http://127.0.0.1%00.localhost:{trap}/a.png",
    "http://127.0.0.1 .localhost:{trap}/a.png",
    "http://localhost:{trap}/a.png?127.0.0.1:{host}",
    "http://127.0.0.1\u3002localhost:{trap}/a.png",
    "http://127.0.0.2:{trap}/a.png",
)


def test_names_that_look_like_what_is_allowed(trusting: Server, host: Host, trap: Host) -> None:
    with staying_sound(trusting, seen(trusting)):
        for url in CONFUSED:
            given = url.format(trap=trap.port, host=host.port)
            response = post(trusting, "/v1/chat/completions", with_url(given))
            assert re.search(OF_PICTURES, refusal_of(response)), (given, response.text)
    assert (trap.connections, trap.paths) == (0, [])


@pytest.mark.parametrize(
    "path",
    [
        *("/slow", "/stalled", "/endless", "/gzip", "/long-header", "/short", "/closed", "/nonsense", "/none"),
        *("/status/204", "/status/301", "/status/401", "/status/404", "/status/500", "/status/503", "/status/999"),
        *("/text.png", "/page", "/empty.png", *(f"/mutant-{kind}" for kind in PICTURE_KINDS)),
    ],
)
def test_hosts_that_misbehave(path: str, trusting: Server, host: Host) -> None:
    with staying_sound(trusting, seen(trusting), peak_mib=500, left_mib=300):
        began = time.monotonic()
        response = post(trusting, "/v1/chat/completions", with_url(host.url(path)))
        seconds = time.monotonic() - began
        assert problem_of(response, OF_PICTURES) == ""
    assert host.paths[0] == path, "it was not asked"
    assert len(host.paths) <= 3
    assert seconds < FETCH_SECONDS + 5
    if not path.startswith("/mutant"):
        assert "root:" not in refusal_of(response)
    assert host.sent < 64 * MAX_FETCHED, "it was read on when it was too large"


async def test_slow_hosts_hold_up_no_others(trusting: Server, host: Host, client: Any) -> None:
    asking = client(trusting)
    waiting = [
        asyncio.create_task(asking.post("/v1/chat/completions", json=with_url(host.url(f"/stalled?{number}"))))
        for number in range(40)
    ]
    await asyncio.sleep(0.5)
    began = time.monotonic()
    answer = await asking.post("/v1/chat/completions", json=with_url(data_url(PICTURE)))
    assert answer.status_code == 200, answer.text
    assert time.monotonic() - began < FETCH_SECONDS, "it waited for the slow ones"
    for response in await asyncio.gather(*waiting):
        refusal_of(response)


def test_the_limits_are_named(trusting: Server, host: Host) -> None:
    assert len(BIG) > MAX_FETCHED
    assert len(LARGE) < MAX_FETCHED
    too_big = refusal_of(post(trusting, "/v1/chat/completions", with_url(host.url("/big.png"))))
    assert f"{MAX_FETCHED}" in too_big.replace(",", ""), too_big
    for url in (host.url("/large.png"), data_url(picture(400, 300))):
        too_large = refusal_of(post(trusting, "/v1/chat/completions", with_url(url)))
        assert f"{MAX_PIXELS}" in too_large.replace(",", ""), too_large
        assert "400" in too_large
    fitting = Image.new("RGB", (400, 250))
    assert len(answer_of(trusting, data_url(fitting))) > 0


def test_the_same_picture_is_fetched_by_each_request(trusting: Server, host: Host) -> None:
    """What a URL gives may change, so another picture gives another answer."""
    first = answer_of(trusting, host.url("/a.png"))
    other = picture(60, 45, 5)
    host.files["/a.png"] = (base64.b64decode(data_url(other).partition(",")[2]), "image/png")
    assert answer_of(trusting, host.url("/a.png")) == answer_of(trusting, data_url(other))
    assert answer_of(trusting, data_url(PICTURE)) == first
