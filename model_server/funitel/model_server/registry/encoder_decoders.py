"""The table of encoder-decoders: Hugging Face architecture -> Seq2SeqSpec. A new family is a row here.

Source for every row: the field names of the family's `config.json` and the tensor names of its checkpoints.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from funitel.model_server.registry.rules.row import Config, activation, first, reading_config
from funitel.model_server.spec.encoder_decoder import CrossNames, DistanceBiasSpec, Seq2SeqSpec
from funitel.model_server.spec.json_file import check_types
from funitel.model_server.spec.model_spec import ModelSpec, Norm, NormPlacement, Position
from funitel.model_server.spec.tensor_names import TensorNames
from funitel.proto.errors import UnsupportedModel

# A stack that knows no positions but distances reads any number of tokens; this is TGI's bound where nothing says.
DISTANCE_CONTEXT = 4096
MAX_BUCKETS = 1 << 16


def _t5(config: Config) -> Seq2SeqSpec:
    """T5; its later versions gate the MLP and have a head of their own."""
    is_gated = config.get("feed_forward_proj", "relu").startswith("gated-")
    name = config.get("feed_forward_proj", "relu").removeprefix("gated-")
    is_tied = first("tie_word_embeddings", default=True)(config)
    scales = first("scale_decoder_outputs", default=is_tied)(config)
    common: dict[str, Any] = {
        "architecture": config["architectures"][0],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["d_model"],
        "num_heads": config["num_heads"],
        "num_kv_heads": config["num_heads"],
        "head_dim": config["d_kv"],
        "intermediate_size": config["d_ff"],
        "max_position_embeddings": max(config.get("n_positions") or 0, DISTANCE_CONTEXT),
        "norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "attention_scale": 1.0,
        "position": Position.NONE,
        # Of the versions that gate, "gelu" has always meant the approximation.
        "activation": activation(default="gelu_new" if is_gated and name == "gelu" else name)({}),
        "is_gated": is_gated,
        "is_tied": is_tied,
    }

    def names(stack: str, mlp: int) -> TensorNames:
        """Of the layers of a stack, the MLP being part `mlp` of each."""
        block, up = f"{stack}.block.{{i}}.layer", "wi_1" if is_gated else "wi"
        return TensorNames(
            prefix="",
            embedding="shared",
            attention_norm=f"{block}.0.layer_norm",
            q=f"{block}.0.SelfAttention.q",
            k=f"{block}.0.SelfAttention.k",
            v=f"{block}.0.SelfAttention.v",
            out=f"{block}.0.SelfAttention.o",
            mlp_norm=f"{block}.{mlp}.layer_norm",
            gate=f"{block}.{mlp}.DenseReluDense.wi_0",
            up=f"{block}.{mlp}.DenseReluDense.{up}",
            down=f"{block}.{mlp}.DenseReluDense.wo",
            final_norm=f"{stack}.final_layer_norm",
            # The first has never meant anything: scores of two stacks' tokens have no distance.
            ignored=(r"EncDecAttention\.relative_attention_bias\.weight$", r"\.embed_tokens\.weight$"),
        )

    cross = "decoder.block.{i}.layer.1"
    decoder_layers = config.get("num_decoder_layers")
    return Seq2SeqSpec(
        encoder=ModelSpec(**common, num_layers=config["num_layers"], names=names("encoder", 1)),
        decoder=ModelSpec(
            **common,
            num_layers=config["num_layers"] if decoder_layers is None else decoder_layers,
            logit_scale=config["d_model"] ** -0.5 if scales else 1.0,
            names=names("decoder", 2),
        ),
        cross=CrossNames(
            norm=f"{cross}.layer_norm",
            q=f"{cross}.EncDecAttention.q",
            k=f"{cross}.EncDecAttention.k",
            v=f"{cross}.EncDecAttention.v",
            out=f"{cross}.EncDecAttention.o",
        ),
        distance_bias=DistanceBiasSpec(
            num_buckets=config.get("relative_attention_num_buckets", 32),
            max_distance=config.get("relative_attention_max_distance", 128),
            encoder="encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            decoder="decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        ),
        outgrows_float16=True,
    )


def _mt5(config: Config) -> Seq2SeqSpec:
    """mT5: the later T5 without a scale of the logits, tied or not."""
    return _t5({"feed_forward_proj": "gated-gelu", **config, "scale_decoder_outputs": False})


def _bart(config: Config, **differences: Any) -> Seq2SeqSpec:
    """BART, and the common ground of those that call their settings as it does."""
    placement = differences.get("norm_placement", NormPlacement.AFTER)
    has_outer_norms = placement is NormPlacement.PRE
    has_embedding_norm = differences.pop("has_embedding_norm", True)

    def stack(name: str) -> ModelSpec:
        layer = f"{name}.layers.{{i}}"
        attention_norm, mlp_norm = f"{layer}.self_attn_layer_norm", f"{layer}.final_layer_norm"
        common: dict[str, Any] = {
            "architecture": config["architectures"][0],
            "vocab_size": config["vocab_size"],
            "hidden_size": config["d_model"],
            "num_layers": config[f"{name}_layers"],
            "num_heads": config[f"{name}_attention_heads"],
            "num_kv_heads": config[f"{name}_attention_heads"],
            "head_dim": config["d_model"] // config[f"{name}_attention_heads"],
            "intermediate_size": config[f"{name}_ffn_dim"],
            "max_position_embeddings": config["max_position_embeddings"],
            "norm": Norm.LAYER,
            "norm_eps": 1e-5,
            "has_norm_bias": True,
            "norm_placement": placement,
            "activation": activation("activation_function", default="gelu")(config),
            "is_gated": False,
            "position": Position.LEARNED,
            "position_offset": 2,
            "has_qkv_bias": True,
            "has_out_bias": True,
            "has_mlp_bias": True,
            "embedding_scale": config["d_model"] ** 0.5 if config.get("scale_embedding") else 1.0,
            "is_tied": first("tie_word_embeddings", default=True)(config),
        }
        names = TensorNames(
            prefix="model.",
            embedding="shared",
            embedding_norm=f"{name}.layernorm_embedding" if has_embedding_norm else "",
            positions=f"{name}.embed_positions",
            attention_norm=attention_norm if has_outer_norms else "",
            attention_post_norm="" if has_outer_norms else attention_norm,
            q=f"{layer}.self_attn.q_proj",
            k=f"{layer}.self_attn.k_proj",
            v=f"{layer}.self_attn.v_proj",
            out=f"{layer}.self_attn.out_proj",
            mlp_norm=mlp_norm if has_outer_norms else "",
            mlp_post_norm="" if has_outer_norms else mlp_norm,
            up=f"{layer}.fc1",
            down=f"{layer}.fc2",
            final_norm=f"{name}.layer_norm" if has_outer_norms else "",
            # Copies of the table, sinusoids, and the number of a version, as old checkpoints hold them.
            ignored=(r"\.embed_tokens\.weight$", r"\.embed_positions\.weights$", r"coder\.version$"),
        )
        return ModelSpec(**(common | differences), names=names)

    cross = "decoder.layers.{i}.encoder_attn"
    return Seq2SeqSpec(
        encoder=stack("encoder"),
        decoder=stack("decoder"),
        cross=CrossNames(
            norm=f"{cross}_layer_norm",
            q=f"{cross}.q_proj",
            k=f"{cross}.k_proj",
            v=f"{cross}.v_proj",
            out=f"{cross}.out_proj",
        ),
        logits_bias="final_logits_bias",
    )


def _mbart(config: Config) -> Seq2SeqSpec:
    return replace(_bart(config, norm_placement=NormPlacement.PRE), is_multilingual=True)


def _m2m_100(config: Config) -> Seq2SeqSpec:
    """M2M100 and NLLB."""
    spec = _bart(
        {"scale_embedding": True, "activation_function": "relu", **config},
        norm_placement=NormPlacement.PRE,
        position=Position.SINUSOIDAL,
        position_offset=first("pad_token_id", default=1)(config) + 1,
        has_embedding_norm=False,
    )
    return replace(spec, is_multilingual=True)


def _whisper(config: Config) -> Seq2SeqSpec:
    """Whisper: BART's decoder with outer norms and positions from 0. Features of a sound take the encoder's place."""
    spec = _bart(
        {
            "scale_embedding": False,
            **config,
            "max_position_embeddings": config["max_target_positions"],
        },
        norm_placement=NormPlacement.PRE,
        position_offset=0,
        has_embedding_norm=False,
    )
    decoder = spec.decoder.names
    # What hears is read elsewhere, by its own module.
    ignored = (*decoder.ignored, r"(^|\.)encoder\.")
    names = replace(decoder, embedding="decoder.embed_tokens", head="proj_out", ignored=ignored)
    return replace(
        spec,
        encoder=replace(spec.encoder, max_position_embeddings=config["max_source_positions"]),
        decoder=replace(spec.decoder, names=names),
        logits_bias="",
        num_mel_bins=config["num_mel_bins"],
        has_key_bias=False,
    )


# A checkpoint of both stacks without a head, `...Model`, has the embedding table for one.
SEQ2SEQ: dict[str, Callable[[Config], Seq2SeqSpec]] = {
    "BartForConditionalGeneration": _bart,
    "BartModel": _bart,
    "M2M100ForConditionalGeneration": _m2m_100,
    "M2M100Model": _m2m_100,
    "MBartForConditionalGeneration": _mbart,
    "MBartModel": _mbart,
    "MT5ForConditionalGeneration": _mt5,
    "MT5Model": _mt5,
    "T5ForConditionalGeneration": _t5,
    "T5Model": _t5,
    "T5WithLMHeadModel": _t5,
    "WhisperForConditionalGeneration": _whisper,
}


def is_seq2seq(config: Config) -> bool:
    """Whether a checkpoint's `config.json` names an encoder-decoder of the table."""
    return any(name in SEQ2SEQ for name in config.get("architectures") or [])


def seq2seq_spec_of(config: Config) -> Seq2SeqSpec:
    """Derive the spec of an encoder-decoder from its `config.json`; `is_seq2seq` must be true.

    Raises:
        UnsupportedModel: a field is missing, of the wrong kind, or asks for what no code here does.
    """
    architecture = next(name for name in config["architectures"] if name in SEQ2SEQ)
    with reading_config(architecture):
        try:
            spec = SEQ2SEQ[architecture]({**config, "architectures": [architecture]})
            _check(spec)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"config.json of {architecture}: {error.message}") from error
    return spec


def _check(spec: Seq2SeqSpec) -> None:
    for name, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        try:
            check_types(stack)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{name}: {error.message}") from error
        if stack.num_heads * stack.head_dim != stack.hidden_size and spec.distance_bias is None:
            raise UnsupportedModel(
                f"{name}: hidden size {stack.hidden_size} does not divide into {stack.num_heads} heads"
            )
    bias = spec.distance_bias
    if bias is not None and not 4 <= bias.num_buckets <= MAX_BUCKETS:
        raise UnsupportedModel(
            f"relative_attention_num_buckets must be within 4..{MAX_BUCKETS}, given {bias.num_buckets}"
        )
    if bias is not None and not bias.num_buckets // 2 < bias.max_distance <= MAX_BUCKETS:
        raise UnsupportedModel(
            f"relative_attention_max_distance must be within {bias.num_buckets // 2 + 1}..{MAX_BUCKETS}, "
            f"given {bias.max_distance}"
        )
