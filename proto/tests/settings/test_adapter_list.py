"""Adapters to serve as text and back."""

import pytest

from funitel.proto.settings.adapter_list import AdapterList, AdapterSource


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("owner/one", [AdapterSource("owner/one", repository="owner/one")]),
        ("owner/one@abc", [AdapterSource("owner/one", repository="owner/one", revision="abc")]),
        ("mine=owner/one@v1.0", [AdapterSource("mine", repository="owner/one", revision="v1.0")]),
        ("mine=/a@b/c", [AdapterSource("mine", folder="/a@b/c")]),
        ("mine=./c , ~/d", [AdapterSource("mine", folder="./c"), AdapterSource("~/d", folder="~/d")]),
    ],
)
def test_text_is_read_as_tgi_writes_it(text: str, sources: list[AdapterSource]) -> None:
    listed = AdapterList(text)
    assert list(listed) == sources
    assert AdapterList(str(listed)) == listed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has an empty entry"),
        ("a/b,,c/d", "has an empty entry"),
        ("a", "neither a folder"),
        ("a/b/c", "neither a folder"),
        ("a/b@c@d", "neither a folder"),
        ("a/b@", "neither a folder"),
        ("x=", "neither a folder"),
        ("=/a", "has a name that is empty"),
        ("a\n=/a", "has a name that has a comma, or characters that do not print"),
        (f"{'a' * 257}=/a", "has a name that has more than 256 characters"),
        ("x=/a,x=/b", "names two adapters 'x'"),
        ("a/b,a/b@c", "names two adapters 'a/b'"),
    ],
)
def test_anything_else_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        AdapterList(text)
