"""Request and answer records of Inferflow's native route."""

from typing import Annotated, Literal

from pydantic import Field

from funitel.router.api.common.schema_base import (
    ABOVE_0,
    CLAMPED,
    F32,
    MODEL_NAME,
    U32,
    ApiModel,
    Documented,
    ModelName,
)
from funitel.router.api.common.schema_strategies import StrategyFields
from funitel.router.serving.sampling_request import SamplingRequest
from funitel.router.serving.strategies import with_algorithm

NAMES = {"inputs": "text", "max_new_tokens": "max_output_len", "seed": "random_seed", "min_new_tokens": "min_tokens"}
"""What the route calls otherwise than `SamplingRequest` does."""

_TEMPLATE = (
    "How the prompt is written instead of the model's chat template: text with {query}, {_query}, {system_prompt}, "
    "{res_prefix}, {bos} (first), {eos}, {\\n}, {#id} and {special token}."
)


class InferflowRequest(StrategyFields):
    """A query and how to answer it, in Inferflow's words."""

    model: ModelName | None = Field(default=None, description=MODEL_NAME)
    text: str = Field(default="", description="The query; must not be empty.")
    system_prompt: str = Field(default="", description="Instructions before the query.")
    res_prefix: str = Field(default="", description="The beginning of the answer; what is returned follows it.")
    encoder_input_template: str | None = Field(default=None, description=_TEMPLATE)
    decoder_input_template: str | None = Field(
        default=None, description="The same, for models without an encoder; only one of the two may be given."
    )
    max_output_len: Annotated[U32, ABOVE_0] | None = Field(
        default=None, description=f"Most completion tokens; up to the context's end if absent. {CLAMPED}"
    )
    max_new_tokens: Annotated[U32, ABOVE_0] | None = Field(default=None, description="The same.")
    random_seed: int | None = Field(default=None, description="Makes sampling repeatable; random if absent.")
    temperature: Annotated[F32, Documented(minimum=0)] | None = Field(default=None, description="0 is greedy.")
    is_streaming_mode: bool = Field(default=True, description="Whether to answer with Server-Sent Events.")

    @property
    def sampling(self) -> SamplingRequest:
        """The same for the engine."""
        most = self.max_new_tokens if self.max_output_len is None else self.max_output_len
        sampling = SamplingRequest(
            temperature=self.temperature,
            seed=self.random_seed,
            max_new_tokens=most,
            strategy=self.strategy,
            min_new_tokens=self.min_tokens or 0,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            speculate=self.speculate,
        )
        return sampling if self.decoding_alg is None else with_algorithm(sampling, self.decoding_alg)


class InferflowAnswer(ApiModel):
    """An answer, or a piece of one."""

    text: str
    ret_code: Literal["succ"] = "succ"
    time_cost: int = Field(description="Milliseconds since the request came.")
    is_end: bool = Field(description="Whether it is the last piece.")
