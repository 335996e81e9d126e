"""LoRA adapters of calls: vLLM's request for one, and the adapter of the engine that it names."""

from dataclasses import dataclass
from pathlib import Path

from funitel.proto.errors import FunitelError, InvalidRequest
from funitel.router.adapters.folder import inspect
from funitel.router.core.request import Adapter


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter that a call is to be computed with, in vLLM's form.

    `lora_path` is a folder of PEFT's layout. `lora_int_id` is any integer >= 1; adapters are told apart by their name
    and files.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        """Raises InvalidRequest for a name that is empty, or a number below 1."""
        if not isinstance(self.lora_name, str) or not self.lora_name.strip():
            raise InvalidRequest(f"lora_name must be a text that is not empty, given {self.lora_name!r}", "lora_name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidRequest(f"lora_int_id must be an integer >= 1, given {self.lora_int_id!r}", "lora_int_id")


def adapter_of(request: LoRARequest | None, *, is_enabled: bool) -> Adapter | None:
    """The adapter that is asked for; None for none.

    Raises:
        InvalidRequest: adapters are not enabled, or the folder has none of PEFT's layout.
    """
    if request is None:
        return None
    if not isinstance(request, LoRARequest):
        raise InvalidRequest(f"lora_request must be a LoRARequest, given {request!r}", "lora_request")
    if not is_enabled:
        raise InvalidRequest("lora_request needs LLM(..., enable_lora=True)", "lora_request")
    try:
        return inspect(request.lora_name, Path(request.lora_path).expanduser()).adapter
    except FunitelError as error:
        raise InvalidRequest(error.message.replace("`", ""), "lora_path") from error
