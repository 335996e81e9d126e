"""Request records of messages in OpenAI's chats: texts, images, results of tools, and answers sent back."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from funitel.proto.step import MediaKind
from funitel.router.api.common.schema_base import Body, json_object
from funitel.router.chat.call import ChatMessage, PastToolCall, check_role_of_media
from funitel.router.media.interface import MediaSource
from funitel.router.text.control_text import ROLES


class ImageUrl(Body):
    """An image: its URL, or its bytes as one, `data:image/png;base64,...`."""

    url: str
    detail: Literal["auto", "low", "high"] | None = Field(
        default=None, description="How finely the image is looked at, where the model's processor knows it."
    )


def _as_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class InputAudio(Body):
    """A sound: its bytes as base64."""

    data: str
    format: Literal["wav", "mp3", "flac", "ogg"]


class AudioUrl(Body):
    """A sound: its URL, or its bytes as one, `data:audio/wav;base64,...`; vLLM's notation."""

    url: str


MEDIA_PARTS = ("image_url", "input_audio", "audio_url")


class ContentPart(Body):
    """A part of a message's content: text, an image, a sound, or a refusal sent back."""

    type: str
    text: str = ""
    image_url: Annotated[ImageUrl | None, BeforeValidator(_as_url, json_schema_input_type=str | ImageUrl | None)] = (
        Field(default=None, description="Of a part of type `image_url`.")
    )
    input_audio: InputAudio | None = Field(default=None, description="Of a part of type `input_audio`.")
    audio_url: Annotated[AudioUrl | None, BeforeValidator(_as_url, json_schema_input_type=str | AudioUrl | None)] = (
        Field(default=None, description="Of a part of type `audio_url`, which is vLLM's.")
    )
    file: Any = None
    refusal: str | None = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None

    @field_validator("type")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in ("text", "refusal", *MEDIA_PARTS):
            known = "`text`, `image_url`, `input_audio` and `audio_url`"
            raise ValueError(f"content of type `{value}` is not supported, only {known}")
        return value

    @model_validator(mode="after")
    def _has_its_media(self) -> "ContentPart":
        if self.type in MEDIA_PARTS and getattr(self, self.type) is None:
            raise ValueError(f"content of type `{self.type}` needs the field `{self.type}`")
        return self

    def content(self, place: str) -> str | MediaSource:
        """Its text, or its image or sound; `place` is that of the part in the request."""
        if self.type == "image_url" and self.image_url is not None:
            image = self.image_url
            return MediaSource(MediaKind.IMAGE, f"{place}.image_url", image.url, detail=image.detail or "")
        if self.type == "input_audio" and self.input_audio is not None:
            sound = self.input_audio
            url = f"data:audio/{sound.format};base64,{sound.data}"
            return MediaSource(MediaKind.AUDIO, f"{place}.input_audio", url, format=sound.format)
        if self.type == "audio_url" and self.audio_url is not None:
            return MediaSource(MediaKind.AUDIO, f"{place}.audio_url", self.audio_url.url)
        return self.text or self.refusal or ""


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_values(arguments: Any) -> Any:
    """OpenAI sends arguments as JSON text, TGI's clients as an object; templates want values."""
    return json_object(arguments) if isinstance(arguments, str) else arguments


class SentFunction(Body):
    """The function of an earlier call."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_as_values, json_schema_input_type=str | dict[str, Any])] = (
        Field(default_factory=dict)
    )
    description: Any = None  # TGI's answers carry it
    parsed_arguments: Any = None  # the openai package's parsed answers carry it


class SentToolCall(Body):
    """A call the assistant made earlier, as the answer had it."""

    id: str = ""
    type: str = "function"
    function: SentFunction
    index: int | None = None

    @field_validator("type")
    @classmethod
    def _is_function(cls, value: str) -> str:
        if value != "function":
            raise ValueError(f"a call of type `{value}` is not supported, only `function`")
        return value


def _check_role(role: str) -> str:
    if role not in ROLES:
        raise ValueError(f"must be one of {', '.join(ROLES)}. Given: {role[:50]!r}")
    return role


class Message(Body):
    """One message of a chat. Fields copied from answers are accepted where they ask for nothing."""

    role: Annotated[str, AfterValidator(_check_role), Field(description=f"One of {', '.join(ROLES)}.")]
    content: Annotated[
        list[ContentPart] | None, BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart] | None)
    ] = None
    name: str | None = None
    tool_call_id: str | None = Field(default=None, description="Of a `tool` message: the call it answers.")
    tool_calls: list[SentToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="The same as `reasoning_content`.")
    function_call: SentFunction | None = Field(default=None, description="The earlier form of `tool_calls`.")
    audio: Any = None
    refusal: str | None = None
    annotations: Any = None
    parsed: Any = None

    @field_validator("audio")
    @classmethod
    def _asks_for_nothing(cls, value: Any) -> Any:
        if value not in (None, []):
            raise ValueError("is not supported in messages")
        return value

    def to_chat(self, place: str) -> ChatMessage:
        """The message in the words of the chat core; `place` is that of the message in the request.

        Raises:
            InvalidRequest: it has media, and is not the user's nor a tool's result.
        """
        parts = [part.content(f"{place}.content.{number}") for number, part in enumerate(self.content or ())]
        check_role_of_media(self.role, parts)
        calls = [
            PastToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in self.tool_calls or ()
        ]
        role, call_id = self.role, self.tool_call_id
        if self.function_call is not None:
            name = self.function_call.name
            calls.append(PastToolCall(id=_call_id(name), name=name, arguments=self.function_call.arguments))
        if role == "function":  # the earlier form of a tool's result, which names its call by the function
            role, call_id = "tool", call_id or _call_id(self.name or "")
        return ChatMessage.of_parts(
            role,
            parts,
            name=self.name,
            tool_calls=tuple(calls),
            tool_call_id=call_id,
            reasoning=self.reasoning if self.reasoning_content is None else self.reasoning_content,
        )


def _call_id(name: str) -> str:
    """The id of a call in the earlier form, which has none."""
    return f"call_{name}"
