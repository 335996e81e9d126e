"""Follow where headers, bodies and chunks of requests end on a connection, ahead of the parser.

The parser keeps its own account and has the last word. This one bounds what the parser does not: bytes of a header with
the blank lines before it, chunk extensions and trailers, and the size that a chunk announces.
"""

import re
from collections.abc import Iterator
from http import HTTPStatus

_END_OF_HEADER = b"\r\n\r\n"
_SIZE = re.compile(rb"[0-9A-Fa-f]+")
_MIN_CHUNKS = 4096  # that a body may have, and
_BYTES_PER_CHUNK = 1024  # of a longer one; each costs microseconds
_HEX_DIGITS = 16  # of a chunk's size; more are leading zeros


class LimitExceeded(Exception):
    """A client exceeds the limit named by `reason`; raised to stop the parser."""

    def __init__(self, reason: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST, message: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status
        self.message = message


class BodyTooLarge(Exception):
    """A chunked body announces more bytes than a body may have."""


def malformed(message: str = "this is no HTTP request") -> LimitExceeded:
    """What is not HTTP."""
    return LimitExceeded("malformed", message=message)


class Framing:
    """Where the requests of one connection end.

    Args:
        max_header_bytes: of a header, its blank lines included; of all extensions and trailers of a chunked body.
        max_body_bytes: that the chunks of a body may announce.
    """

    def __init__(self, max_header_bytes: int, max_body_bytes: int) -> None:
        self._max_header_bytes = max_header_bytes
        self._max_body_bytes = max_body_bytes
        self._begin_header()

    def _begin_header(self) -> None:
        self._num_header_bytes = 0  # of this request, in all its parts
        self._tail = b""  # the last bytes of the header, where its end may have begun
        self._num_body_bytes = 0  # that are still to come, or of the current chunk with its line break
        self._is_chunked = self._is_in_trailer = False
        self._line = b""  # of a size or a trailer, as far as it is there
        self._num_chunks = 0  # so far,
        self._num_announced = 0  # and bytes in them

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Divide data where a header or a body ends; the parser must have read a piece before the next is asked for.

        Raises:
            LimitExceeded: a bound is exceeded, or chunks are malformed.
            BodyTooLarge: chunks announce more than they may.
        """
        start = 0
        while start < len(data):
            if self._is_chunked:
                end = self._end_of_chunks(data, start)
            elif self._num_body_bytes:
                end = min(start + self._num_body_bytes, len(data))
                self._num_body_bytes -= end - start
                if not self._num_body_bytes:
                    self._begin_header()
            else:
                end = self._end_of_header(data, start)
            yield data[start:end]
            start = end

    def begin_body(self, num_bytes: int | None) -> None:
        """Note that a header is complete: its body has so many bytes, or is chunked if None."""
        self._begin_header()
        self._is_chunked = num_bytes is None
        self._num_body_bytes = num_bytes or 0

    def _end_of_header(self, data: bytes, start: int) -> int:
        known = len(self._tail)
        across = (self._tail + data[start : start + 3]).find(_END_OF_HEADER)
        found = start + across - known if across >= 0 else data.find(_END_OF_HEADER, start)
        is_found = across >= 0 or found >= 0
        end = found + len(_END_OF_HEADER) if is_found else len(data)
        self._tail = b"" if is_found else (self._tail + data[max(start, end - 3) : end])[-3:]
        self._count(end - start)
        return end

    def _end_of_chunks(self, data: bytes, start: int) -> int:
        while start < len(data):
            if self._num_body_bytes:
                skipped = min(self._num_body_bytes, len(data) - start)
                self._num_body_bytes -= skipped
                start += skipped
                continue
            newline = data.find(b"\n", start) + 1
            end = newline or len(data)
            self._line += data[start : min(end, start + self._max_header_bytes + 1)]
            if len(self._line) > self._max_header_bytes:
                raise self._header_too_large()
            start = end
            if newline:
                line, self._line = self._line, b""
                if self._is_in_trailer:
                    self._count(len(line))
                    if line == b"\r\n":
                        self._begin_header()
                        return start
                else:
                    self._begin_chunk(line)
        return start

    def _begin_chunk(self, line: bytes) -> None:
        digits, semicolon, extensions = line.removesuffix(b"\r\n").partition(b";")
        self._count(max(len(digits) - _HEX_DIGITS, 0) + len(semicolon) + len(extensions))
        if _SIZE.fullmatch(digits) is None:
            raise malformed("a chunk of the body has no size")
        size = int(digits, 16)
        self._num_announced += size
        if self._num_announced > self._max_body_bytes:
            raise BodyTooLarge
        self._num_chunks += 1
        max_chunks = _MIN_CHUNKS + self._num_announced // _BYTES_PER_CHUNK
        if self._num_chunks > max_chunks:
            message = f"a body of {self._num_announced} bytes must have at most {max_chunks} chunks"
            raise LimitExceeded("chunks", HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        self._is_in_trailer = size == 0
        self._num_body_bytes = 0 if size == 0 else size + 2

    def _count(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self._max_header_bytes:
            raise self._header_too_large()

    def _header_too_large(self) -> LimitExceeded:
        return LimitExceeded(
            "header_bytes",
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the header must have at most {self._max_header_bytes} bytes",
        )
