"""Describe an encoder as data: its sizes, its positions and the names of its tensors. No torch here."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNames:
    """A dense layer, perhaps a norm, and the layer that scores; names are those of the checkpoint.

    `has_base_dense` says that the dense layer belongs to the encoder, behind its prefix.
    """

    dense: str
    output: str
    norm: str | None = None
    output_bias: str | None = None  # of a scoring layer that shares the token embedding's weights, where it has a bias
    has_base_dense: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """What a family calls its tensors, behind `prefix`; {i} is the layer."""

    prefix: str
    embedding_norm: str = "embeddings.LayerNorm"
    q: str = "encoder.layer.{i}.attention.self.query"
    k: str = "encoder.layer.{i}.attention.self.key"
    v: str = "encoder.layer.{i}.attention.self.value"
    out: str = "encoder.layer.{i}.attention.output.dense"
    attention_norm: str = "encoder.layer.{i}.attention.output.LayerNorm"
    up: str = "encoder.layer.{i}.intermediate.dense"
    down: str = "encoder.layer.{i}.output.dense"
    mlp_norm: str = "encoder.layer.{i}.output.LayerNorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """One encoder. Every layer is attention, add, norm, dense, activation, dense, add, norm."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_position_embeddings: int
    num_types: int  # of tokens: first and second text; 0 where the family tells them apart by separators only
    norm_eps: float
    activation: str  # of the dense layers between attentions: "gelu", "gelu_tanh", "relu"
    padding_id: int | None = None  # where positions count behind it, and tokens of this id have none of their own
    num_buckets: int = 0  # of relative distances, each with a bias of attention scores; 0 for none
    classifier: HeadNames
    classifier_activation: str
    filler: HeadNames
    filler_activation: str
    names: EncoderNames
    labels: tuple[str, ...] = field(default=())
    is_multi_label: bool = False

    @property
    def max_tokens(self) -> int:
        """Most tokens of a text, special ones included."""
        return self.max_position_embeddings - (0 if self.padding_id is None else self.padding_id + 1)

    @property
    def is_classifier(self) -> bool:
        """Whether the checkpoint is one for classes or ranks."""
        return self.architecture.endswith("ForSequenceClassification")

    @property
    def is_filler(self) -> bool:
        """Whether the checkpoint may say what stands behind a mask."""
        return self.architecture.endswith("ForMaskedLM")
