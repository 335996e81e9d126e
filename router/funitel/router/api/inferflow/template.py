"""Input templates of Inferflow: text with placeholders in braces. Pure, save for the tokenizer's names of tokens."""

import re

from funitel.proto.errors import InvalidRequest
from funitel.router.api.common.errors import TOO_LONG
from funitel.router.serving.prepare import Prompt
from funitel.router.text.tokenizer import Tokenizer

_PLACEHOLDER = re.compile(r"{([^{}]*)}")
_BEGINNING = "{bos}"


def written(
    template: str, texts: dict[str, str], tokenizer: Tokenizer, eos_ids: frozenset[int], field: str, most: int
) -> Prompt:
    """Write a prompt by a template; control tokens in what the placeholders stand for are ordinary text.

    Args:
        template: `{bos}` may begin it, and stands for the tokens that the tokenizer adds to a prompt.
        texts: `query`, `system_prompt` and `res_prefix`.
        tokenizer: the model's.
        eos_ids: tokens that end a completion; `{eos}` is the lowest.
        field: of the request that has the template, for errors.
        most: characters of the prompt; placeholders may repeat a text.

    Raises:
        InvalidRequest: a placeholder is unknown, or the prompt is too long.
    """
    begins = template.startswith(_BEGINNING)
    rest = template[len(_BEGINNING) :] if begins else template
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0

    def put(piece: str, *, is_plain: bool) -> None:
        nonlocal length
        if length + len(piece) > most:
            raise InvalidRequest(f"`{field}` must write a prompt of at most {most} characters", field, TOO_LONG)
        if is_plain and piece:
            spans.append((length, length + len(piece)))
        pieces.append(piece)
        length += len(piece)

    end = 0
    for found in _PLACEHOLDER.finditer(rest):
        put(rest[end : found.start()], is_plain=False)
        end = found.end()
        name = found[1]
        if name in texts:
            put(texts[name], is_plain=True)
        elif name == "_query":
            put(" " + texts["query"], is_plain=True)
        else:
            put(_token(name, tokenizer, eos_ids, field), is_plain=False)
    put(rest[end:], is_plain=False)
    return Prompt("".join(pieces), add_special_tokens=begins, plain=spans)


def _token(name: str, tokenizer: Tokenizer, eos_ids: frozenset[int], field: str) -> str:
    """What a placeholder of a token or of a line break stands for."""
    if name in ("\\n", "\n"):
        return "\n"
    if name == "eos" and eos_ids:
        return tokenizer.codec.decode([min(eos_ids)])
    if re.fullmatch(r"#[0-9]{1,9}", name) and int(name[1:]) < tokenizer.num_tokens:
        return tokenizer.codec.decode([int(name[1:])])
    if name in tokenizer.special_ids([name]):
        return name
    raise InvalidRequest(f"`{field}` has an unknown placeholder or token. Given: {{{name[:50]}}}", field)
