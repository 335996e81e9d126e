"""Request and answer records of vLLM's routes for tokens and adapters, `/version` and `/load`."""

from pydantic import Field

from funitel.router.api.common.schema_base import MODEL_NAME, U32, ApiModel, ApiRootModel, Body
from funitel.router.api.native.schema import GenerateRequest, TokenizeResponse
from funitel.router.api.openai.schema_chat import ChatRequest

WITH_STRINGS = "Whether to answer the tokens as the tokenizer spells them, too."


class TokenizePrompt(Body):
    """A prompt to tokenize."""

    model: str | None = Field(default=None, description=MODEL_NAME)
    prompt: str
    add_special_tokens: bool = Field(default=True, description="Whether to add those that begin a prompt.")
    return_token_strs: bool | None = Field(default=None, description=WITH_STRINGS)


class TokenizeChat(ChatRequest):
    """A chat to make the prompt of, and tokenize it; of what else a chat says only what changes the prompt counts."""

    add_special_tokens: bool = Field(default=False, description="Whether to add those that the template did not.")
    return_token_strs: bool | None = Field(default=None, description=WITH_STRINGS)


class TokenizeBody(ApiRootModel[GenerateRequest | TokenizePrompt | TokenizeChat]):
    """TGI's body, which has `inputs`, or one of vLLM's."""


class Tokenized(ApiModel):
    """The tokens of a prompt, and how many the model can take with its answer."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizeAnswer(ApiRootModel[TokenizeResponse | Tokenized]):
    """TGI's answer to TGI's body, or vLLM's to one of vLLM's."""


class DetokenizeRequest(Body):
    """Tokens to make a text of."""

    model: str | None = Field(default=None, description=MODEL_NAME)
    tokens: list[U32]


class DetokenizeResponse(ApiModel):
    """The text of some tokens, special ones included."""

    prompt: str


class ServerVersion(ApiModel):
    """The version of the server."""

    version: str


class ServerLoad(ApiModel):
    """How many requests are in flight, those that wait among them."""

    server_load: int


class LoadAdapter(Body):
    """An adapter to load."""

    lora_name: str = Field(description="What `model` and `adapter_id` of requests call it.")
    lora_path: str = Field(description="Its folder, below that of --lora-folder.")
    load_inplace: bool | None = Field(default=None, description="Whether it replaces one of the same name.")
    pinned: bool | None = Field(default=None, description="Whether it stays in memory, used or not.")
    base_model_name: str | None = Field(
        default=None, description="Name of the model that it is for, where there are several."
    )


class UnloadAdapter(Body):
    """An adapter to unload."""

    lora_name: str
    lora_int_id: int | None = Field(default=None, description="Accepted; names are enough.")
