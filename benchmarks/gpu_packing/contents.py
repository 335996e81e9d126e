"""What is packed: the packages that funitel needs, and those parts of vLLM that a Llama in bfloat16 needs."""

import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gpu_packing import fatbin
from gpu_packing.errors import PackError
from gpu_packing.wheels import Wheel

WITH_TORCH = frozenset({"torch", "torchaudio", "torchvision", "triton", "pip", "setuptools"})
WITH_CUDA = ("nvidia-", "cuda-")

TOOLS = (
    "httpx>=0.28",  # of the benchmark
    "py-spy",  # profiles of the router and the shard while streams run
)

STALE_FILES = ("*.dist-info/RECORD", "*.dist-info/sboms/*")  # sums and lists of files that may not be there

VLLM_PACKAGES_LEFT_OUT = frozenset(
    {  # other models, the HTTP server, kernels of other chips and of other precisions
        "anthropic",
        "fastsafetensors",
        "flashinfer-python",
        "humming-kernels",
        "lm-format-enforcer",
        "loguru",
        "mcp",
        "mistral-common",
        "model-hosting-container-standards",
        "nvtx",
        "outlines-core",
        "prometheus-fastapi-instrumentator",
        "pynvvideocodec",
        "quack-kernels",
        "tilelang",
        "tokenspeed-mla",
        "torchcodec",
        "watchfiles",
    }
)
VLLM_PREFIXES_LEFT_OUT = ("opentelemetry-",)
VLLM_REPLACED = {
    "apache-tvm-ffi": SpecifierSet(">=0.1.11"),  # vLLM's pin is for kernels that are left out; xgrammar needs more
    "openai": SpecifierSet(">=2,<3"),  # vLLM 0.26 imports names of this major release
}
VLLM_FILES_LEFT_OUT = (
    "vllm/_flashmla_*.so",
    "vllm/_moe_C_*.so",
    "vllm/_qutlass_C.*.so",
    "vllm/_rust_tool_parser.*.so",
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/entrypoints/serve/instrumentator/static/*",
    "tvm_ffi/3rdparty/*",
    "tvm_ffi/include/*",
    "tvm_ffi/src/*",
)
FLASH_ATTENTION_2 = "vllm/vllm_flash_attn/_vllm_fa2_C.*.so"
FLASH_ATTENTION_3 = "vllm/vllm_flash_attn/_vllm_fa3_C.*.so"
HOPPER = 90  # the architecture of FlashAttention 3


def is_with_torch(name: str) -> bool:
    """Whether a package comes with torch, or is of no use without a network."""
    return name in WITH_TORCH or name.startswith(WITH_CUDA)


def is_left_out_of_vllm(name: str) -> bool:
    """Whether a Llama in bfloat16 runs without a package that vLLM requires."""
    return is_with_torch(name) or name in VLLM_PACKAGES_LEFT_OUT or name.startswith(VLLM_PREFIXES_LEFT_OUT)


def site_requirements(pyproject: Path) -> list[Requirement]:
    """What the router, the launcher and the model server need, and the tools of the benchmark."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["server"], *TOOLS]
    return [Requirement(line) for line in lines]


def files_left_out_of_vllm(architecture: int) -> tuple[str, ...]:
    """Patterns of files; of the two attention libraries one is used."""
    unused = FLASH_ATTENTION_2 if architecture == HOPPER else FLASH_ATTENTION_3
    return (*VLLM_FILES_LEFT_OUT, unused)


def unpack_wheels(wheels: Iterable[Wheel], folder: Path, left_out: tuple[str, ...] = ()) -> None:
    """Unpack wheels into a folder for PYTHONPATH; programs go to `bin` below it."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel.path) as archive:
            for member in archive.infolist():
                name = _installed_name(member.filename)
                if name is None or any(fnmatch(member.filename, pattern) for pattern in (*STALE_FILES, *left_out)):
                    continue
                path = folder / name
                if not path.resolve().is_relative_to(folder.resolve()):
                    raise PackError(f"{wheel.path.name} holds a file outside its folder: {member.filename}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(member))
                is_program = name.startswith("bin/") or (member.external_attr >> 16) & 0o100
                path.chmod(0o755 if is_program else 0o644)


def _installed_name(name: str) -> str | None:
    """Where an installer would put a member of a wheel; None of what is no file that programs read."""
    if name.endswith("/"):
        return None
    first, _, rest = name.partition("/")
    if not first.endswith(".data"):
        return name
    kind, _, rest = rest.partition("/")
    places: Mapping[str, str] = {"purelib": "", "platlib": "", "scripts": "bin/"}
    return places[kind] + rest if kind in places else None


def thin_libraries(folder: Path, architecture: int) -> list[str]:
    """Thin every shared library below a folder that holds CUDA code; returns a line for each."""
    lines = []
    for path in sorted(folder.rglob("*.so")):
        content = path.read_bytes()
        if not content.startswith(fatbin.ELF_MAGIC):
            continue
        try:
            thinned = fatbin.thin(content, architecture)
        except PackError as error:
            raise PackError(f"{path.relative_to(folder)}: {error}") from error
        if thinned.num_containers:
            path.write_bytes(thinned.content)
            kept = f"{thinned.kept_bytes / 1e6:.1f} of {thinned.all_bytes / 1e6:.1f} MB of CUDA code"
            without = f"{thinned.num_without_code} of {thinned.num_containers} containers without sm_{architecture}"
            lines.append(f"{path.relative_to(folder)}: {kept}, {without}")
    return lines
