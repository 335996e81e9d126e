"""Forms read in pieces of any size."""

from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funitel.proto.errors import FunitelError, InvalidRequest, MalformedBody, UnsupportedMediaType
from funitel.router.transport.multipart import FormReader, boundary_of


def form(content: bytes, boundary: bytes = b"bound") -> bytes:
    head = b'--%b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n' % boundary
    file = b'--%b\r\nContent-Disposition: form-data; name="file"; filename="a b.jsonl"\r\n' % boundary
    return head + file + b"Content-Type: text/plain\r\n\r\n" + content + b"\r\n--%b--\r\n" % boundary


async def read(body: bytes, size: int, boundary: bytes = b"bound") -> tuple[FormReader, bytes]:
    found = bytearray()
    reader = FormReader(boundary, "file", found.extend)

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), size):
            yield body[at : at + size]

    await reader.read(pieces())
    return reader, bytes(found)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from([b"\r\n", b"--", b"bound", b"\r\n--boun", b"x", b"\r", b"-"])), st.integers(1, 40))
async def test_the_content_is_what_was_sent(parts: list[bytes], size: int) -> None:
    content = b"".join(parts)
    if b"\r\n--bound" in b"\r\n" + content:
        return
    reader, found = await read(form(content), size)
    assert found == content
    assert reader.fields == {"purpose": "batch"}
    assert reader.filename == "a b.jsonl"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 200), st.integers(1, 60))
async def test_a_form_that_ends_early_is_refused(end: int, size: int) -> None:
    body = form(b"content")
    end = min(end, body.index(b"--bound--") + 8)
    with pytest.raises(MalformedBody):
        await read(body[:end], size)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"x" * 10_000, MalformedBody),
        (b"--bound\r\n" + b"x" * 10_000, MalformedBody),
        (b"--bound\r\nContent-Type: a\r\n\r\nx\r\n--bound--", MalformedBody),
        (b"--boundary\r\n", MalformedBody),
        (
            b'--bound\r\ncontent-disposition: form-data; name="a"\r\n\r\n' + b"x" * 5000 + b"\r\n--bound--",
            InvalidRequest,
        ),
        (b'--bound\r\ncontent-disposition: form-data; name="file"\r\n\r\nx\r\n' * 2 + b"--bound--", InvalidRequest),
    ],
)
async def test_forms_that_are_refused(body: bytes, error: type[FunitelError]) -> None:
    with pytest.raises(error):
        await read(body, 64)


NO_NAME = "a part of the form has no name"
DISPOSITION = b"content-disposition: form-data; "


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"--bound\r\nx: " + b"y" * 10_000 + b"\r\n\r\n", "the header of a part of the form has more than 8192 bytes"),
        (
            b"--bound\r\n"
            + DISPOSITION
            + b'name="purpose"\r\n\r\nbatch\r\n'
            + (b"--bound\r\n" + DISPOSITION + b'name="purpose"\r\n\r\nbatch\r\n') * 20
            + b"--bound--",
            "the form must have at most 16 fields",
        ),
        (b"--bound\r\n" + DISPOSITION + b'x_name="a"\r\n\r\n\r\n--bound--', NO_NAME),
        (b"--bound\r\n" + DISPOSITION + b"n" * 33 + b'="a"\r\n\r\n\r\n--bound--', NO_NAME),
    ],
)
@pytest.mark.parametrize("size", [64, 1 << 20])
async def test_what_a_form_may_hold_is_bounded_however_it_arrives(body: bytes, said: str, size: int) -> None:
    with pytest.raises(FunitelError) as refused:
        await read(body, size)
    assert refused.value.message == said


def test_the_boundary_of_a_content_type() -> None:
    assert boundary_of("multipart/form-data; boundary=abc") == b"abc"
    assert boundary_of('Multipart/Form-Data; charset=utf-8; boundary="a b"') == b"a b"
    for wrong in (
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=x",
    ):
        with pytest.raises(UnsupportedMediaType):
            boundary_of(wrong)
