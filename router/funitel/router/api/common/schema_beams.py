"""The fields of beam search, alike on TGI's native routes and in chats and completions."""

from typing import Literal

from pydantic import Field

from funitel.proto.errors import InvalidRequest
from funitel.router.api.common.schema_base import F32, Body
from funitel.router.serving.sampling_request import BeamRequest


class BeamFields(Body):
    """Beam search in the words of vLLM and transformers."""

    use_beam_search: bool | None = Field(
        default=None, description="Search the likeliest answers, with as many beams; not in streams."
    )
    length_penalty: F32 | None = Field(
        default=None, description="A beam's score is its log-probability over its length to this power; 1 if absent."
    )
    early_stopping: bool | Literal["never"] | None = Field(
        default=None, description="True: as soon as all answers are there; `never`: once no other can be better."
    )

    def beam_request(self, width: int, num_returned: int, width_field: str) -> BeamRequest | None:
        """The beam search that is asked for; None where there is none.

        Args:
            width: beams.
            num_returned: of the answers found.
            width_field: that has the width, for errors.

        Raises:
            InvalidRequest: a field of beam search is given without one.
        """
        if not self.use_beam_search:
            for name, none in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) not in (None, none):
                    raise InvalidRequest(f"`{name}` needs `use_beam_search` to be true", name)
            return None
        return BeamRequest(
            width=width,
            num_returned=num_returned,
            width_field=width_field,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=self.early_stopping or False,
        )
