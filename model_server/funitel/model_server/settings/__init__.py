"""Settings of a shard process and its commands; flags, variables and defaults are TGI's where TGI has them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funitel.model_server.settings.block_names import ALIASES, BLOCK_FORMATS
from funitel.model_server.settings.catalogue import model_names
from funitel.proto.process.cores import Cores
from funitel.proto.security.tls import MutualTls
from funitel.proto.settings.batch_sizes import BatchSizes
from funitel.proto.settings.bounds import NOT_NEGATIVE, POSITIVE, SHARE, Bounds
from funitel.proto.settings.fields import check_bounds, inherited, require, setting
from funitel.proto.settings.layer_parts import MAX_LAYERS, LayerParts, check_parts, placing_flag
from funitel.proto.settings.options import Counts, flag_of
from funitel.proto.settings.partition import Partition, check_layers
from funitel.proto.settings.suggestions import did_you_mean
from funitel.proto.settings.tgi_flags import REFUSED_VALUES, TRANSLATED_VALUES

NATIVE, TRANSFORMERS, LLAMA_CPP = ENGINES = ("native", "transformers", "llama_cpp")
"""What computes a model: our own code, transformers' code over our blocks, or llama.cpp; see docs/engines.md."""
DTYPES = ("float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
MAX_HOST_GB = 1 << 20  # a typing error beyond it
ATTENTIONS = ("triton", "flash", "torch", "paged", "flashdecoding", "flashinfer", "flashdecoding-ipex")  # ours, TGI's
MAX_STRETCH = 1024  # of rotary positions; no model makes sense far beyond its trained context
MAX_NODES = 1024  # NUMA nodes, of a Linux kernel
MAX_SPIN_US = 1_000_000
MAX_LORA_RANK, MAX_LORAS = 1024, 1 << 16
MAX_SPECULATE = 16  # drafts of a step: beyond it few are accepted, and each is computed
QUANTIZATIONS = ("gptq", "awq", "fp8", "compressed-tensors", "int8", "gguf", "a8w8", *ALIASES)
"""What `--quantize` may ask of a checkpoint: the first four as its config.json names them, int8 and q4 the two kinds of
compressed-tensors that `funitel-server quantize` writes, gguf the blocks of a model that comes from a GGUF, the others
blocks that are made of floating point on loading."""

ACTIVATION_DTYPES = ("int8", "int16")
FLOAT8_KV_DTYPES = ("fp8", "fp8_e4m3fn", "fp8_e5m2")
KV_CACHE_DTYPES = ("float32", "float16", "bfloat16", *FLOAT8_KV_DTYPES, "int8", "uint4")
_PARENT = "Process id of the parent; this process stops when the parent ends."
_ENGINE = (
    "What computes the model: native (own code), transformers (its code over the KV blocks) or llama_cpp (a GGUF by "
    "llama.cpp; needs the extra llama-cpp). When not given, native where the architecture is supported, else "
    "transformers."
)
_GPU_LAYERS = (
    "Number of layers on the GPU, the last ones with the head; the CPU computes the others; all when not given."
)
_LAYER_PARTS = (
    "Place of each layer of the model, by ranges such as 0-9=cpu,10-29=cuda: cuda, cpu, or the precision of weights on "
    "the CPU: float32, float16, bfloat16, int8 or gguf."
)
_CACHE_DIR = "Folder for models fetched and converted; ~/.cache/funitel when not given."


@dataclass(frozen=True, kw_only=True)
class DownloadSettings:
    """Make a model's files present and whole in the cache; prints their folder."""

    model_id: str
    revision: str | None = setting(None, "Hub revision.")
    cache_dir: str | None = setting(None, _CACHE_DIR, env="FUNITEL_CACHE")
    engine: str | None = setting(None, "What will compute the model.", choices=ENGINES)
    draft_model: str | None = setting(None, "Model that makes draft tokens, to fetch besides.")
    json_output: bool = setting(False, "Log JSON lines.")
    reports_progress: bool = setting(False, "Report progress as JSON lines on stdout, for a program.", env=None)
    logger_level: str = setting("INFO", "Least severe log level: debug, info, warning, error.", env=None)
    exit_with_parent: int | None = setting(None, _PARENT, env=None)


@dataclass(frozen=True, kw_only=True)
class CachedSettings:
    """List the models on this disk: those of the hub's cache, and what funitel fetched or converted."""

    cache_dir: str | None = setting(None, _CACHE_DIR, env="FUNITEL_CACHE")
    json: bool = setting(False, "Write one JSON object.", env=None)


@dataclass(frozen=True, kw_only=True)
class RemoveCachedSettings(CachedSettings):
    """Delete a model from this disk, unless a process uses it."""

    name: str
    check: bool = setting(False, "Say what would be deleted, and delete nothing.", env=None)


@dataclass(frozen=True, kw_only=True)
class CheckSpecSettings:
    """Check that a file describes a model that can be; prints the fault otherwise."""

    path: str


MAX_ROWS, MAX_THREADS, MAX_FOOTPRINT_MIB = 4096, 1024, 1 << 16  # of a measurement of kernels
QUANTIZE_METHODS = ("gptq", "int8", "q4", "none")
_TENSORS = (
    "Formats of some matrices, as PATTERN=FORMAT, parted by commas: a pattern is part of the name, "
    "such as down_proj=q6."
)
_OF_GPTQ = tuple("groupsize act_order symmetric percdamp calibration_file num_samples sequence_length".split())
GROUP_MULTIPLE = 8  # four-bit weights in a 32-bit word: no word belongs to two groups


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """Write a copy of a model with smaller weights to a folder; prints the folder."""

    model_id: str
    output_dir: str
    revision: str | None = setting(None, "Hub revision.")
    cache_dir: str | None = setting(None, _CACHE_DIR, env="FUNITEL_CACHE")
    method: str | None = setting(
        None,
        "gptq, the default: 4 bits, calibrated on texts; int8: 8 bits, a scale for each output; q4: 4 bits, blocks of "
        "32; none: the weights as they are, those of a GGUF in float32.",
        choices=QUANTIZE_METHODS,
        env=None,
    )
    to: str | None = setting(
        None,
        "Blocks to write in place of a method, by their short name, or a full name such as q5_b32t1.",
        choices=ALIASES,
        unlisted=BLOCK_FORMATS,
        env=None,
    )
    tensor: str | None = setting(None, _TENSORS + " Embeddings and head are q8 where none is for them.", env=None)
    inferflow_levels: bool = setting(
        False, "Levels of q6, q5 and q4_b64t1 as Inferflow has them, of which the last is never used.", env=None
    )
    outliers: float = setting(
        0.0,
        "Share of the weights of each matrix of blocks of under 8 bits that is kept apart as differences in float16, "
        "those that make blocks most exact; 0.01 takes 0.32 bits a weight.",
        env=None,
        bounds=Bounds(minimum=0, maximum=0.05),
    )
    groupsize: int = setting(
        32, "gptq: inputs that share a scale, a multiple of 8; -1 for all inputs of an output.", env=None
    )
    act_order: bool = setting(
        True, "gptq: begin with the inputs that matter most; the order in the files is the model's.", env=None
    )
    symmetric: bool = setting(
        False, "gptq: no zero points, for readers that take none; each group has one when not given.", env=None
    )
    percdamp: float = setting(
        0.1,
        "gptq: dampening of the Hessian, as a share of its mean diagonal.",
        env=None,
        bounds=Bounds(minimum=0, maximum=1),
    )
    calibration_file: str | None = setting(
        None,
        "gptq: texts to calibrate on: a text file, a .jsonl file, or a folder of them; built-in texts when not given.",
        env=None,
    )
    num_samples: int = setting(128, "gptq: maximum number of sequences to calibrate on.", env=None, bounds=POSITIVE)
    sequence_length: int | None = setting(
        None,
        "gptq: maximum tokens of a sequence; 2048 or the model's context when not given.",
        env=None,
        bounds=Bounds(above=1),
    )
    upload_to_model_id: str | None = setting(None, "Hub repository to upload the finished folder to.", env=None)
    device: str = setting("auto", "Where to compute.", choices=DEVICES)
    num_threads: int | None = setting(
        None, "Compute threads; the cores this process may use when not given.", bounds=POSITIVE
    )
    json_output: bool = setting(False, "Log JSON lines.")
    logger_level: str = setting("INFO", "Least severe log level: debug, info, warning, error.", env=None)

    def __post_init__(self) -> None:
        check_bounds(self)
        require(
            self.groupsize == -1 or (self.groupsize > 0 and self.groupsize % GROUP_MULTIPLE == 0),
            f"--groupsize must be -1 or a positive multiple of {GROUP_MULTIPLE}, given {self.groupsize}",
        )
        if self.rounding != "gptq":
            for name in _OF_GPTQ:
                is_default = getattr(self, name) == self.__dataclass_fields__[name].default
                require(is_default, f"{flag_of(name)} is for --method gptq, not {self.method}")
        if self.to is None:
            require(self.tensor is None, "--tensor is for blocks, which --to asks for")
            require(not self.inferflow_levels, "--inferflow-levels is for blocks, which --to asks for")
            require(not self.outliers, "--outliers is for blocks, which --to asks for")
        for name in ("method", *_OF_GPTQ) if self.to is not None else ():
            is_default = getattr(self, name) == self.__dataclass_fields__[name].default
            require(is_default, f"{flag_of(name)} is not for --to {self.to}, which needs no texts")

    @property
    def rounding(self) -> str:
        """The method, where `to` names no blocks."""
        return self.method or "gptq"


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """Hold the matrix products of the fused CPU step against what this machine can read and multiply.

    A line for each shape of the model and number of rows; the last line on stdout is one JSON object.
    """

    model_id: str = setting(
        "smollm2-135m-instruct", "Model with the matrices to measure.", env=None, complete=model_names
    )
    cache_dir: str | None = setting(None, _CACHE_DIR, env="FUNITEL_CACHE")
    tier: str = setting(
        "int8", "Precision of the weights.", choices=("float32", "float16", "bfloat16", "int8", "gguf"), env=None
    )
    rows: Counts = setting(Counts("1,4,16,64"), "Tokens in a step, such as 1,16.", env=None)
    num_threads: int | None = setting(None, "Compute threads; the cores this process may use when not given.")
    footprint_mib: int | None = setting(
        None,
        "MiB of weights that are read in turn, and of memory that the roof is measured with; when not given twice the "
        "largest cache, within 256 and 1024.",
        env=None,
    )

    def __post_init__(self) -> None:
        for rows in self.rows:
            require(1 <= rows <= MAX_ROWS, f"--rows must be within 1..{MAX_ROWS}, given {rows}")
        for flag, given, maximum in (
            ("--num-threads", self.num_threads, MAX_THREADS),
            ("--footprint-mib", self.footprint_mib, MAX_FOOTPRINT_MIB),
        ):
            require(given is None or 1 <= given <= maximum, f"{flag} must be within 1..{maximum}, given {given}")


SPEC_ACTIONS = ("show", "check")


@dataclass(frozen=True, kw_only=True)
class SpecSettings:
    """Print the spec of a model as JSON, or check a spec against a model's tensors; see docs/models.md."""

    action: str
    model_id: str
    revision: str | None = setting(None, "Hub revision.")
    cache_dir: str | None = setting(None, _CACHE_DIR, env="FUNITEL_CACHE")
    model_spec: str | None = setting(None, "check: JSON file to check, instead of the model's own spec.", env=None)
    all_fields: bool = setting(False, "show: print every field, those with their defaults too.", env=None)
    architecture: str | None = setting(
        None, "show: architecture to read config.json as, in place of the one it names.", env=None
    )

    def __post_init__(self) -> None:
        require(
            self.action in SPEC_ACTIONS, f"spec must be followed by {' or '.join(SPEC_ACTIONS)}, given {self.action!r}"
        )
        require(self.model_spec is None or self.action == "check", "--model-spec is for spec check, not spec show")
        require(not self.all_fields or self.action == "show", "--all-fields is for spec show, not spec check")
        require(self.architecture is None or self.action == "show", "--architecture is for spec show, not spec check")


@dataclass(frozen=True, kw_only=True)
class ModelsSettings:
    """List what can be served; or say what serving one model would take on this machine, before anything is loaded."""

    model_id: str = setting(
        "", "Model to estimate; all that can be served when not given.", env=None, complete=model_names
    )
    revision: str | None = setting(None, "Hub revision.")
    cache_dir: str | None = setting(None, _CACHE_DIR, env="FUNITEL_CACHE")
    num_shard: int = setting(1, "Shards that the model would be split over.", env=None, bounds=POSITIVE)
    device: str = setting("auto", "Where the model would run.", choices=DEVICES, env=None)
    gpu_layers: int | None = setting(None, _GPU_LAYERS, env=None, bounds=Bounds(minimum=1, maximum=MAX_LAYERS))
    layer_parts: LayerParts | None = setting(None, _LAYER_PARTS, env=None)
    dtype: str | None = setting(None, "Precision, as for serving.", choices=DTYPES, env=None)
    quantize: str | None = setting(
        None,
        "Precision in which weights would be kept, as for serving.",
        choices=QUANTIZATIONS,
        unlisted=BLOCK_FORMATS,
        refused=REFUSED_VALUES["quantize"],
        translated=TRANSLATED_VALUES["quantize"],
        env=None,
    )
    kv_cache_dtype: str | None = setting(
        None, "Precision of the KV pool, as for serving.", choices=KV_CACHE_DTYPES, env=None
    )
    model_spec: str | None = setting(None, "JSON file that describes the model.", env=None)
    trust_remote_code: bool = setting(False, "Run the code that comes with a model no other way serves.", env=None)
    speculate: int = setting(
        0, "Draft tokens, as for serving.", env=None, bounds=Bounds(minimum=0, maximum=MAX_SPECULATE)
    )
    draft_model: str | None = setting(None, "Model that makes draft tokens, as for serving.", env=None)
    block_size: int = setting(16, "Tokens per KV block.", env=None, bounds=POSITIVE)
    cuda_memory_fraction: float | None = setting(
        None,
        "Share of a whole GPU's memory, or of half of the available memory on a CPU, as for serving.",
        env=None,
        bounds=SHARE,
    )
    explain: bool = setting(
        False,
        "List every engine, format, precision and device for the model, each with the reason for or against it.",
        env=None,
    )
    json: bool = setting(False, "Print one JSON object.", env=None)

    def __post_init__(self) -> None:
        check_bounds(self)
        require(not self.explain or bool(self.model_id), "--explain needs a model: funitel models MODEL --explain")
        problem = check_parts(self.gpu_layers, self.layer_parts, None, self.num_shard)
        require(problem is None, problem or "")
        placing = placing_flag(self.gpu_layers, self.layer_parts)
        require(
            not self.explain or placing is None, f"{placing} is not for --explain, which lists devices and precisions"
        )


@dataclass(frozen=True, kw_only=True)
class ModelServerSettings:
    """Serve one tensor-parallel rank of a model over gRPC."""

    model_id: str
    revision: str | None = setting(None, "Hub revision.")
    cache_dir: str | None = setting(
        None, "Folder for fetched and converted models; ~/.cache/funitel when not given.", env="FUNITEL_CACHE"
    )
    model_spec: str | None = setting(
        None, "JSON file that describes the model instead of the entry of its architecture; see docs/models.md."
    )
    trust_remote_code: bool = setting(
        False, "Run Python code of a model's repository, for models that nothing else supports."
    )
    engine: str | None = setting(None, _ENGINE, choices=ENGINES)
    sharded: bool = setting(False, "Join the other ranks through torch.distributed.", env=None)
    rank: int = setting(0, "Tensor-parallel rank of this shard.")
    world_size: int = setting(1, "Number of shards of the model.")
    local_rank: int | None = setting(
        None,
        "Number of this shard among those of its machine, which is the number of its GPU; its rank when not given.",
        env=None,
        bounds=NOT_NEGATIVE,
    )
    partition: Partition | None = setting(
        None,
        "Ranks of each pipeline stage: `;` separates stages, each with some of the layers, and `&` ranks of a stage, "
        "over which its tensors are split, such as 0&1;2&3; one stage when not given.",
    )
    layers: Counts | None = setting(
        None,
        "Layers of each stage of --partition, such as 12,20; when not given, so that a step reads as many bytes in "
        "each as can be.",
    )
    expert_parallel: bool = setting(
        False, "Give each rank whole experts of a mixture of experts, instead of a part of every expert."
    )
    master_addr: str = setting("localhost", "Host of rank 0 for torch.distributed.")
    master_port: int = setting(29500, "Port of rank 0 for torch.distributed.")
    uds_path: str = setting("/tmp/text-generation-server", "Unix socket to listen on, followed by -RANK.", env=None)
    listen: str | None = setting(None, "host:port to listen on instead of the Unix socket.", env=None)
    shard_tls_cert: str | None = setting(
        None, "PEM file of a certificate that is shown to routers, with --listen, --shard-tls-key and -ca.", env=None
    )
    shard_tls_key: str | None = setting(None, "PEM file of the key of --shard-tls-cert.", env=None)
    shard_tls_ca: str | None = setting(
        None, "PEM file of authorities: a router must show a certificate of theirs.", env=None
    )
    device: str = setting("auto", "Where the model runs.", choices=DEVICES)
    gpu_layers: int | None = setting(None, _GPU_LAYERS, bounds=Bounds(minimum=1, maximum=MAX_LAYERS))
    layer_parts: LayerParts | None = setting(None, _LAYER_PARTS)
    dtype: str | None = setting(
        None,
        "Precision of weights and KV. When not given, bfloat16 on a GPU; on a CPU a GGUF keeps its quantised blocks, "
        "floating-point weights become int8 and KV bfloat16, or all is float32 where the fused step cannot be built.",
        choices=DTYPES,
    )
    quantize: str | None = setting(
        None,
        "Quantisation of the checkpoint's weights; as in its config.json when not given. Floating-point weights are "
        "converted as they are loaded: int8, fp8 on a GPU, q8 q6 q5 q4 q3h q3 q2, blocks of so many bits, a16w8 and "
        "a16w4, groups with zero points and activations of 16 bits, and a8w8, which is int8. On a CPU "
        "gguf keeps the blocks of a GGUF.",
        choices=QUANTIZATIONS,
        unlisted=BLOCK_FORMATS,
        refused=REFUSED_VALUES["quantize"],
        translated=TRANSLATED_VALUES["quantize"],
    )
    quantize_tensors: str | None = setting(None, "With blocks as --quantize: " + _TENSORS[0].lower() + _TENSORS[1:])
    activation_dtype: str = setting(
        "int8",
        "On a CPU, levels that activations are rounded to where weights are int8 or blocks of a GGUF, with a scale for "
        "each 32: int8 (int16 where one of the 32 is an outlier), or int16 for a smaller error and about twice the "
        "arithmetic.",
        choices=ACTIVATION_DTYPES,
    )
    kv_cache_dtype: str | None = setting(
        None,
        "Precision of the KV pool; that of the step when not given. int8 and uint4 are codes with a scale and a zero "
        "for each token and head, in the fused CPU step alone. fp8 is fp8_e4m3fn; on a GPU the checkpoint's scales of "
        "keys and values are used with it if there are any.",
        choices=KV_CACHE_DTYPES,
    )
    rope_scaling: str | None = setting(
        None,
        "Scaling of rotary positions instead of the checkpoint's; linear when only a factor is given.",
        choices=("linear",),
        refused=REFUSED_VALUES["rope_scaling"],
    )
    rope_factor: float | None = setting(
        None,
        "Factor by which rotary positions and the model's context are extended; 1 when not given.",
        bounds=Bounds(above=0, maximum=MAX_STRETCH),
    )
    block_size: int = setting(16, "Tokens per KV block.", bounds=POSITIVE)
    cuda_memory_fraction: float | None = setting(
        None,
        "Fraction of the GPU's memory that a shard may use, with weights and activations, 1 when not given; on a CPU "
        "the KV pool's fraction of half of the available memory. When not given there, the pool has at most 16 "
        "contexts and a quarter of that memory.",
        bounds=SHARE,
    )
    replicas_on_host: int = setting(
        1, "Replicas that share this host's memory; on a CPU each takes an equal part.", env=None, bounds=POSITIVE
    )
    cpu_offload_gb: float = setting(
        0.0,
        "GiB of a shard's weights that stay in host memory; they are copied to the GPU in every step, a layer at a "
        "time, while the previous layer computes.",
        bounds=Bounds(minimum=0, maximum=MAX_HOST_GB),
    )
    kv_host_gb: float = setting(
        0.0,
        "GiB of host memory of each shard for cached prefix blocks evicted from the KV pool; they are copied back when "
        "a prompt begins with them, instead of being computed again.",
        bounds=Bounds(minimum=0, maximum=MAX_HOST_GB),
    )
    media_cache_gb: float | None = setting(
        None,
        "GiB of each shard for the features of images that it has encoded, on the device of the model; 0.5 on a CPU "
        "and 2 on a GPU when not given. With 0 the model takes text alone.",
        bounds=Bounds(minimum=0, maximum=MAX_HOST_GB),
    )
    kv_disk_gb: float = setting(
        0.0,
        "GiB of a file of each shard on a CPU for cached prefix blocks evicted from the KV pool; they are read back "
        "when a prompt begins with them, also after a restart.",
        bounds=Bounds(minimum=0, maximum=MAX_HOST_GB),
    )
    kv_disk_dir: str | None = setting(
        None, "Folder of the files of --kv-disk-gb; the folder kv of the cache folder when not given."
    )
    attention: str | None = setting(
        None,
        "Attention kernels on a GPU: triton, flash (flash-attn, if installed) or torch; when not given, or for TGI's "
        "name of another backend, the fastest that passes its check.",
        choices=ATTENTIONS,
    )
    cuda_graphs: BatchSizes | None = setting(
        None,
        "Numbers of decoding rows for which a step is captured as a CUDA graph, such as 1,2,4; 0 for none; 1, 2, 4, 8 "
        "and multiples of 8 up to 256 when not given. A step uses the smallest graph that fits.",
    )
    folder_fd: int | None = setting(
        None,
        "Descriptor to read the model's folder from, in one line, once this process has started; MODEL_ID is then not "
        "looked for.",
        env=None,
    )
    num_threads: int | None = setting(
        None,
        "Compute threads of each shard; when not given, the best number by a measurement at start, at most an equal "
        "share of the cores.",
        bounds=POSITIVE,
    )
    most_threads: int | None = setting(
        None,
        "Maximum number of threads that tuning at start may choose where --num-threads is not given; the cores this "
        "process may use when not given.",
        env=None,
        bounds=POSITIVE,
    )
    thread_spin_us: int | None = setting(
        None,
        "Microseconds that threads of the fused CPU step spin before they sleep; measured at start when not given.",
        bounds=Bounds(minimum=0, maximum=MAX_SPIN_US),
    )
    cores: Cores | None = setting(None, "Cores that this shard runs on, such as 0-3,8; any when not given.", env=None)
    memory_node: int | None = setting(
        None,
        "NUMA node to take memory of while it has some; any when not given.",
        env=None,
        bounds=Bounds(minimum=0, maximum=MAX_NODES - 1),
    )
    prefill_chunking: bool = setting(
        True, "Compute long prompts in chunks, in the same steps as running sequences.", takes_value=True
    )
    prefix_caching: bool = setting(
        True, "Share cached KV blocks among sequences with a common prefix.", takes_value=True
    )
    enable_prefill_logprobs: bool = setting(
        False,
        "Allow `decoder_input_details`: log-probabilities of prompt tokens on native routes.",
        env="REQUEST_LOGPROBS",
    )
    max_lora_rank: int = setting(
        64,
        "Maximum rank of the matrices of a LoRA adapter; 0 for no adapters.",
        bounds=Bounds(minimum=0, maximum=MAX_LORA_RANK),
    )
    reserved_loras: int = setting(
        0,
        "LoRA adapters of the maximum rank that the KV pool leaves memory for.",
        env=None,
        bounds=Bounds(minimum=0, maximum=MAX_LORAS),
    )
    disable_forced_spans: bool = setting(
        False, "Compute each token in its own step, also tokens that a grammar forces."
    )
    speculate: int | None = setting(
        None,
        "Maximum number of draft tokens that a step verifies for each sequence, made by --draft-model, else by the "
        "model's own MTP layer, else looked up in the sequence's own tokens. None when not given, or 0.",
        bounds=Bounds(minimum=0, maximum=MAX_SPECULATE),
    )
    draft_model: str | None = setting(
        None,
        "Model that makes the draft tokens of --speculate, as --model-id: one with the same tokenizer, or an EAGLE-3 "
        "head or Medusa heads for this model.",
    )
    watermark_gamma: float = setting(0.5, "Fraction of the vocabulary that a watermark favours.")
    watermark_delta: float = setting(2.0, "Value that a watermark adds to the logits of favoured tokens.")
    otlp_endpoint: str | None = setting(
        None, "Where spans are sent by OTLP over gRPC, such as http://localhost:4317; nowhere when not given."
    )
    otlp_service_name: str = setting("text-generation-inference.server", "What the spans say they are from.")
    json_output: bool = setting(False, "Log JSON lines.")
    logger_level: str = setting("INFO", "Least severe log level: debug, info, warning, error.", env=None)
    exit_with_parent: int | None = setting(None, _PARENT, env=None)
    deployment_file: str | None = setting(
        None,
        "With --exit-with-parent, file that names another launcher which has adopted this process, once its own has "
        "ended.",
        env=None,
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        require(
            self.shard_tls is None or self.listen is not None,
            "--shard-tls-cert, --shard-tls-key and --shard-tls-ca are for --listen, which is not given",
        )
        require(self.world_size >= 1, f"WORLD_SIZE must be >= 1, given {self.world_size}")
        require(
            0 <= self.rank < self.world_size,
            f"RANK must be within 0..{self.world_size - 1} (WORLD_SIZE - 1), given {self.rank}",
        )
        require(
            self.sharded or self.world_size == 1,
            f"WORLD_SIZE is {self.world_size}: add --sharded to join the other ranks",
        )
        problem = check_layers(self.partition, self.layers)
        require(problem is None, problem or "")
        problem = check_parts(self.gpu_layers, self.layer_parts, self.partition, self.world_size)
        require(problem is None, problem or "")
        require(
            self.partition is None or self.partition.num_ranks == self.world_size,
            f"--partition {self.partition} is for {self.partition and self.partition.num_ranks} ranks, "
            f"WORLD_SIZE is {self.world_size}",
        )
        require(
            0.0 < self.watermark_gamma < 1.0, f"--watermark-gamma must be within (0, 1), given {self.watermark_gamma}"
        )
        require(math.isfinite(self.watermark_delta), f"--watermark-delta must be finite, given {self.watermark_delta}")
        require(
            self.draft_model is None or bool(self.speculate),
            f"--draft-model {self.draft_model} makes drafts for --speculate, which is "
            f"{'not given' if self.speculate is None else self.speculate}",
        )
        require(
            self.num_threads is None or self.most_threads is None,
            f"--most-threads {self.most_threads} bounds the tuning of threads, "
            f"which --num-threads {self.num_threads} turns off: give one of them",
        )

    @property
    def device_number(self) -> int:
        """Number of the GPU of this shard, where it has one."""
        return self.rank if self.local_rank is None else self.local_rank

    @property
    def stages(self) -> Partition | None:
        """The pipeline stages where there are several; one stage is the ranks as they are."""
        return self.partition if self.partition is not None and len(self.partition) > 1 else None

    @property
    def placing(self) -> str | None:
        """The flag that places layers on devices, with its value; None where none does."""
        return placing_flag(self.gpu_layers, self.layer_parts)

    @property
    def num_tensor_ranks(self) -> int:
        """Ranks over which the tensors of a layer are split."""
        return self.world_size if self.stages is None else self.stages.num_tensor_ranks

    @property
    def tensor_rank(self) -> int:
        """This rank's place among these."""
        stages = self.stages
        return self.rank if stages is None else stages[stages.stage_of(self.rank)].index(self.rank)

    @property
    def shard_tls(self) -> MutualTls | None:
        """How routers are met on --listen; None for plain connections."""
        return MutualTls.of(self.shard_tls_cert, self.shard_tls_key, self.shard_tls_ca)


DEFAULT_WINDOW = 512
TIERS = (*DTYPES, *QUANTIZATIONS)


class Tiers(tuple[str, ...]):
    """Precisions in one flag, each a value of `--dtype` or `--quantize`: `float32,int8,gguf`."""

    METAVAR = "TIERS"

    def __new__(cls, text: str) -> "Tiers":
        """Raise ValueError with the reason for any other text."""
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if word not in (*TIERS, *BLOCK_FORMATS):
                raise ValueError(f"is not a list of {', '.join(TIERS)}: {word!r}{did_you_mean(word, TIERS)}")
            if words.count(word) > 1:
                raise ValueError(f"has {word} {words.count(word)} times")
        return super().__new__(cls, words)

    def __str__(self) -> str:
        return ",".join(self)


def _complete_tiers(incomplete: str) -> list[str]:
    """Lists that begin with `incomplete`, each longer by one precision at most."""
    begun, comma, word = incomplete.rpartition(",")
    return [begun + comma + tier for tier in TIERS if tier.startswith(word) and tier not in begun.split(",")]


def _as_served(name: str) -> Any:
    """A setting of a shard, without its variable."""
    return inherited(ModelServerSettings.__dataclass_fields__[name], env=None)


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings:
    """Measure how well a model predicts a text, in the precision in which it is served, and how far it is from another.

    The model is loaded as for serving, as one shard. Prints a table; every precision of --tiers has a row.
    """

    model_id: str
    text: str = setting(
        "",
        "UTF-8 text to predict, or a .jsonl file of texts: a string, or an object with `text`, a line; "
        "or a folder of *.txt and *.jsonl.",
        env=None,
    )
    against: str | None = setting(
        None, "Reference model, with the same tokenizer: adds the KL divergence from it.", env=None
    )
    against_dtype: str | None = setting(
        None,
        "Precision of the reference; float32 when neither this nor its --quantize is given.",
        choices=DTYPES,
        env=None,
    )
    against_quantize: str | None = setting(
        None,
        "--quantize of the reference.",
        choices=QUANTIZATIONS,
        unlisted=BLOCK_FORMATS,
        refused=REFUSED_VALUES["quantize"],
        translated=TRANSLATED_VALUES["quantize"],
        env=None,
    )
    tiers: Tiers | None = setting(
        None,
        "Precisions of MODEL, each a value of --dtype or --quantize, such as float32,int8,gguf. They are loaded one "
        "after the other and compared with --against, or with the first of them.",
        env=None,
        complete=_complete_tiers,
    )
    window: int | None = setting(
        None,
        f"Tokens that are predicted in one context; {DEFAULT_WINDOW}, or the model's context, when not given.",
        env=None,
        bounds=Bounds(above=1),
    )
    stride: int | None = setting(
        None,
        "Tokens between the starts of two windows; as --window when not given. Tokens that the window "
        "before has scored are context only.",
        env=None,
        bounds=POSITIVE,
    )
    max_text_tokens: int | None = setting(
        None,
        "Maximum tokens of the text; all when not given.",
        env=None,
        aliases=("--max-tokens",),
        bounds=Bounds(above=1),
    )
    json: bool = setting(False, "Print one JSON object instead of the table.", env=None)
    picture: str | None = setting(None, "SVG file to draw perplexity and KL divergence to.", env=None)
    revision: str | None = setting(None, "Hub revision.")
    cache_dir: str | None = setting(None, _CACHE_DIR, env="FUNITEL_CACHE")
    model_spec: str | None = _as_served("model_spec")
    trust_remote_code: bool = _as_served("trust_remote_code")
    device: str = setting("auto", "Where to compute.", choices=DEVICES)
    dtype: str | None = _as_served("dtype")
    quantize: str | None = _as_served("quantize")
    activation_dtype: str = _as_served("activation_dtype")
    kv_cache_dtype: str | None = _as_served("kv_cache_dtype")
    block_size: int = _as_served("block_size")
    num_threads: int | None = setting(
        None, "Compute threads; the cores this process may use when not given.", bounds=POSITIVE
    )
    json_output: bool = setting(False, "Log JSON lines.")
    logger_level: str = setting("WARNING", "Least severe log level: debug, info, warning, error.", env=None)

    def __post_init__(self) -> None:
        check_bounds(self)
        require(bool(self.text), "--text FILE is missing: give the text to predict")
        window = self.window or DEFAULT_WINDOW
        require(
            self.stride is None or self.stride <= window,
            f"--stride must be at most --window {window}, given {self.stride}: tokens between windows are not scored",
        )
        for name in ("against_dtype", "against_quantize"):
            given = getattr(self, name)
            require(given is None or self.against is not None, f"{flag_of(name)} {given} is for --against MODEL")
        for name in ("dtype", "quantize"):
            given = getattr(self, name)
            require(
                given is None or self.tiers is None,
                f"{flag_of(name)} {given} and --tiers {self.tiers} both say the precision: give one",
            )
        if self.picture is not None:
            folder = Path(self.picture).expanduser().absolute().parent
            require(self.picture.endswith(".svg"), f"--picture must end in .svg, given {self.picture}")
            require(folder.is_dir(), f"--picture {self.picture}: there is no folder {folder}")


ARGUMENTS: Mapping[type[Any], dict[str, str]] = {
    ModelServerSettings: {"model_id": "Model to serve."},
    DownloadSettings: {"model_id": "Model to fetch."},
    PerplexitySettings: {"model_id": "Model to measure."},
    QuantizeSettings: {"model_id": "Model to quantise.", "output_dir": "Folder to write, new or empty."},
    KernelSettings: {"model_id": "Model with the matrices to measure, as --model-id."},
    SpecSettings: {"action": "show or check.", "model_id": "Model to show the spec of, or to check the tensors of."},
    ModelsSettings: {"model_id": "Model to estimate, as --model-id."},
    CachedSettings: {},
    RemoveCachedSettings: {"name": "Name of the model, as `cached` lists it."},
    CheckSpecSettings: {"path": "JSON file with the spec."},
}
"""The positional arguments of each command, with their help."""
