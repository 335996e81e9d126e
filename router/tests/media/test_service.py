"""From the sources of a request to its tokens: formats, limits, the cache, detail, and what is refused."""

import asyncio
import base64
import hashlib
import zlib
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_oracles import ORACLES, TOKENIZER
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from funitel.proto.errors import InvalidRequest, Overloaded, StartupError
from funitel.proto.step import MediaKind
from funitel.proto.step_socket import MAX_BYTES
from funitel.router.core.journal import KeptJournal
from funitel.router.core.request_context import request_context
from funitel.router.media import service as services
from funitel.router.media.families import family_of
from funitel.router.media.images import MAX_PROCESSED_BYTES, ImageProcessor
from funitel.router.media.interface import MediaSource, PreparedMedia
from funitel.router.media.planners import SmartResize
from funitel.router.media.service import MediaService
from funitel.router.sandbox.pool import SandboxPool
from funitel.router.settings import RouterSettings
from funitel.router.text.model_files import ModelFiles

PLACE = "messages[0].content[1].image_url"
OWNER = b"owner"
Services = Callable[..., MediaService]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Services]:
    """`make(family, **settings)`: services that are closed at the end."""
    made: list[MediaService] = []

    def of(name: str = "qwen2-vl", **settings: Any) -> MediaService:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        ORACLES[name].write(folder)
        found = MediaService.create(RouterSettings(validation_workers=1, **settings), ModelFiles(folder), TOKENIZER)
        assert found is not None
        made.append(found)
        return found

    async with asyncio.timeout(120):
        yield of
    for each in made:
        await each.close()


def picture(width: int = 64, height: int = 48, mode: str = "RGB") -> Image.Image:
    bands = len(mode) if mode in ("RGB", "RGBA", "CMYK") else 1
    values = np.random.default_rng(width + height).integers(0, 256, (height, width, bands), np.uint8)
    if bands == 1:
        return Image.fromarray(values[:, :, 0]).convert(mode)
    return Image.frombytes(mode, (width, height), values.tobytes())


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def source(data: bytes, **values: Any) -> MediaSource:
    return MediaSource(MediaKind.IMAGE, PLACE, data=data, **values)


def image_processes(service: MediaService) -> SandboxPool:
    processor = service.processors[MediaKind.IMAGE]
    assert isinstance(processor, ImageProcessor)
    return processor._processes


async def prepared(service: MediaService, data: bytes, **values: Any) -> PreparedMedia:
    [item] = await service.prepare([source(data, **values)], OWNER)
    return item


async def refusal(service: MediaService, *sources: MediaSource) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await service.prepare(sources, OWNER)
    assert caught.value.param == sources[0].place
    assert f"`{sources[0].place}`" in caught.value.message
    return caught.value.message


def pixels(item: PreparedMedia) -> np.ndarray:
    return np.frombuffer(item.input.values, np.uint8).reshape(item.input.shape)


async def test_formats_are_told_by_their_bytes_and_decoded_alike(make: Services) -> None:
    service = make()
    image = picture(56, 56)
    expected = pixels(await prepared(service, file_of(image)))
    assert np.array_equal(expected[0], np.array(image))
    for kind, options in (("WEBP", {"lossless": True}), ("BMP", {}), ("PNG", {"optimize": True})):
        assert np.array_equal(pixels(await prepared(service, file_of(image, kind, **options), format="gif")), expected)
    for kind in ("JPEG", "GIF", "WEBP"):
        data = file_of(image, kind)
        with Image.open(BytesIO(data)) as decoded:
            assert np.array_equal(pixels(await prepared(service, data))[0], np.array(decoded.convert("RGB")))
    [item] = await service.prepare(
        [
            MediaSource(
                MediaKind.IMAGE, PLACE, url="data:image/jpeg;base64," + base64.b64encode(file_of(image)).decode()
            )
        ],
        OWNER,
    )
    assert np.array_equal(pixels(item), expected)


async def test_modes_become_rgb_as_in_transformers(make: Services) -> None:
    from transformers.image_transforms import convert_to_rgb

    service = make()
    palette = picture(56, 56).quantize(16)
    clear = palette.copy()
    clear.info["transparency"] = 3
    images = [picture(56, 56, mode) for mode in ("L", "1", "RGBA", "LA", "I;16")] + [palette]
    files = [file_of(image) for image in images] + [file_of(clear, transparency=3)]
    files += [file_of(picture(56, 56, mode), "JPEG") for mode in ("L", "CMYK")]
    for data in files:
        with Image.open(BytesIO(data)) as image:
            expected = convert_to_rgb(image, return_numpy=True)
        assert np.array_equal(pixels(await prepared(service, data))[0], expected)


async def test_an_image_is_turned_as_its_orientation_says(make: Services) -> None:
    from transformers.image_utils import load_image

    service = make()
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = file_of(picture(112, 56), "JPEG", exif=exif)
        expected = load_image(base64.b64encode(data).decode()).convert("RGB")
        found = pixels(await prepared(service, data))
        assert np.array_equal(found[0], np.array(expected))
    damaged = file_of(picture(56, 56), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert pixels(await prepared(service, damaged)).shape == (1, 56, 56, 3)


async def test_of_an_animation_the_first_frame_counts(make: Services) -> None:
    frames = [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue", "green")]
    service = make()
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert np.array_equal(pixels(await prepared(service, data))[0], np.array(frames[0]))


async def test_an_item_says_all_that_a_shard_needs(make: Services) -> None:
    service = make("onevision")
    data = file_of(picture(300, 100))
    item = await prepared(service, data)
    media = item.input
    assert media.size == (100, 300)
    assert media.shape[1:] == (84, 84, 3)
    assert (media.kind, media.num_features) == (MediaKind.IMAGE, sum(item.runs))
    assert len(media.key) == 32
    other = (await make("onevision", max_media_items=2).prepare([source(data)], OWNER))[0].input
    assert (other.key, other.values) == (media.key, media.values)
    different = (await make("llava-clip").prepare([source(data)], OWNER))[0].input
    assert different.key != media.key
    assert (await prepared(make(), data)).input.grid == (1, 4, 11)


async def test_what_was_processed_is_taken_again(make: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make("onevision", media_processed_cache_mb=1)
    asked = []
    run = image_processes(service).run_attached

    async def counted(task: Any, data: bytes, key: bytes = b"") -> Any:
        asked.append(hashlib.sha256(data).digest())
        return await run(task, data, key)

    monkeypatch.setattr(image_processes(service), "run_attached", counted)
    data, other = file_of(picture(300, 100)), file_of(picture(301, 100))
    first = await prepared(service, data)
    assert await prepared(service, data, detail="high") is first
    assert len(asked) == 1
    [beside, _] = await service.prepare([source(data), source(other)], OWNER)  # this family then has one tile each
    assert beside.input.shape[0] == 1
    assert len(asked) == 3
    await service.prepare([source(data)], b"another owner")
    assert len(asked) == 4
    for width in range(310, 330):
        await prepared(service, file_of(picture(width, 100)))
    assert service._cache.num_bytes <= 1 << 20
    count = len(asked)
    await prepared(service, data)
    assert len(asked) == count + 1


async def test_low_detail_takes_fewer_tokens_where_the_family_can(make: Services) -> None:
    data = file_of(picture(1400, 900), "JPEG")
    fewer, same = set(), set()
    for name in (
        "smolvlm2",
        "qwen2-vl",
        "gemma3",
        "gemma4",
        "llava-clip",
        "llava-next",
        "onevision",
        "mistral3",
        "internvl",
        "llama4",
    ):
        service = make(name)
        high, auto, low = [
            (await prepared(service, data, detail=detail)).input.num_features for detail in ("high", "", "low")
        ]
        assert high == auto
        (fewer if low < high else same).add(name)
    assert same == {"gemma3", "llava-clip", "llava-next"}
    assert len(fewer) == 7


async def test_requests_that_cannot_be_are_refused_with_a_reason(make: Services) -> None:
    service = make(max_media_pixels=1_000_000, max_media_items=2)
    good = file_of(picture())
    assert "is no image in one of the formats" in await refusal(service, source(b"hello"))
    assert "is no image" in await refusal(service, source(b""))
    assert "detail 'ultra'" in await refusal(service, source(good, detail="ultra"))
    assert "is a sound" in await refusal(service, MediaSource(MediaKind.AUDIO, PLACE, data=b"RIFF"))
    assert "image 3 of 3: at most 2" in await refusal(service, *[source(good)] * 3)
    assert "aspect ratio of 300" in await refusal(service, source(file_of(picture(300, 1))))
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        assert "1200x900 pixels: at most 1000000" in await refusal(
            service, source(file_of(Image.new("RGB", (1200, 900)), kind))
        )
        data = file_of(picture(200, 200), kind)
        for end in (len(data) // 2, len(data) * 9 // 10, 30):
            assert "damaged" in await refusal(service, source(data[:end]))
    message = await refusal(service, MediaSource(MediaKind.IMAGE, PLACE, url="file:///etc/passwd"))
    assert "scheme file" in message
    assert len(await service.prepare([source(good), source(good)], OWNER)) == 2


async def test_extreme_images_are_processed_or_refused(make: Services) -> None:
    data = file_of(Image.new("RGB", (65_535, 1)))
    tall = file_of(Image.new("RGB", (1, 65_535)))
    for name in ("smolvlm2", "gemma3", "gemma4", "llava-next", "onevision", "internvl", "llama4"):
        service = make(name)
        assert (await prepared(service, data)).input.num_features > 0
        assert (await prepared(service, tall)).input.num_features > 0
    assert "aspect ratio" in await refusal(make(), source(data))
    assert "processor resizes to" in await refusal(make("llava-clip"), source(data))
    huge = file_of(Image.new("RGB", (70_000, 1)))
    assert "65535 along an edge" in await refusal(make(), source(huge))


def chunk(kind: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")


def bomb(width: int, height: int, num_bytes: int) -> bytes:
    """A PNG of few bytes that unpacks to many."""
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(num_bytes >> 20)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


async def test_bombs_take_neither_memory_nor_time(make: Services) -> None:
    service = make()
    assert "at most 64000000" in await refusal(service, source(bomb(60_000, 60_000, 8 << 20)))
    assert (await prepared(service, bomb(64, 64, 256 << 20))).input.shape == (1, 56, 56, 3)  # the rest is not read
    text = PngInfo()
    text.add_text("comment", "a" * (32 << 20), zip=True)
    assert "damaged" in await refusal(service, source(file_of(picture(), pnginfo=text)))
    assert pixels(await prepared(service, file_of(picture(56, 56)))).shape == (1, 56, 56, 3)


async def test_a_file_that_kills_its_process_is_refused_and_the_next_one_served(make: Services) -> None:
    service = make()
    image_processes(service)._memory_limit = 350 << 20
    assert "cannot be decoded: it takes more than 350 MiB" in await refusal(
        service, source(file_of(Image.new("RGB", (9000, 6000)), "PNG"))
    )
    assert pixels(await prepared(service, file_of(picture(56, 56)))).shape == (1, 56, 56, 3)


async def test_a_client_with_too_much_waiting_is_told(make: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    data = file_of(picture(200, 200))
    monkeypatch.setattr(services, "MAX_WAITING_BYTES", len(data) * 3 // 2)
    results = await asyncio.gather(
        *(service.prepare([source(data)], OWNER) for _ in range(3)),
        service.prepare([source(data)], b"another"),
        return_exceptions=True,
    )
    assert sum(isinstance(each, Overloaded) for each in results) == 2
    assert not isinstance(results[-1], Exception)


async def test_what_another_router_has_admitted_is_not_refused_for_what_waits(
    make: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make()
    files = [file_of(Image.new("RGB", (56, 56), (shade, 0, 0))) for shade in range(6)]
    for name in ("MAX_WAITING_BYTES", "MAX_OWN_BYTES", "MAX_PREPARING_BYTES"):
        monkeypatch.setattr(services, name, 1)
    with request_context("id") as context:
        context.journal = KeptJournal("a", {}, lambda _: None, is_replayed=True)
        asked = (service.prepare([source(data) for data in files[place : place + 2]], OWNER) for place in (0, 2, 4))
        assert [len(each) for each in await asyncio.gather(*asked)] == [2, 2, 2]


def test_folders_of_text_models_have_no_media(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert family_of(ModelFiles(tmp_path), TOKENIZER) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    assert family_of(ModelFiles(tmp_path), TOKENIZER) is None


def test_a_processor_within_processor_config_counts_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 1000000}')
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"max_pixels": 200704, "patch_size": 16}}')
    family = family_of(ModelFiles(tmp_path), TOKENIZER)
    assert family is not None
    assert isinstance(family.planner, SmartResize)
    assert (family.planner.max_pixels, family.planner.patch_size, family.planner.min_pixels) == (200_704, 16, 3136)


def test_files_of_a_processor_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for config, image in (
        ('{"model_type": "qwen2_vl"}', '{"patch_size": "x"}'),
        ('{"model_type": "qwen2_vl"}', '{"do_resize": false}'),
        ('{"model_type": "smolvlm"}', '{"size": {"height": 3, "width": 3}}'),
        (
            '{"model_type": "gemma3", "image_token_index": 99999}',
            '{"size": {"height": 3, "width": 3}, "resample": "a"}',
        ),
        ('{"model_type": "gemma4", "image_token_id": 3}', '{"patch_size": 16}'),
    ):
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "preprocessor_config.json").write_text(image)
        with pytest.raises(StartupError):
            family_of(ModelFiles(tmp_path), TOKENIZER)


def test_markers(make: Services) -> None:
    assert make().marker(MediaKind.IMAGE) == "<|image_pad|>"
    assert make().prompt_marker(MediaKind.IMAGE) == "<|vision_start|><|image_pad|><|vision_end|>"
    assert make("gemma3").marker(MediaKind.IMAGE) == "<start_of_image>"
    assert make("llama4").prompt_marker(MediaKind.IMAGE) == "<|image|>"


async def test_the_event_loop_goes_on_while_large_images_are_processed(make: Services) -> None:
    service = make("qwen3.5")
    await prepared(service, file_of(picture(56, 56)))
    data = file_of(picture(4000, 3900), "JPEG")
    gaps, ended = [], asyncio.Event()

    async def watch() -> None:
        last = asyncio.get_running_loop().time()
        while not ended.is_set():
            await asyncio.sleep(0.005)
            now = asyncio.get_running_loop().time()
            gaps.append(now - last)
            last = now

    watching = asyncio.create_task(watch())
    item = await prepared(service, data)
    ended.set()
    await watching
    assert len(item.input.values) > 40_000_000
    assert sorted(gaps)[len(gaps) * 99 // 100] < 0.1
    assert max(gaps) < 0.5  # a busy machine's


async def test_a_request_ends_with_the_image_that_is_too_much(make: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files may be large images: the memory of all of them must not be taken before they are refused."""
    service = make()
    files = [file_of(Image.new("RGB", (560, 560), (shade, 0, 0))) for shade in range(20)]
    size = len((await prepared(service, files[0])).input.values)
    monkeypatch.setattr(services, "MAX_REQUEST_BYTES", 4 * size)
    done = 0
    run = image_processes(service).run_attached

    async def counted(*task: Any) -> Any:
        nonlocal done
        found = await run(*task)
        done += 1
        return found

    monkeypatch.setattr(image_processes(service), "run_attached", counted)
    message = await refusal_of(service, *[source(data) for data in files])
    assert f"have more than {5 * size - 1} bytes when processed, at most {4 * size} are taken" in message
    assert done <= 4 + services.ITEMS_AT_ONCE
    assert len(await service.prepare([source(data) for data in files[:4]], OWNER)) == 4
    assert not service._preparing_bytes


async def refusal_of(service: MediaService, *sources: MediaSource) -> str:
    """Of a request of which any image may be the one at fault."""
    with pytest.raises(InvalidRequest) as caught:
        await service.prepare(sources, OWNER)
    return caught.value.message


async def test_requests_that_are_prepared_take_bounded_memory_of_each_key_and_of_all(
    make: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make()
    files = [file_of(Image.new("RGB", (560, 560), (shade, 0, 0))) for shade in range(8)]
    size = len((await prepared(service, files[0])).input.values)
    monkeypatch.setattr(services, "MAX_OWN_BYTES", 6 * size)
    monkeypatch.setattr(services, "MAX_PREPARING_BYTES", 7 * size)
    owners = [b"one", b"one", b"two"]
    results = await asyncio.gather(
        *(service.prepare([source(data) for data in files[:5]], owner) for owner in owners), return_exceptions=True
    )
    refused = [result for result in results if isinstance(result, Overloaded)]
    assert 1 <= len(refused) < 3
    assert all(isinstance(result, list | Overloaded) for result in results)
    assert not service._preparing_bytes
    assert len(await service.prepare([source(data) for data in files], b"one")) == 8  # one alone is served


def test_a_processed_image_fits_into_a_message_to_a_shard() -> None:
    assert MAX_PROCESSED_BYTES + (1 << 16) < MAX_BYTES
