"""OpenAI's chat request as a typed record, and the sampling fields it shares with completions.

Every field of OpenAI's chat request is known here and falls in one of three groups: it is honoured; it only
concerns OpenAI's service and is accepted; or it would change the answer and is refused by name, unless it
asks for nothing (`unsupported_fields`). `FieldPolicy` decides on unknown ones.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from funitel.proto.errors import InvalidRequest
from funitel.router.api.common.schema_base import CLAMPED, U32, Metadata, ServiceTier
from funitel.router.api.openai.schema_messages import Message
from funitel.router.api.openai.schema_sampling import SamplingFields
from funitel.router.api.openai.schema_tools import (
    FunctionDefinition,
    FunctionName,
    ToolChoiceObject,
    ToolDefinition,
    functions_and_choice,
    tools_and_choice,
)
from funitel.router.api.openai.unsupported_fields import CHAT
from funitel.router.chat.call import ChatCall, Tool, ToolChoice


class ChatRequest(SamplingFields):
    """A chat to answer."""

    unsupported: ClassVar = CHAT

    messages: list[Message] = Field(min_length=1, examples=[[{"role": "user", "content": "Hello"}]])
    max_completion_tokens: Annotated[U32, Field(ge=1)] | None = Field(
        default=None, description=f"Wins over `max_tokens`. {CLAMPED}"
    )
    max_tokens: Annotated[U32, Field(ge=1)] | None = Field(
        default=None, description=f"Most tokens of the answer; up to the context's end if absent. {CLAMPED}"
    )
    logprobs: bool | None = Field(default=None, description="The model's own, before any processing.")
    top_logprobs: U32 | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | ToolChoiceObject | None = Field(
        default=None, description="`auto`, `none`, `required`, or a function by its name."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="Whether an answer may have several calls.")
    tool_prompt: str | None = Field(default=None, description="TGI's: what the model is told of the tools.")
    reasoning_effort: str | None = Field(default=None, description="Where the model's template knows it.")
    thinking_budget: U32 | None = Field(default=None, description="Most tokens of reasoning; 0 for none.")
    include_reasoning: bool | None = Field(default=None, description="False leaves reasoning out of the answer.")
    continue_final_message: bool | None = Field(
        default=None, description="Whether to go on with the last message; by default if it is the assistant's."
    )
    add_generation_prompt: bool | None = Field(default=None, description="Whether the prompt begins the answer.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables for the template.")
    functions: list[FunctionDefinition] | None = Field(
        default=None, max_length=128, description="The earlier form of `tools`; the answer has `function_call`."
    )
    function_call: Literal["none", "auto"] | FunctionName | None = Field(
        default=None, description="The earlier form of `tool_choice`, for `functions`."
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        default=None, description="A hint, given to the model's template as a variable."
    )
    # Hints that concern OpenAI's service, or help without changing the answer.
    metadata: Metadata | None = Field(default=None, description="Accepted.")
    store: bool | None = Field(default=None, description="Accepted; chats are not stored.")
    service_tier: ServiceTier | None = Field(default=None, description="Accepted; the answer says `default`.")
    safety_identifier: str | None = Field(default=None, description="Accepted.")
    prompt_cache_key: str | None = Field(default=None, description="Accepted; equal prefixes share work in any case.")
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="Accepted.")
    prompt_cache_retention: str | None = Field(default=None, description="Accepted.")
    prediction: dict[str, Any] | None = Field(default=None, description="Accepted.")

    def check(self) -> None:
        """Raise InvalidRequest for fields that contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`logprobs` must be true when `top_logprobs` is set", "top_logprobs")
        self.check_stream()
        if self.functions and self.tools:
            raise InvalidRequest("`functions` and `tools` exclude each other", "functions")
        if isinstance(self.function_call, FunctionName) and not self.functions:
            raise InvalidRequest("`function_call` needs `functions`", "function_call")

    @property
    def answers_functions(self) -> bool:
        """Whether calls are answered in their earlier form."""
        return bool(self.functions)

    def _tools_and_choice(self) -> tuple[tuple[Tool, ...], ToolChoice]:
        if self.functions:
            return functions_and_choice(self.functions, self.function_call)
        return tools_and_choice(self.tools, self.tool_choice)

    @property
    def call(self) -> ChatCall:
        """The same for the chat core.

        Raises:
            InvalidRequest: `tool_choice` or `response_format` make no sense.
        """
        tools, choice = self._tools_and_choice()
        return ChatCall(
            messages=tuple(message.to_chat(f"messages.{place}") for place, message in enumerate(self.messages)),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False and not self.answers_functions,
            tool_prompt=self.tool_prompt,
            grammar=self.grammar,
            sampling=self.sampling(
                max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
                top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
            n=self.n or 1,
            reasoning_effort=self.reasoning_effort,
            thinking_budget=self.thinking_budget,
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
            add_special_tokens=bool(self.add_special_tokens),
            wants_token_ids=bool(self.return_token_ids),
            template_variables=({"verbosity": self.verbosity} if self.verbosity else {})
            | (self.chat_template_kwargs or {}),
        )
