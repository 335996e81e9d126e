"""What must hold in the parts of a ModelSpec that only some models have: latent attention and mixtures of experts."""

from collections.abc import Iterator

from funitel.model_server.spec import ExpertsSpec, LatentSpec, ModelSpec, Position, QkNorm

MOST_EXPERTS = 1 << 18  # of all layers
MOST_SIZE = 1 << 22  # elements of a latent or a head's values, hidden units of an expert


def latent_problems(spec: ModelSpec, latent: LatentSpec) -> Iterator[str]:
    """What is wrong with latent attention, each as field, value and limit."""
    sizes = {"rank": latent.rank, "value_dim": latent.value_dim, "query_rank": latent.query_rank}
    for name, size in sizes.items():
        if size is not None and not 1 <= size <= MOST_SIZE:
            yield f"latent.{name} must be within 1..{MOST_SIZE}, given {size}"
    if latent.norm_eps < 0:
        yield f"latent.norm_eps must be >= 0, given {latent.norm_eps}"
    if spec.num_kv_heads != 1:
        yield f"latent needs num_kv_heads 1, given {spec.num_kv_heads}"
    if spec.position is not Position.ROTARY:
        yield f"latent needs position rotary, given {spec.position}"
    if spec.rotary.dims is None or spec.rotary.dims >= spec.head_dim:
        yield f"latent needs rotary.dims below head_dim {spec.head_dim}, given {spec.rotary.dims}"
    if spec.window_rotary is not None:
        yield "latent needs window_rotary null"
    if spec.qk_norm is not QkNorm.NONE:
        yield f"latent needs qk_norm none, given {spec.qk_norm}"
    if spec.qkv_clip is not None:
        yield f"latent needs qkv_clip null, given {spec.qkv_clip}"


def experts_problems(spec: ModelSpec, experts: ExpertsSpec) -> Iterator[str]:
    """What is wrong with a mixture of experts, each as field, value and limit."""
    sizes = {"intermediate_size": (1, experts.intermediate_size), "shared_size": (0, experts.shared_size)}
    for name, (least, size) in sizes.items():
        if not least <= size <= MOST_SIZE:
            yield f"experts.{name} must be within {least}..{MOST_SIZE}, given {size}"
    most = MOST_EXPERTS // max(spec.num_layers, 1)
    if not 1 <= experts.num_experts <= most:
        yield f"experts.num_experts must be within 1..{most} for {spec.num_layers} layers, given {experts.num_experts}"
    if not 1 <= experts.num_chosen <= experts.num_experts:
        yield f"experts.num_chosen must be within 1..{experts.num_experts} (num_experts), given {experts.num_chosen}"
    if experts.scale <= 0:
        yield f"experts.scale must be > 0, given {experts.scale}"
    outside = next((i for i in experts.dense_layers if not 0 <= i < spec.num_layers), None)
    if outside is not None:
        yield f"experts.dense_layers must be within 0..{spec.num_layers - 1}, given {outside}"
    for name in ("expert_gate", "expert_up", "expert_gate_up", "expert_down"):
        value = getattr(spec.names, name)
        if value and not all("{j}" in each for each in value.split("|")):
            yield f"names.{name} must hold {{j}}, given {value!r}"
    yield from _group_problems(experts)


def _group_problems(experts: ExpertsSpec) -> Iterator[str]:
    num_groups, num_chosen = experts.num_groups, experts.num_chosen_groups
    if num_groups < 1 or experts.num_experts % num_groups:
        yield f"experts.num_groups must divide {experts.num_experts} experts, given {num_groups}"
        return
    size = experts.num_experts // num_groups
    if not 1 <= num_chosen <= num_groups:
        yield f"experts.num_chosen_groups must be within 1..{num_groups} (num_groups), given {num_chosen}"
    if num_groups > 1 and not 1 <= experts.group_depth <= size:
        yield f"experts.group_depth must be within 1..{size} (experts of a group), given {experts.group_depth}"
    if num_groups > 1 and num_chosen * size < experts.num_chosen:
        most = num_chosen * size
        yield f"experts.num_chosen must be at most the {most} of the chosen groups, given {experts.num_chosen}"
