"""Bound what of a large JSON text is no image, before it is parsed."""

import string

from funitel.proto.errors import PayloadTooLarge
from funitel.router.settings import MEDIA_PAYLOAD_LIMIT, TEXT_PAYLOAD_LIMIT

_BASE64 = (string.ascii_letters + string.digits + "+/=-_\\").encode()  # and the escapes of JSON


def check_text_bytes(content: bytes, limit: int) -> None:
    """Refuse a JSON object within a limit for images that is large by something else, such as millions of lists.

    Bytes that base64 does not have are counted: they tell a body of values from one of images at a fraction of the time
    that parsing would block the event loop. A `limit` that an operator has set otherwise holds for any content.

    Raises:
        PayloadTooLarge: there are more than `TEXT_PAYLOAD_LIMIT`.
    """
    if limit != MEDIA_PAYLOAD_LIMIT or len(content) <= TEXT_PAYLOAD_LIMIT:
        return
    found = len(content.translate(None, _BASE64))
    if found > TEXT_PAYLOAD_LIMIT:
        raise PayloadTooLarge(
            f"the body must have at most {TEXT_PAYLOAD_LIMIT} bytes beside the base64 of images. Given: {found}"
        )
