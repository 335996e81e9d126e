"""Functions of torch that are cut into parts: what comes of them, and how often there is a pause."""

import time

import pytest
import torch
from torch.nn import functional

from funitel.model_server.media import small_parts
from funitel.model_server.media.small_parts import SmallParts


class Pauses:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


CASES = {
    "linear": (functional.linear, ((100, 32), (48, 32), (48,))),
    "linear of batches": (functional.linear, ((3, 100, 32), (48, 32), (48,))),
    "linear of many": (functional.linear, ((100, 3, 32), (48, 32), (48,))),
    "linear without a bias": (functional.linear, ((100, 32), (48, 32))),
    "linear of a transposed input": (lambda x, w: functional.linear(x.mT, w), ((32, 100), (48, 32))),
    "activation": (lambda x: functional.gelu(x, approximate="tanh"), ((3, 50, 40),)),
    "activation by erf": (functional.gelu, ((3, 50, 40),)),
    "attention": (functional.scaled_dot_product_attention, ((1, 4, 100, 8), (1, 4, 90, 8), (1, 4, 90, 8))),
    "attention with a mask": (
        lambda q, k, v, mask: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3),
        ((2, 4, 100, 8), (2, 4, 100, 8), (2, 4, 100, 8), (2, 1, 100, 100)),
    ),
    "attention with one mask": (
        lambda q, k, v, mask: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        ((2, 4, 100, 8), (2, 4, 90, 8), (2, 4, 90, 8), (2, 1, 1, 90)),
    ),
    "attention with a mask of keys": (
        lambda q, k, v, mask: functional.scaled_dot_product_attention(q, k, v, mask, 0.0),
        ((2, 4, 100, 8), (2, 4, 90, 8), (2, 4, 90, 16), (1, 90)),
    ),
    "attention with masks of heads": (
        lambda q, k, v, mask: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        ((1, 4, 200, 8), (1, 4, 90, 8), (1, 4, 90, 8), (4, 200, 90)),
    ),
    "convolution of tiles": (
        lambda x, w, b: functional.conv2d(x, w, b, stride=4),
        ((5, 3, 16, 16), (32, 3, 4, 4), (32,)),
    ),
    "convolution of an image": (
        lambda x, w: functional.conv2d(x, w, stride=4),
        ((1, 3, 131, 32), (32, 3, 4, 4)),
    ),
    "convolution that overlaps": (
        lambda x, w: functional.conv2d(x, w, stride=2, padding=1),
        ((1, 3, 64, 32), (32, 3, 4, 4)),
    ),
    "convolution of a sound": (
        lambda x, w, b: functional.conv1d(x, w, b, stride=2, padding=1),
        ((1, 40, 200), (100, 40, 3), (100,)),
    ),
    "convolution of sounds": (
        lambda x, w: functional.conv1d(x, w, None, 2, 1),
        ((2, 40, 200), (100, 40, 3)),
    ),
    "convolution of patches": (
        lambda x, w: functional.conv3d(x, w, stride=[2, 4, 4]),
        ((60, 3, 2, 4, 4), (32, 3, 2, 4, 4)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_give_what_the_whole_gives(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, shapes = CASES[case]
    torch.manual_seed(0)
    arguments = [torch.randn(shape) for shape in shapes]
    wanted = function(*arguments)
    whole, cut = Pauses(), Pauses()
    with SmallParts(whole):
        function(*arguments)
    monkeypatch.setattr(small_parts, "MAX_OPERATIONS", 1 << 15)
    monkeypatch.setattr(small_parts, "TILE_ROWS", 24)
    monkeypatch.setattr(small_parts, "TILE_COLUMNS", 16)
    monkeypatch.setattr(small_parts, "MAX_ELEMENTS", 1000)
    with SmallParts(cut):
        found = function(*arguments)
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) < 1e-5 * max(1.0, float(wanted.abs().max()))
    assert whole.count <= 2  # one case transposes too
    assert (cut.count > 3) == (case != "convolution that overlaps")


def test_a_convolution_of_patches_gives_rows_that_lie_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flattened and transposed, as towers do it: all layers behind would else read columns."""
    monkeypatch.setattr(small_parts, "MAX_OPERATIONS", 1 << 15)
    with SmallParts(lambda: None):
        found = functional.conv2d(torch.randn(1, 3, 64, 64), torch.randn(256, 3, 8, 8), stride=8)
    assert found.flatten(2).transpose(1, 2).is_contiguous()


def test_cuts_do_not_depend_on_time() -> None:
    """So that the ranks of a model have the same features."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(1024, 4096)
    rows = torch.randn(512, 1024)
    found = []
    for seconds in (0.0, 0.001):
        with torch.inference_mode(), SmallParts(lambda seconds=seconds: time.sleep(seconds)):
            found.append(layer(rows))
    assert torch.equal(*found)
