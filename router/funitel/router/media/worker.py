"""Decode and process images in a sandbox process for `service.MediaService`: the setup is a planner and the limits.

A task is what the request says of the image, and its attachment the file. An answer is what is wrong with the image,
or its height and width, with the tiles.
"""

from typing import Any

from funitel.proto.errors import InvalidRequest, translating
from funitel.router.media.decode import decode, tiles
from funitel.router.media.plan import Call, Size
from funitel.router.media.planners import from_json
from funitel.router.sandbox.worker import AttachedAnswer, serve_attached


def prepare(setup: dict[str, Any]) -> AttachedAnswer:
    """Make the planner."""
    planner, max_pixels, max_bytes = from_json(setup["planner"]), setup["max_pixels"], setup["max_bytes"]

    def answer(task: dict[str, Any], data: bytes) -> tuple[Any, bytes]:
        try:
            with translating(_damaged):
                image = decode(data, max_pixels)
            size = Size(image.height, image.width)
            plan = planner.plan(size, Call(**task))
            plan.check(size, max_pixels)
            if plan.num_bytes > max_bytes:
                raise InvalidRequest(f"has {size} pixels, {plan.num_bytes} bytes when processed: at most {max_bytes}")
            return list(size), b"".join(tiles(image, plan, planner.resample))
        except InvalidRequest as error:
            return error.message, b""

    return answer


def _damaged(error: Exception) -> InvalidRequest:
    """The library raises anything for damaged files; running out of memory has to end the process."""
    if isinstance(error, MemoryError):
        raise error
    return InvalidRequest(f"is a damaged image: {error or type(error).__name__}")


if __name__ == "__main__":
    serve_attached(prepare)
