"""Tiles and tokens of every family equal those of transformers, for images of many sizes."""

from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from media_oracles import ORACLES, TOKENIZER, Oracle
from PIL import Image

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import MediaInput, MediaKind
from funitel.router.media import expand
from funitel.router.media.decode import decode, tiles
from funitel.router.media.families import ImageFamily, family_of
from funitel.router.media.interface import PreparedMedia
from funitel.router.media.plan import Call, Plan, Size
from funitel.router.media.planners import from_json
from funitel.router.text.model_files import ModelFiles

# Width and height: tiny, odd, panoramas, of the families' own edges and beside them, and large.
SIZES = [
    *((1, 1), (3, 5), (17, 300), (14, 15), (640, 480), (333, 777), (100, 2500), (2000, 101), (1281, 721)),
    *((112, 112), (336, 672), (512, 512), (513, 511), (224, 1120), (896, 896), (201, 1), (1200, 800)),
]
MAX_PIXELS = 64_000_000
IMAGES = sorted(ORACLES)


def picture(width: int, height: int) -> Image.Image:
    """Noise over a gradient: every filter and every margin leaves a trace."""
    noise = np.random.default_rng(width * 7919 + height).integers(0, 80, (height, width, 3))
    slope = np.linspace(0, 170, height)[:, None, None] + np.linspace(0, 5, 3)
    return Image.fromarray((noise + slope).astype(np.uint8))


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def family(oracle: Oracle, folder: Path) -> ImageFamily:
    oracle.write(folder)
    found = family_of(ModelFiles(folder), TOKENIZER)
    assert found is not None
    return found


def processed(found: ImageFamily, image: Image.Image, call: Call) -> tuple[Plan, np.ndarray]:
    """The plan of an image, made as a sandbox process makes it, and its tiles."""
    size = Size(image.height, image.width)
    planner = from_json(found.planner.to_json())
    assert planner == found.planner
    plan = planner.plan(size, call)
    plan.check(size, MAX_PIXELS)
    drawn = b"".join(tiles(decode(png(image), MAX_PIXELS), plan, planner.resample))
    assert len(drawn) == plan.num_bytes
    return plan, np.frombuffer(drawn, np.uint8).reshape(plan.shape)


def prepared(plan: Plan, key: bytes) -> PreparedMedia:
    made = MediaInput(
        key=key, kind=MediaKind.IMAGE, shape=plan.shape, values=b"", num_features=sum(plan.runs), grid=plan.grid
    )
    return PreparedMedia(made, plan.text, plan.runs)


def check_tiles(name: str, ours: np.ndarray, theirs: Any) -> None:
    assert ours.shape == theirs.shape
    if name == "llama4":  # torch and Pillow round differently
        assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1
    else:
        assert np.array_equal(ours, theirs)


def check_ids(found: ImageFamily, oracle: Oracle, plans: list[Plan], texts: list[str]) -> None:
    """The tokens of a prompt with all images, and where these have their features."""
    between = ["one", "\n\ntwo ", "\n", " "] * len(plans)
    prompt = "".join(part + oracle.marker for part in between[: len(plans)]) + "\n end"
    expected = "".join(part + text for part, text in zip(between, texts, strict=False)) + "\n end"
    items = [prepared(plan, bytes([index])) for index, plan in enumerate(plans)]
    text, _ = expand.insert(prompt, [], items, {MediaKind.IMAGE: found.marker})
    ids, media = expand.place(TOKENIZER.encode(text).ids, items, {MediaKind.IMAGE: found.placeholder_id})
    assert ids == TOKENIZER.encode(expected).ids
    places = [index for index, token in enumerate(ids) if token == found.placeholder_id]
    assert len(places) == sum(item.input.num_features for item in items)
    begin = 0
    for index, (item, plan) in enumerate(zip(media, plans, strict=True)):
        own = places[begin : begin + sum(plan.runs)]
        assert (item.span.position, item.span.end - 1) == (own[0], own[-1])
        assert (item.span.key, item.span.grid) == (bytes([index]), plan.grid)
        begin += len(own)


@pytest.mark.parametrize("name", IMAGES)
def test_tiles_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    oracle = ORACLES[name]
    found = family(oracle, tmp_path)
    random = Random(name)
    sizes = SIZES + [(random.randint(1, 900), random.randint(1, 900)) for _ in range(4)]
    refused = 0
    for width, height in sizes:
        image = picture(width, height)
        try:
            inputs = oracle.process(oracle, [image])
            texts = oracle.texts(inputs, 1)
        except (ValueError, ZeroDivisionError):
            with pytest.raises(InvalidRequest):
                processed(found, image, Call())
            refused += 1
            continue
        plan, ours = processed(found, image, Call())
        check_tiles(name, ours, oracle.tiles(oracle, inputs, 0))
        check_ids(found, oracle, [plan], texts)
    assert refused <= 2


@pytest.mark.parametrize("name", IMAGES)
def test_several_images_of_a_request(name: str, tmp_path: Path) -> None:
    oracle = ORACLES[name]
    found = family(oracle, tmp_path)
    images = [picture(*size) for size in ((300, 200), (199, 301), (300, 200))]
    inputs = oracle.process(oracle, images)
    made = [processed(found, image, Call(is_alone=False)) for image in images]
    for index, (_, ours) in enumerate(made):
        check_tiles(name, ours, oracle.tiles(oracle, inputs, index))
    check_ids(found, oracle, [plan for plan, _ in made], oracle.texts(inputs, len(images)))
