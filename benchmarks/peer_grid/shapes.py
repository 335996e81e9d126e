"""Shapes of the models that are compared, and the type of each tensor in each format. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Type = GGMLQuantizationType

K_BLOCK = 256  # inputs of a block of a K-quant
FORMATS = ("q4_k_m", "q4_0", "q8_0", "bf16")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder; `num_experts` is 0 for a dense one. The architecture is Llama's, or Qwen3's with experts."""

    name: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    num_experts: int = 0
    experts_per_token: int = 0
    rope_theta: float = 500_000.0

    @property
    def architecture(self) -> str:
        """Its name in a GGUF."""
        return "qwen3moe" if self.num_experts else "llama"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A weight: its names in a GGUF and in a Hugging Face checkpoint, its sizes (inputs last), and its layer."""

    gguf_name: str
    hf_name: str
    sizes: tuple[int, ...]
    layer: int = 0

    @property
    def is_matrix(self) -> bool:
        """Whether it is quantised: norms and the router of experts are not."""
        return len(self.sizes) > 1 and "ffn_gate_inp" not in self.gguf_name

    @property
    def is_vocabulary(self) -> bool:
        """Whether it has a row for each token."""
        return self.gguf_name in ("token_embd.weight", "output.weight")

    @property
    def num_elements(self) -> int:
        """Product of the sizes."""
        count = 1
        for size in self.sizes:
            count *= size
        return count


DEMO_SHAPE = Shape("demo", 576, 1536, 30, 9, 3, 64, 49_152, is_tied=True, rope_theta=100_000.0)
"""SmolLM2-135M-Instruct; its weights are its own."""

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            Shape("0.5b", 896, 4864, 24, 14, 2, 64, 151_936, is_tied=True),  # Qwen2.5-0.5B, without its biases
            Shape("1b", 2048, 8192, 16, 32, 8, 64, 128_256, is_tied=True),  # Llama-3.2-1B
            Shape("3b", 3072, 8192, 28, 24, 8, 128, 128_256, is_tied=True),  # Llama-3.2-3B
            Shape("8b", 4096, 14_336, 32, 32, 8, 128, 128_256, is_tied=False),  # Llama-3.1-8B
            # Qwen3-30B-A3B with 14 of its 48 layers: 9.3 billion parameters, a tenth of which a token uses.
            Shape("moe", 2048, 768, 14, 32, 4, 128, 151_936, False, num_experts=128, experts_per_token=8),
        )
    }
)


def tensors_of(shape: Shape) -> Iterator[Tensor]:
    """Every weight of a model, in the order of its file."""
    yield Tensor("token_embd.weight", "model.embed_tokens.weight", (shape.vocab, shape.hidden))
    for layer in range(shape.num_layers):
        yield from _layer(shape, layer)
    yield Tensor("output_norm.weight", "model.norm.weight", (shape.hidden,))
    if not shape.is_tied:
        yield Tensor("output.weight", "lm_head.weight", (shape.vocab, shape.hidden))


def _layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = [
        ("attn_norm", "input_layernorm", (shape.hidden,)),
        ("attn_q", "self_attn.q_proj", (queries, shape.hidden)),
        ("attn_k", "self_attn.k_proj", (keys, shape.hidden)),
        ("attn_v", "self_attn.v_proj", (keys, shape.hidden)),
        ("attn_output", "self_attn.o_proj", (shape.hidden, queries)),
        ("ffn_norm", "post_attention_layernorm", (shape.hidden,)),
    ]
    if shape.num_experts:
        stack, inner = shape.num_experts, shape.intermediate
        rows += [
            ("attn_q_norm", "self_attn.q_norm", (shape.head_dim,)),
            ("attn_k_norm", "self_attn.k_norm", (shape.head_dim,)),
            ("ffn_gate_inp", "mlp.gate", (stack, shape.hidden)),
            ("ffn_gate_exps", "", (stack, inner, shape.hidden)),
            ("ffn_up_exps", "", (stack, inner, shape.hidden)),
            ("ffn_down_exps", "", (stack, shape.hidden, inner)),
        ]
    else:
        rows += [
            ("ffn_gate", "mlp.gate_proj", (shape.intermediate, shape.hidden)),
            ("ffn_up", "mlp.up_proj", (shape.intermediate, shape.hidden)),
            ("ffn_down", "mlp.down_proj", (shape.hidden, shape.intermediate)),
        ]
    for gguf_name, hf_name, sizes in rows:
        yield Tensor(f"blk.{layer}.{gguf_name}.weight", f"model.layers.{layer}.{hf_name}.weight", sizes, layer)


def type_of(tensor: Tensor, shape: Shape, form: str) -> GGMLQuantizationType:
    """The type that llama.cpp's quantiser gives a tensor in a format.

    Source: `llama_tensor_get_type_impl` and `tensor_type_fallback` of llama.cpp's `src/llama-quant.cpp`.
    """
    if not tensor.is_matrix:
        return Type.F32
    if form in ("q8_0", "bf16"):
        return Type.Q8_0 if form == "q8_0" else Type.BF16
    if tensor.gguf_name == ("token_embd.weight" if shape.is_tied else "output.weight"):
        chosen = Type.Q6_K
    elif form == "q4_k_m":
        is_finer = "attn_v" in tensor.gguf_name or "ffn_down" in tensor.gguf_name
        chosen = Type.Q6_K if is_finer and _has_more_bits(tensor.layer, shape.num_layers) else Type.Q4_K
    else:
        chosen = Type.Q4_0
    if tensor.sizes[-1] % GGML_QUANT_SIZES[chosen][0]:
        return {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}[chosen]
    return chosen


def _has_more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def num_bytes(shape: Shape, form: str) -> int:
    """Bytes of the weights of a model in a format."""
    total = 0
    for tensor in tensors_of(shape):
        block, block_bytes = GGML_QUANT_SIZES[type_of(tensor, shape, form)]
        total += tensor.num_elements // block * block_bytes
    return total


def num_active(shape: Shape) -> int:
    """Weights that the step of one token multiplies by: without embeddings, and with the experts that it uses only."""
    total = 0
    for tensor in tensors_of(shape):
        if not tensor.is_matrix or tensor.gguf_name == "token_embd.weight" and not shape.is_tied:
            continue
        is_stack = tensor.gguf_name.endswith("_exps.weight")
        total += tensor.num_elements * shape.experts_per_token // shape.num_experts if is_stack else tensor.num_elements
    return total
