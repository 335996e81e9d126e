"""The table of encoders: Hugging Face architecture -> EncoderSpec. A new family is a row here.

Source for every mapping: the field names of the family's `config.json`.
"""

from collections.abc import Callable
from typing import Any

from funitel.model_server.registry.rules.row import Config, reading_config
from funitel.model_server.spec.encoder import EncoderNames, EncoderSpec, HeadNames
from funitel.proto.errors import UnsupportedModel

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_KINDS = ("Model", "ForSequenceClassification", "ForMaskedLM")

_LM_HEAD = HeadNames(
    dense="lm_head.dense", norm="lm_head.layer_norm", output="lm_head.decoder", output_bias="lm_head.bias"
)
_CLASSIFICATION_HEAD = HeadNames(dense="classifier.dense", output="classifier.out_proj")


def _labels(config: Config) -> tuple[str, ...]:
    named = config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}
    return tuple(str(named[key]) for key in sorted(named, key=int))


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported; known: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _bert(config: Config, **differences: Any) -> EncoderSpec:
    """BERT, and the common ground of those that call their settings as it does."""
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedModel(f"position_embedding_type {config['position_embedding_type']!r} is not supported")
    if config.get("is_decoder"):
        raise UnsupportedModel("an encoder with is_decoder true is not supported")
    activation = _activation(config.get("hidden_act", "gelu"))
    common: dict[str, Any] = {
        "architecture": config["architectures"][0],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "intermediate_size": config["intermediate_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "num_types": config.get("type_vocab_size", 2),
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "activation": activation,
        "classifier": HeadNames(dense="pooler.dense", output="classifier", has_base_dense=True),
        "classifier_activation": "tanh",
        "filler": HeadNames(
            dense="cls.predictions.transform.dense",
            norm="cls.predictions.transform.LayerNorm",
            output="cls.predictions.decoder",
            output_bias="cls.predictions.bias",
        ),
        "filler_activation": activation,
        "names": EncoderNames(prefix="bert."),
        "labels": _labels(config),
        "is_multi_label": config.get("problem_type") == "multi_label_classification",
    }
    return EncoderSpec(**(common | differences))


def _roberta(config: Config, **differences: Any) -> EncoderSpec:
    """RoBERTa, CamemBERT, XLM-RoBERTa: positions begin behind the padding's."""
    common: dict[str, Any] = {
        "num_types": config.get("type_vocab_size", 1),
        "norm_eps": config.get("layer_norm_eps", 1e-5),
        "padding_id": _padding(config, 1),
        "classifier": _CLASSIFICATION_HEAD,
        "filler": _LM_HEAD,
        "filler_activation": "gelu",
        "names": EncoderNames(prefix="roberta."),
    }
    return _bert(config, **(common | differences))


def _padding(config: Config, usual: int) -> int:
    found = config.get("pad_token_id", usual)
    return usual if found is None else int(found)


def _mpnet(config: Config) -> EncoderSpec:
    return _roberta(
        config,
        num_types=0,
        num_buckets=config.get("relative_attention_num_buckets", 32),
        names=EncoderNames(
            prefix="mpnet.",
            q="encoder.layer.{i}.attention.attn.q",
            k="encoder.layer.{i}.attention.attn.k",
            v="encoder.layer.{i}.attention.attn.v",
            out="encoder.layer.{i}.attention.attn.o",
            attention_norm="encoder.layer.{i}.attention.LayerNorm",
        ),
    )


def _distilbert(config: Config) -> EncoderSpec:
    activation = _activation(config.get("activation", "gelu"))
    return _bert(
        {
            "architectures": config["architectures"],
            "vocab_size": config["vocab_size"],
            "hidden_size": config["dim"],
            "num_hidden_layers": config["n_layers"],
            "num_attention_heads": config["n_heads"],
            "intermediate_size": config["hidden_dim"],
            "max_position_embeddings": config["max_position_embeddings"],
            "type_vocab_size": 0,
            "problem_type": config.get("problem_type"),
            "id2label": config.get("id2label"),
        },
        activation=activation,
        classifier=HeadNames(dense="pre_classifier", output="classifier"),
        classifier_activation="relu",
        filler=HeadNames(dense="vocab_transform", norm="vocab_layer_norm", output="vocab_projector"),
        filler_activation=activation,
        names=EncoderNames(
            prefix="distilbert.",
            q="transformer.layer.{i}.attention.q_lin",
            k="transformer.layer.{i}.attention.k_lin",
            v="transformer.layer.{i}.attention.v_lin",
            out="transformer.layer.{i}.attention.out_lin",
            attention_norm="transformer.layer.{i}.sa_layer_norm",
            up="transformer.layer.{i}.ffn.lin1",
            down="transformer.layer.{i}.ffn.lin2",
            mlp_norm="transformer.layer.{i}.output_layer_norm",
        ),
    )


_STEMS: dict[str, Callable[[Config], EncoderSpec]] = {
    "Bert": _bert,
    "Camembert": _roberta,
    "DistilBert": _distilbert,
    "MPNet": _mpnet,
    "Roberta": _roberta,
    "XLMRoberta": _roberta,
}

ENCODERS: dict[str, Callable[[Config], EncoderSpec]] = {
    stem + kind: family for stem, family in _STEMS.items() for kind in _KINDS
}


def is_encoder(config: Config) -> bool:
    """Whether a checkpoint's `config.json` names an encoder of the table."""
    return any(name in ENCODERS for name in config.get("architectures") or [])


_SIZES = ("vocab_size", "hidden_size", "num_heads", "num_layers", "intermediate_size", "max_position_embeddings")


def encoder_spec_of(config: Config) -> EncoderSpec:
    """Derive the spec of an encoder from its `config.json`; `is_encoder` must be true.

    Raises:
        UnsupportedModel: a field is missing, of the wrong kind, or asks for what no code here does.
    """
    architecture = next(name for name in config["architectures"] if name in ENCODERS)
    with reading_config(architecture):
        spec = ENCODERS[architecture]({**config, "architectures": [architecture]})
    for name in _SIZES:
        size = getattr(spec, name)
        if not isinstance(size, int) or size < 1:
            raise UnsupportedModel(f"config.json of {architecture}: {name} must be an integer > 0, given {size!r}")
    if spec.max_tokens < 1:
        positions = f"max_position_embeddings {spec.max_position_embeddings}"
        raise UnsupportedModel(f"config.json of {architecture}: {positions} has no room for a token")
    if spec.hidden_size % spec.num_heads:
        raise UnsupportedModel(
            f"config.json of {architecture}: hidden size {spec.hidden_size} does not divide into {spec.num_heads} heads"
        )
    return spec
