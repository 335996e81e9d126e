"""Read a form of `multipart/form-data` as it arrives: fields in memory, the file to a sink."""

import re
from collections.abc import AsyncIterator, Callable
from email.message import Message

from funitel.proto.errors import InvalidRequest, MalformedBody, UnsupportedMediaType

MAX_FIELD_BYTES = 4096
MAX_HEADER_BYTES = 8192
MAX_FIELDS = 16
_BREAK = b"\r\n"
_PARAMETER = re.compile(r'(?<!\w)(\w{1,32})="([^"\r\n]*)"')  # bounded, so that a search takes linear time

Sink = Callable[[bytes], None]


def boundary_of(content_type: str) -> bytes:
    """The boundary that a content type names; raises UnsupportedMediaType unless it is that of a form with files."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        given = content_type.split(";")[0].strip() or "none"
        raise UnsupportedMediaType(f"content-type must be multipart/form-data with a boundary. Given: {given}")
    return boundary.encode("latin-1", "replace")


class FormReader:
    """Reads one form. `fields` has the values of its fields, `filename` the name of its file once that has begun.

    Of fields with the same name `fields` has the last. Names that end in `[]` are those of lists: `lists` has their
    values, by the name before that.

    Args:
        boundary: between its parts.
        file_field: name of the field that is a file.
        sink: takes the content of the file.
    """

    def __init__(self, boundary: bytes, file_field: str, sink: Sink) -> None:
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        self.filename: str | None = None
        self._delimiter = _BREAK + b"--" + boundary
        self._file_field = file_field
        self._sink = sink
        self._buffer = bytearray(_BREAK)  # so that the first delimiter is as the others
        self._name: str | None = None  # of the part that is read
        self._value = bytearray()
        self._num_fields = 0  # parts that are no file, with several of one name
        self._has_ended = False

    async def read(self, chunks: AsyncIterator[bytes]) -> None:
        """Read the form to its end; raises MalformedBody or InvalidRequest, and what the sink raises."""
        await self._skip_to_delimiter(chunks)
        while not self._has_ended:
            await self._read_header(chunks)
            await self._read_content(chunks)

    async def _more(self, chunks: AsyncIterator[bytes]) -> None:
        async for chunk in chunks:
            if chunk:
                self._buffer += chunk
                return
        raise MalformedBody("the form ends early")

    async def _skip_to_delimiter(self, chunks: AsyncIterator[bytes]) -> None:
        while (at := self._buffer.find(self._delimiter)) < 0:
            if len(self._buffer) > MAX_HEADER_BYTES:
                raise MalformedBody("the form does not begin with its boundary")
            await self._more(chunks)
        del self._buffer[: at + len(self._delimiter)]
        await self._end_delimiter(chunks)

    async def _end_delimiter(self, chunks: AsyncIterator[bytes]) -> None:
        """Read what stands behind a boundary: the end of the line, or of the form."""
        while len(self._buffer) < 2:
            await self._more(chunks)
        self._has_ended = self._buffer[:2] == b"--"
        if not self._has_ended and self._buffer[:2] != _BREAK:
            raise MalformedBody("a boundary of the form does not end its line")

    async def _read_header(self, chunks: AsyncIterator[bytes]) -> None:
        while (at := self._buffer.find(b"\r\n\r\n")) < 0 and len(self._buffer) <= MAX_HEADER_BYTES:
            await self._more(chunks)
        if not 0 <= at <= MAX_HEADER_BYTES:
            raise MalformedBody(f"the header of a part of the form has more than {MAX_HEADER_BYTES} bytes")
        header = bytes(self._buffer[:at]).decode("utf-8", "replace")
        del self._buffer[: at + 4]
        disposition = re.search(r"^content-disposition:\s*form-data\s*;(.*)$", header, re.IGNORECASE | re.MULTILINE)
        names = dict(_PARAMETER.findall(disposition[1])) if disposition else {}
        if "name" not in names:
            raise MalformedBody("a part of the form has no name")
        self._name = names["name"]
        if self._name == self._file_field:
            if self.filename is not None:
                raise InvalidRequest(f"`{self._file_field}` is given twice", self._file_field)
            self.filename = names.get("filename", "")
            return
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise InvalidRequest(f"the form must have at most {MAX_FIELDS} fields")

    async def _read_content(self, chunks: AsyncIterator[bytes]) -> None:
        self._value.clear()
        keep = len(self._delimiter) - 1  # where a delimiter may have begun
        while (at := self._buffer.find(self._delimiter)) < 0:
            if len(self._buffer) > keep:
                self._take(bytes(self._buffer[:-keep]))
                del self._buffer[:-keep]
            await self._more(chunks)
        self._take(bytes(self._buffer[:at]))
        del self._buffer[: at + len(self._delimiter)]
        if self._name is not None and self._name != self._file_field:
            value = self._value.decode("utf-8", "replace")
            if self._name.endswith("[]"):
                self.lists.setdefault(self._name.removesuffix("[]"), []).append(value)
            else:
                self.fields[self._name] = value
        await self._end_delimiter(chunks)

    def _take(self, content: bytes) -> None:
        if self._name == self._file_field:
            self._sink(content)
            return
        self._value += content
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"`{self._name}` must have at most {MAX_FIELD_BYTES} bytes", self._name)
