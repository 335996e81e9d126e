"""vLLM's record of what an answer must follow: `structured_outputs`, and the older `guided_*` fields."""

from typing import Any, ClassVar

from pydantic import Field

from funitel.proto.errors import InvalidRequest
from funitel.router.api.common.field_policy import Unsupported
from funitel.router.api.common.schema_base import Body
from funitel.router.api.openai.schema_tools import ANY_OBJECT, schema_text
from funitel.router.core.grammar import Grammar


class StructuredOutputs(Body):
    """What an answer must follow: one of the fields."""

    unsupported: ClassVar = {"structural_tag": Unsupported("use `tools` or a `grammar`")}

    json_: Any = Field(default=None, alias="json", description="A JSON schema, or the text of one.")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(default=None, description="A context-free grammar, as Lark or GBNF.")
    json_object: bool | None = Field(default=None, description="Any JSON object.")

    def grammar_of(self, prefix: str) -> Grammar | None:
        """The same as a grammar, None where nothing is asked for; `prefix` begins the names of the fields.

        Raises:
            InvalidRequest: there are several, or one makes no sense.
        """
        asked = {
            "json": None if self.json_ is None else lambda: Grammar.json(schema_text(self.json_, f"{prefix}json")),
            "regex": None if self.regex is None else lambda: Grammar.regex(self.regex or ""),
            "choice": None if self.choice is None else lambda: _choice(self.choice or [], f"{prefix}choice"),
            "grammar": None if self.grammar is None else lambda: Grammar.context_free(self.grammar or ""),
            "json_object": (lambda: Grammar.json(ANY_OBJECT)) if self.json_object else None,
        }
        found = [(name, make) for name, make in asked.items() if make is not None]
        if len(found) > 1:
            (first, _), (second, _), *_ = found
            raise InvalidRequest(f"`{prefix}{second}` and `{prefix}{first}` exclude each other", f"{prefix}{second}")
        return found[0][1]() if found else None


def _choice(texts: list[str], field: str) -> Grammar:
    if not texts:
        raise InvalidRequest(f"`{field}` must have at least one text. Given: []", field)
    return Grammar.choice(texts)
