"""Describe an encoder-decoder as data: two stacks as ModelSpecs, the names of cross-attention, biases for distance.

No torch here.
"""

from dataclasses import dataclass, replace

from funitel.model_server.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossNames:
    """What a family calls the tensors with which the decoder looks at the encoder's output; {i} is the layer."""

    norm: str
    q: str
    k: str
    v: str
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceBiasSpec:
    """What is added to scores of self-attention for how far apart two tokens are: one number a head and bucket.

    Shared by the layers of a stack. Distances from `max_distance` tokens on share the last bucket.
    """

    num_buckets: int
    max_distance: int
    encoder: str  # name of its tensor in the encoder
    decoder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqSpec:
    """Both stacks read one embedding table. `max_position_embeddings` of a stack is how many tokens it can read.

    Where the encoder `hears`, its tokens are the features of a sound, and its spec says how many there are.
    """

    encoder: ModelSpec
    decoder: ModelSpec
    cross: CrossNames
    distance_bias: DistanceBiasSpec | None = None
    logits_bias: str = ""  # [1, vocab_size], added to logits where the checkpoint holds it
    outgrows_float16: bool = False  # sums of layers do: in float16 they, and the last products of MLPs, are float32
    is_multilingual: bool = False  # the first token of a completion says its language
    num_mel_bins: int = 0  # of the spectrograms of sounds that the encoder reads; 0: it reads tokens
    has_key_bias: bool = True  # where queries and values have one

    @property
    def hears(self) -> bool:
        """Whether the encoder reads sounds: the decoder looks at features of media."""
        return self.num_mel_bins > 0

    @property
    def architecture(self) -> str:
        """The name of the class in transformers."""
        return self.decoder.architecture

    @property
    def whole(self) -> ModelSpec:
        """The decoder as the executor knows it: its sequences begin with the tokens that the encoder reads.

        The pool has the same place for the decoder's view of one of those tokens as for a token of the decoder.
        """
        context = self.encoder.max_position_embeddings + self.decoder.max_position_embeddings
        return replace(self.decoder, max_position_embeddings=context)
