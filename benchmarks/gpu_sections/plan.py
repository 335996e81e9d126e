"""What is measured: the shape of a model, and how much of everything. One plan for a GPU, one to rehearse it."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.model_spec import ModelSpec

BLOCK_SIZE = 16

LLAMA_8B: dict[str, Any] = {  # config.json of Llama-3.1-8B
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
SMALL = LLAMA_8B | {  # where the demo model is not at hand
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
TINY = LLAMA_8B | {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
QWEN3_30B_A3B: dict[str, Any] = {  # config.json of Qwen3-30B-A3B, with 12 layers of 48
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
TINY_MIXTURE = QWEN3_30B_A3B | {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


@dataclass(frozen=True)
class Plan:
    """How much is measured, of a model of which shape, and where."""

    config: dict[str, Any]
    device: torch.device
    dtype: torch.dtype
    small: dict[str, Any] = field(default_factory=lambda: SMALL)  # what the equality of tokens is shown with, at worst
    demo: str = "smollm2-135m-instruct"
    folder: Path = Path()  # of random checkpoints
    vllm_site: Path | None = None  # of vLLM's packages; None: they are where the others are

    matrix: int = 8192  # width of the product that is a ceiling
    copied: int = 1 << 32  # bytes of the copy that is a ceiling
    repeats: int = 20

    num_cases: int = 300  # of random steps for the kernels
    num_workers: int = 14  # processes that compile kernels for them

    batches: tuple[int, ...] = (1, 64, 256)
    context: int = 1024
    prompt: int = 8192
    profiled: tuple[int, ...] = (1, 64, 256)  # rows of the steps that are profiled

    streams: int = 256  # over HTTP
    answer: int = 384  # tokens of each
    peer_streams: int = 64  # beside transformers
    peer_answer: int = 256

    mixture: dict[str, Any] = field(default_factory=lambda: QWEN3_30B_A3B)
    mixture_rows: tuple[int, ...] = (1, 16, 64, 256)
    mixture_prompt: int = 4096

    adapter_rows: int = 64
    num_adapters: int = 8
    rank: int = 16  # of an adapter
    drafted_rows: tuple[int, ...] = (1, 8, 64)
    drafts: tuple[int, ...] = (1, 4)  # of each row

    num_prompts: int = 20  # with equal answers required
    num_tokens: int = 64

    pool_tokens: int | None = None  # None: as many as there is memory for
    pool_seconds: float = 120.0
    pool_context: int = 4096  # tokens of the rows that fill the pool
    text_tokens: int = 4096  # of the text for perplexity

    @property
    def is_gpu(self) -> bool:
        """Whether figures mean anything."""
        return self.device.type == "cuda"

    @property
    def dtype_name(self) -> str:
        """As `--dtype` has it."""
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def spec(self) -> ModelSpec:
        """What the shard makes of the configuration."""
        return spec_of(self.config)


FULL = Plan(LLAMA_8B, torch.device("cuda", 0), torch.bfloat16)
REHEARSAL = Plan(
    config=TINY,
    device=torch.device("cpu"),
    dtype=torch.float32,
    small=TINY,
    demo="",
    matrix=64,
    copied=1 << 16,
    repeats=2,
    num_cases=3,
    num_workers=2,
    batches=(1, 3),
    context=20,
    prompt=24,
    profiled=(1, 2),
    streams=3,
    answer=12,
    peer_streams=2,
    peer_answer=4,
    mixture=TINY_MIXTURE,
    mixture_rows=(1, 3),
    mixture_prompt=24,
    adapter_rows=3,
    num_adapters=2,
    rank=4,
    drafted_rows=(1, 2),
    drafts=(2,),
    num_prompts=2,
    num_tokens=5,
    pool_tokens=400,
    pool_seconds=1.0,
    pool_context=100,
    text_tokens=40,
)
