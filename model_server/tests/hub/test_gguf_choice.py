"""Which GGUF of a repository a name chooses, by names alone."""

import pytest

from funitel.model_server.hub.gguf_choice import HubName, choose, models_among, parse_hub_name
from funitel.proto.errors import WeightsError

FILES = [
    "README.md",
    "imatrix.gguf",
    "mmproj-Q4_K_M.gguf",
    "mmproj-F16.gguf",
    "BF16/tiny-BF16-00001-of-00002.gguf",
    "BF16/tiny-BF16-00002-of-00002.gguf",
    "tiny-IQ4_XS.gguf",
    "tiny-Q4_0.gguf",
    "tiny-Q4_K_M.gguf",
    "tiny-Q4_K_S.gguf",
    "tiny-Q8_0.gguf",
    "tiny-UD-Q4_K_XL.gguf",
    "tiny-UD-Q8_0.gguf",
    "tiny.imatrix.gguf",
]
PARTS = ("BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf")


def chosen(name: str, files: list[str]) -> tuple[str, ...]:
    return choose(models_among(files), parse_hub_name(name)).files


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("owner/name", HubName("owner/name")),
        ("gpt2", HubName("gpt2")),
        ("owner/name:Q4_K_M", HubName("owner/name", tag="Q4_K_M")),
        ("owner/name:latest", HubName("owner/name")),
        ("hf.co/owner/name:Q8_0", HubName("owner/name", tag="Q8_0")),
        ("https://huggingface.co/owner/name", HubName("owner/name")),
        ("owner/name/a.gguf", HubName("owner/name", file="a.gguf")),
        ("owner/name/Q8/a.GGUF", HubName("owner/name", file="Q8/a.GGUF")),
        ("owner/name:Q8/a.gguf", HubName("owner/name", tag="Q8/a.gguf")),
        ("https://example.org/a", HubName("https://example.org/a")),
        ("a/b/c", HubName("a/b/c")),
    ],
)
def test_a_name_is_taken_apart(text: str, name: HubName) -> None:
    assert parse_hub_name(text) == name


def test_an_empty_tag_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"owner/name: has no tag after its colon: .* owner/name:Q4_K_M"):
        parse_hub_name("owner/name:")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("o/n:Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("o/n:q4_k_m", "tiny-Q4_K_M.gguf"),
        ("o/n:Q8_0", "tiny-Q8_0.gguf"),  # not the UD one
        ("o/n:ud-q8_0", "tiny-UD-Q8_0.gguf"),
        ("o/n:Q4_K_XL", "tiny-UD-Q4_K_XL.gguf"),
        ("o/n:iq4", "tiny-IQ4_XS.gguf"),
        ("o/n:4_xs", "tiny-IQ4_XS.gguf"),
        ("o/n:TINY-q4_0", "tiny-Q4_0.gguf"),
        ("o/n:tiny-Q4_0.gguf", "tiny-Q4_0.gguf"),
        ("o/n/tiny-Q4_0.gguf", "tiny-Q4_0.gguf"),
        ("o/n", "tiny-Q4_K_M.gguf"),
    ],
)
def test_a_name_chooses_one_file(name: str, file: str) -> None:
    assert chosen(name, FILES) == (file,)


@pytest.mark.parametrize(
    "name", ["o/n:bf16", f"o/n/{PARTS[1]}", "o/n:tiny-BF16", "o/n:BF16/", "o/n/BF16/tiny-BF16.gguf"]
)
def test_every_part_of_a_split_model_is_chosen(name: str) -> None:
    assert chosen(name, FILES) == PARTS


@pytest.mark.parametrize(
    ("files", "file"),
    [
        (["a-Q2_K.gguf", "a-Q8_0.gguf", "a-q4_k_m.gguf"], "a-q4_k_m.gguf"),
        (["a-Q2_K.gguf", "a-Q8_0.gguf"], "a-Q8_0.gguf"),
        (["b-Q5_K.gguf", "a-Q6_K.gguf", "a-F16-mmproj.gguf"], "a-Q6_K.gguf"),
        (["a-Q4_K_M-00001-of-00002.gguf", "a-Q2_K.gguf"], "a-Q2_K.gguf"),  # a part is missing
        (["mmproj-a.gguf", "a.gguf"], "a.gguf"),
    ],
)
def test_a_bare_name_chooses_as_llama_cpp_does(files: list[str], file: str) -> None:
    assert chosen("o/n", files) == (file,)


def test_names_of_float_types_are_one() -> None:
    for file in ("a-fp16.gguf", "a.F16.gguf"):
        for tag in ("F16", "fp16"):
            assert chosen(f"o/n:{tag}", [file, "a-BF16.gguf"]) == (file,)


@pytest.mark.parametrize(
    ("name", "files", "line"),
    [
        ("o/n:Q3_K_M", ["a-Q4_K_M.gguf", "a-Q8_0.gguf"], "o/n has no GGUF Q3_K_M; it has Q4_K_M, Q8_0"),
        ("o/n:F16", ["a-BF16.gguf"], "o/n has no GGUF F16; it has BF16"),
        ("o/n:Q4", FILES, "Q4 fits 4 models of o/n: Q4_0, Q4_K_M, Q4_K_S, UD-Q4_K_XL; name one"),
        ("o/n:Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0 fits 2 models of o/n: a-Q8_0.gguf, b-Q8_0.gguf; name one"),
        ("o/n/b.gguf", ["a.gguf"], "o/n has no GGUF b.gguf; it has a.gguf"),
        (
            "o/n:mmproj",
            [*FILES[:4], "a-Q8_0.gguf"],
            "o/n has no GGUF mmproj, which is no model by its name; it has Q8_0",
        ),
        ("o/n/imatrix.gguf", ["imatrix.gguf", "a-Q8_0.gguf"], "o/n has no GGUF imatrix.gguf, which is .* it has Q8_0"),
        ("o/n:Q8_0", ["imatrix.gguf", "a.safetensors"], "o/n has no GGUF of a model"),
        (
            "o/n:Q8_0",
            ["a-Q8_0-00001-of-00003.gguf"],
            r"o/n has a-Q8_0.gguf in 3 parts, without \S*2-of-00003.gguf and 1",
        ),
        (
            "o/n:x",
            [f"a{i:03}-Q8_0.gguf" for i in range(50)],
            r"o/n has no GGUF x; it has a000-Q8_0.gguf, .* and 10 more",
        ),
    ],
)
def test_what_fits_none_or_several_is_one_line_with_what_there_is(name: str, files: list[str], line: str) -> None:
    with pytest.raises(WeightsError, match=f"^{line}") as caught:
        chosen(name, files)
    assert "\n" not in caught.value.message
