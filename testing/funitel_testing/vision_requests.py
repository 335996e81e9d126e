"""Pictures as clients of the OpenAI API send them."""

import base64
import io
from collections.abc import Sequence
from typing import Any

from PIL import Image


def data_url(image: Image.Image) -> str:
    """A picture as clients send it."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def content_of(parts: Sequence[str | Image.Image]) -> list[dict[str, Any]]:
    """The content of a message of OpenAI's."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
