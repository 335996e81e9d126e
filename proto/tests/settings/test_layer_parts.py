"""Parsing of the places of layers."""

import pytest

from funitel.model_server.settings import ModelServerSettings
from funitel.proto.settings.fields import to_argv
from funitel.proto.settings.layer_parts import LayerParts, PlacedLayers


@pytest.mark.parametrize("text", ["0-9=int8", "0-9=cpu,10-29=cuda", "0-0=float32,1-1=gguf,2-3=bfloat16,4-9=float16"])
def test_the_text_of_parts_gives_them_again(text: str) -> None:
    assert str(LayerParts(text)) == text
    assert LayerParts(str(LayerParts(text))) == LayerParts(text)


def test_parts_say_what_is_where() -> None:
    parts = LayerParts(" 0 = cpu, 1 - 9 =cuda")
    assert parts == (PlacedLayers(0, 0, "cpu"), PlacedLayers(1, 9, "cuda"))
    assert [list(each.layers) for each in parts] == [[0], list(range(1, 10))]
    assert parts.num_layers == 10
    assert parts.has("cuda")
    assert not parts.has("int8")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not ranges of layers with a place each, such as 0-9=cpu,10-29=cuda"),
        ("0-9", "is not ranges"),
        ("=cpu", "is not ranges"),
        ("-1=cpu", "is not ranges"),
        ("a-b=cpu", "is not ranges"),
        ("0-9=cpu,", "is not ranges"),
        ("0-99999=cpu", "is not ranges"),
        ("0-9=gpu", "has 'gpu' for layers 0-9: a place is one of cuda, cpu, float32, float16, bfloat16, int8, gguf"),
        ("1-9=cpu", "has a range that begins with layer 1: layer 0 comes next"),
        ("0-9=cpu,11-12=cuda", "has a range that begins with layer 11: layer 10 comes next"),
        ("0-9=cpu,9-12=cuda", "has a range that begins with layer 9: layer 10 comes next"),
        ("0-9=cpu,10-8=cuda", "has the range 10-8, which ends before it begins"),
    ],
)
def test_other_text_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LayerParts(text)


def test_a_child_gets_them_as_text() -> None:
    words = to_argv(ModelServerSettings(model_id="m", layer_parts=LayerParts("0=cpu,1-9=cuda")))
    assert words[words.index("--layer-parts") + 1] == "0-0=cpu,1-9=cuda"
    words = to_argv(ModelServerSettings(model_id="m", gpu_layers=9))
    assert words[words.index("--gpu-layers") + 1] == "9"
