"""The images of one model: decoded and cut into tiles in a sandbox process."""

import json

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import MediaInput, MediaKind
from funitel.router.media.families import ImageFamily
from funitel.router.media.interface import PreparedMedia
from funitel.router.media.plan import Call, Plan, Size
from funitel.router.media.processor import LARGE_BYTES, digest, run
from funitel.router.sandbox.pool import SandboxPool
from funitel.router.settings import RouterSettings

MAX_PROCESSED_BYTES = 255 << 20  # of one image: less than a message to a shard may have
TIME_LIMIT_SECONDS = 60.0
CPU_LIMIT_SECONDS = 20.0
NICENESS = 10
BASE_MEMORY_BYTES = 512 << 20
BYTES_PER_PIXEL = 24  # a decoded image, with transparency, its background, what they become, and what it is resized to


class ImageProcessor:
    """A `Processor` of images.

    Args:
        settings: of the router.
        family: of the model.
    """

    kind = MediaKind.IMAGE

    def __init__(self, settings: RouterSettings, family: ImageFamily) -> None:
        self.marker = family.marker
        self.prompt_marker = family.prompt_marker
        self.placeholder_id = family.placeholder_id
        self._planner = family.planner
        self._name = json.dumps(family.planner.to_json(), sort_keys=True).encode()
        self._processes = SandboxPool(
            "funitel.router.media.worker",
            {
                "planner": family.planner.to_json(),
                "max_pixels": settings.max_media_pixels,
                "max_bytes": MAX_PROCESSED_BYTES,
            },
            most=settings.validation_workers,
            time_limit=TIME_LIMIT_SECONDS,
            cpu_limit=CPU_LIMIT_SECONDS,
            memory_limit=BASE_MEMORY_BYTES + 2 * MAX_PROCESSED_BYTES + BYTES_PER_PIXEL * settings.max_media_pixels,
            max_answer_bytes=MAX_PROCESSED_BYTES + LARGE_BYTES,
            niceness=NICENESS,
            has_several_keys=settings.has_several_keys,
        )

    def variant(self, call: Call) -> str:
        """See Processor."""
        return self._planner.variant(call)

    async def process(self, place: str, data: bytes, call: Call, owner: bytes) -> PreparedMedia:
        """See Processor."""
        task = {"detail": call.detail, "is_alone": call.is_alone}
        found, values = await run(self._processes, task, place, data, owner, "image")
        plan = self._planner.plan(Size(*found), call)
        if len(values) != plan.num_bytes:
            raise InvalidRequest(
                f"`{place}` cannot be decoded: {len(values)} of {plan.num_bytes} bytes came of it", place
            )
        return PreparedMedia(await self._input(plan, values), plan.text, plan.runs)

    async def _input(self, plan: Plan, values: bytes) -> MediaInput:
        facts = json.dumps([plan.shape, plan.grid, plan.size]).encode()
        return MediaInput(
            key=await digest(self._name, facts, values),
            kind=self.kind,
            shape=plan.shape,
            values=values,
            num_features=sum(plan.runs),
            grid=plan.grid,
            size=plan.size,
        )

    async def close(self) -> None:
        """See Processor."""
        await self._processes.close()
