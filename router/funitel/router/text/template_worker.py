"""The process that renders chats for `template_renderer`: it is told a model's template, and then the chats.

An answer has the `text` of a prompt, or the `error` that the template has made.
"""

from typing import Any

from funitel.proto.errors import TemplateError
from funitel.router.sandbox.worker import Answer, serve
from funitel.router.text.chat_template import ChatTemplate


def prepare(setup: dict[str, Any]) -> Answer:
    """Compile the template; raises TemplateError if it is none."""
    template = ChatTemplate(**setup["texts"])
    most: int = setup["most_characters"]

    def answer(chat: dict[str, Any]) -> dict[str, str]:
        try:
            text = template.render(**chat)
        except TemplateError as error:
            return {"error": error.message}
        if len(text) > most:
            return {"error": f"the prompt must have at most {most} characters, given {len(text)}"}
        return {"text": text}

    return answer


if __name__ == "__main__":
    serve(prepare)
