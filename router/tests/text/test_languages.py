"""Languages by the tokens of a tokenizer; what is none is refused by name."""

import pytest
from tokenizers import AddedToken, Tokenizer, models

from funitel.proto.errors import InvalidRequest
from funitel.router.text.languages import Languages


def languages(*special: str, plain: tuple[str, ...] = ()) -> Languages:
    tokenizer = Tokenizer(models.WordLevel(vocab={"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in plain])
    return Languages.of(tokenizer)


def test_every_familys_tokens_are_known_by_their_names() -> None:
    found = languages("</s>", "fra_Latn", "fr_XX", "__fr__", "__ast__", "<mask>")
    assert found.tokens == {"fra_Latn": 2, "fr_XX": 3, "__fr__": 4, "fr": 4, "__ast__": 5, "ast": 5}
    assert [found.token(name) for name in ("fra_Latn", "fr_XX", "__fr__", "fr")] == [2, 3, 4, 4]


@pytest.mark.parametrize("name", ["</s>", "FRA_LATN", "deu_Latn", "fr ", "eng_Latn", "[UNK]"])
def test_what_is_no_language_is_refused_with_some_that_are(name: str) -> None:
    found = languages("</s>", "fra_Latn", "__fr__", plain=("eng_Latn",))  # the last is a word like any other
    with pytest.raises(
        InvalidRequest, match="must be one of the model's 2 languages, such as fra_Latn, __fr__"
    ) as caught:
        found.token(name)
    assert caught.value.param == "target_language"
    assert caught.value.message.endswith(f"Given: {name!r}")


def test_a_model_without_languages_says_so() -> None:
    with pytest.raises(InvalidRequest, match="`target_language` is not supported: the model has no languages"):
        languages("</s>").token("fra_Latn")
