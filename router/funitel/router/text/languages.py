"""Find the target languages of a translation model, by the tokens that its tokenizer has for them. Knows no HTTP."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers

from funitel.proto.errors import InvalidRequest

# NLLB's fra_Latn, mBART-50's fr_XX, M2M100's __fr__. The last ones are also known without their underscores.
_NAME = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}|[a-z]{2,3}_[A-Z]{2}|__(?P<code>[a-z]{2,3})__")
_FEW = 3


@dataclass(frozen=True, slots=True)
class Languages:
    """Tokens by the names of their languages."""

    tokens: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> "Languages":
        """Those that are special tokens of a tokenizer."""
        found: dict[str, int] = {}
        for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items()):
            name = _NAME.fullmatch(token.content) if token.special else None
            if name is not None:
                found[token.content] = token_id
                if name["code"]:
                    found.setdefault(name["code"], token_id)
        return cls(found)

    def token(self, name: str) -> int:
        """The token of a language.

        Raises:
            InvalidRequest: there is none of this name.
        """
        if name in self.tokens:
            return self.tokens[name]
        if not self.tokens:
            raise InvalidRequest("`target_language` is not supported: the model has no languages", "target_language")
        some = ", ".join(list(self.tokens)[:_FEW])
        raise InvalidRequest(
            f"`target_language` must be one of the model's {len(set(self.tokens.values()))} languages, such as {some}. "
            f"Given: {name!r}",
            "target_language",
        )
