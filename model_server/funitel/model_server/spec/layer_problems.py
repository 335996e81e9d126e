"""What no model can be of the parts in `layer_spec`, each as field, value and limit."""

from collections.abc import Iterator, Mapping

from funitel.model_server.spec.layer_spec import LayerSpec
from funitel.model_server.spec.model_spec import IndexerSpec, ModelSpec

MAX_STREAMS = 64


def problems_of_layers(spec: ModelSpec, most: Mapping[str, int]) -> Iterator[str]:
    """What is wrong; `most` is the largest value of each size."""
    if spec.layers and len(spec.layers) != spec.num_layers:
        yield f"layers must have an entry for each of {spec.num_layers} layers, given {len(spec.layers)}"
        return
    if any(each != LayerSpec() for each in spec.layers) and spec.latent is not None:
        yield "layers must be empty with latent"
    for index, own in enumerate(spec.layers):
        yield from (f"layers[{index}].{problem}" for problem in _problems_of(spec, own, index, most))
    yield from _embedding_problems(spec, most)
    if spec.indexer is not None:
        yield from _indexer_problems(spec, spec.indexer, most)
    if spec.laurel_rank is not None and not 1 <= spec.laurel_rank <= most["hidden_size"]:
        yield f"laurel_rank must be within 1..{most['hidden_size']}, given {spec.laurel_rank}"
    if spec.is_parallel and spec.laurel_rank is not None:
        yield f"laurel_rank needs is_parallel false, given {spec.laurel_rank}"
    altup = spec.altup
    if altup is not None and not 2 <= altup.num_streams <= MAX_STREAMS:
        yield f"altup.num_streams must be within 2..{MAX_STREAMS}, given {altup.num_streams}"
    if altup is not None and not 0 <= altup.active < altup.num_streams:
        yield f"altup.active must be within 0..{altup.num_streams - 1}, given {altup.active}"


def _problems_of(spec: ModelSpec, own: LayerSpec, index: int, most: Mapping[str, int]) -> Iterator[str]:
    for name in ("head_dim", "num_kv_heads", "intermediate_size"):
        size = getattr(own, name)
        if size is not None and not 1 <= size <= most[name]:
            yield f"{name} must be within 1..{most[name]}, given {size}"
    if own.num_kv_heads and spec.num_heads % own.num_kv_heads:
        yield f"num_kv_heads must divide {spec.num_heads} query heads, given {own.num_kv_heads}"
    if not 0 <= own.gate_sparsity < 1:
        yield f"gate_sparsity must be at least 0 and below 1, given {own.gate_sparsity}"
    if own.gate_sparsity and not spec.is_gated:
        yield f"gate_sparsity needs is_gated true, given {own.gate_sparsity}"
    if (own.has_key_values or own.kv_source is not None) and spec.names.qkv:
        yield "has_key_values and kv_source need names.qkv empty"
    if own.kv_source is None:
        return
    if not 0 <= own.kv_source < index:
        yield f"kv_source must be a layer before it, given {own.kv_source}"
        return
    source = spec.layer(own.kv_source)
    if source.kv_source is not None:
        yield f"kv_source must be a layer with keys and values of its own, given {own.kv_source}"
    for name in ("head_dim", "num_kv_heads"):
        mine, theirs = (getattr(spec.at(each), name) for each in (index, own.kv_source))
        if mine != theirs:
            yield f"{name} must be the {theirs} of layer {own.kv_source}, which it has keys and values of, given {mine}"


def _embedding_problems(spec: ModelSpec, most: Mapping[str, int]) -> Iterator[str]:
    if spec.layer_embeddings is None:
        return
    sizes = {"size": most["hidden_size"], "vocab_size": most["vocab_size"]}
    for name, limit in sizes.items():
        size = getattr(spec.layer_embeddings, name)
        if not 1 <= size <= limit:
            yield f"layer_embeddings.{name} must be within 1..{limit}, given {size}"
    token, num_tokens = spec.layer_embeddings.media_token, spec.layer_embeddings.vocab_size
    if not 0 <= token < num_tokens:
        yield f"layer_embeddings.media_token must be within 0..{num_tokens - 1}, given {token}"


def _indexer_problems(spec: ModelSpec, indexer: IndexerSpec, most: Mapping[str, int]) -> Iterator[str]:
    if spec.latent is None or spec.latent.query_rank is None:
        yield "indexer needs latent with a query_rank"
    for name, limit in (("num_heads", most["num_heads"]), ("num_chosen", most["max_position_embeddings"])):
        if not 1 <= getattr(indexer, name) <= limit:
            yield f"indexer.{name} must be within 1..{limit}, given {getattr(indexer, name)}"
    least = spec.rotary.dims or 1
    if not least <= indexer.head_dim <= most["head_dim"]:
        yield f"indexer.head_dim must be within {least}..{most['head_dim']}, given {indexer.head_dim}"
    if spec.unrotated_layers:
        yield f"indexer needs unrotated_layers empty, given layer {spec.unrotated_layers[0]}"
    outside = next((i for i in indexer.sharing_layers if not 0 < i < spec.num_layers), None)
    if outside is not None:
        yield f"indexer.sharing_layers must be within 1..{spec.num_layers - 1}, given {outside}"
    if indexer.norm_eps < 0:
        yield f"indexer.norm_eps must be >= 0, given {indexer.norm_eps}"
