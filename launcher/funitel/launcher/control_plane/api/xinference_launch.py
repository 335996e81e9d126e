"""The body of a launch in Xinference's form, as a launch of ours; what cannot be honoured is refused with a reason."""

from collections.abc import Mapping
from typing import Any

from funitel.launcher.control_plane.checks import Fields, check_name, wrong
from funitel.launcher.control_plane.model_settings import check_flags
from funitel.launcher.control_plane.records import LaunchRequest, ModelType
from funitel.model_server.settings import QUANTIZATIONS
from funitel.proto.errors import InvalidRequest

ENGINES: Mapping[str, str] = {
    "native": "native",
    "transformers": "transformers",
    "sentence_transformers": "native",
    "llama.cpp": "llama_cpp",
    "llama_cpp": "llama_cpp",
}
"""Xinference's names of engines, in lower case, with ours; its library for encoders has the same models as ours."""
FOREIGN_ENGINES = ("vllm", "sglang", "mlx", "lmdeploy", "flag")
FORMATS = ("pytorch", "gptq", "awq", "fp8", "ggufv2")
OTHER_TYPES = ("image", "audio", "video", "flexible")
MAX_REPLICAS, MAX_SHARDS = 1024, 4096

_UNSUPPORTED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "n_worker": ("one model over several machines is given by `partition` of our own form", (1,)),
    "gpu_idx": ("GPUs are given by CUDA_VISIBLE_DEVICES of the server or of a worker", ()),
    "download_hub": ("models come from the Hugging Face hub", ("auto", "huggingface")),
    "enable_virtual_env": ("a model has no Python environment of its own", (False,)),
    "virtual_env_packages": ("a model has no Python environment of its own", ([],)),
    "virtual_env_find_links": ("a model has no Python environment of its own", ([],)),
    "envs": ("a model has no environment of its own: use flags of serve", ({},)),
    "replica_config": ("replicas are alike: add one with a weight by POST .../replicas", ({}, [])),
    "enable_thinking": ("a request decides by chat_template_kwargs", ()),
    "quantization_config": ("the checkpoint says how it is quantised", ({},)),
}
"""Fields that cannot be honoured, with the reason, and the values that ask for nothing."""


def is_xinference(body: Any) -> bool:
    """Whether a body is in Xinference's form: it has `model_name`, and no `model`."""
    return isinstance(body, dict) and "model_name" in body and "model" not in body


def of_xinference(body: Any) -> LaunchRequest:
    """The launch; further fields are flags of `serve`, as Xinference passes them to its engine.

    Raises:
        InvalidRequest: a field is wrong or cannot be honoured; `param` names it.
    """
    given = Fields(body)
    for field, (reason, harmless) in _UNSUPPORTED.items():
        value = given.raw(field)
        if value is not None and value not in harmless:
            raise wrong(field, f"cannot be honoured: {reason}", value)
    given.raw("trust_remote_code")  # its command line always sends it; here the server's own flag decides
    model, uid, path = given.required("model_name"), given.text("model_uid"), given.text("model_path")
    settings: dict[str, Any] = {}
    num_shard = _gpus(given, settings)
    _adapters(given, settings)
    quantize, chosen, variant = _weights(given, path or model)
    request = LaunchRequest(
        model=chosen,
        name=uid or (model if path is not None else None),
        replicas=given.whole("replica", 1, MAX_REPLICAS) or 1,
        num_shard=num_shard,
        quantize=quantize,
        engine=_engine(given),
        worker=given.text("worker_ip"),
        request_limit=given.whole("request_limits", 1),
        model_type=_type(given),
        variant=variant,
        settings=settings | {name: value for name, value in given.rest().items() if value is not None},
    )
    check_name(request.served_name, "model_name" if uid is None else "model_uid")
    _check_further(request.settings)
    return _lifted(request)


def _lifted(request: LaunchRequest) -> LaunchRequest:
    """The same, with what the further fields say about fields of ours in these."""
    settings = dict(request.settings)
    dtype = settings.pop("dtype", None)
    if dtype is not None and not isinstance(dtype, str):
        raise wrong("dtype", "must be a string", dtype)
    fields = request.to_json() | {"settings": settings, "dtype": dtype}
    return LaunchRequest.from_json(fields)


def _check_further(settings: Mapping[str, Any]) -> None:
    """Check further fields, which are named without `settings.` in this form."""
    for name, value in settings.items():
        if name == "dtype":
            continue
        try:
            check_flags({name: value})
        except InvalidRequest as error:
            raise InvalidRequest(error.message.replace(f"settings.{name}", name), name) from error


def _type(given: Fields) -> str | None:
    value = given.text("model_type")
    if value in OTHER_TYPES:
        raise wrong("model_type", f"is not served: the types are {', '.join(ModelType)}", value)
    if value is not None and value not in tuple(ModelType):
        raise wrong("model_type", f"must be one of {', '.join(ModelType)}", value)
    return value


def _engine(given: Fields) -> str | None:
    value = given.text("model_engine")
    if value is None:
        return None
    name = value.lower()
    if name in FOREIGN_ENGINES:
        raise wrong("model_engine", "is no engine of this server, which has native, transformers and llama.cpp", value)
    if name not in ENGINES:
        raise wrong("model_engine", f"must be one of {', '.join(ENGINES)}", value)
    return ENGINES[name]


def _gpus(given: Fields, settings: dict[str, Any]) -> int | None:
    """Shards of each replica; a number of GPUs asks for them, `auto` leaves the choice to the server."""
    value = given.raw("n_gpu")
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SHARDS:
        raise wrong("n_gpu", f"must be auto, or a whole number within 0..{MAX_SHARDS}", value)
    settings["device"] = "cuda" if value else "cpu"
    return value or None


def _adapters(given: Fields, settings: dict[str, Any]) -> None:
    """The LoRA adapters of `peft_model_config`, as the flag has them."""
    config = given.mapping("peft_model_config")
    if not config:
        return
    of_config = Fields(config, "peft_model_config")
    listed = of_config.raw("lora_list") or []
    for name in ("image_lora_load_kwargs", "image_lora_fuse_kwargs"):
        if of_config.raw(name):
            raise wrong(of_config.path(name), "is for models of images, which are not served", config[name])
    of_config.finish()
    if not isinstance(listed, list):
        raise wrong("peft_model_config.lora_list", "must be a list", listed)
    entries = []
    for index, each in enumerate(listed):
        adapter = Fields(each, f"peft_model_config.lora_list[{index}]")
        entries.append(f"{adapter.required('lora_name')}={adapter.required('local_path')}")
        adapter.finish()
    if entries:
        settings["lora_adapters"] = ",".join(entries)


def _weights(given: Fields, model: str) -> tuple[str | None, str, dict[str, Any]]:
    """What format and quantization ask for: a value of --quantize, the model, and a variant of a registration."""
    form, quantization = given.text("model_format", FORMATS), given.text("quantization")
    size = given.raw("model_size_in_billions")
    if size is not None and (isinstance(size, bool) or not isinstance(size, (int, float, str))):
        raise wrong("model_size_in_billions", 'must be a number, or a text such as "1_8"', size)
    if quantization is not None and quantization.lower() == "none":
        quantization = None
    variant = {"format": form, "size": size, "quantization": quantization}
    variant = {name: value for name, value in variant.items() if value is not None}
    if form == "ggufv2":
        is_hub = model.count("/") == 1 and not model.startswith((".", "~", "/"))
        if is_hub and quantization is not None and ":" not in model:
            return None, f"{model}:{quantization}", variant
        return None, model, variant
    if form in ("gptq", "awq", "fp8"):
        return form, model, variant
    if quantization in QUANTIZATIONS:
        return quantization, model, variant
    return None, model, variant
