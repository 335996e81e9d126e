"""The choice of experts by the logits of a router as one Triton kernel; torch launches one for each operation.

Scores are float32. Of experts with equal scores the one with the lower number is chosen first.
"""

import torch
import triton
import triton.language as tl

from funitel.model_server.device.dependent_kernels import dependent, wait_for_previous
from funitel.model_server.device.probe_or_fall_back import check_probe
from funitel.model_server.device.torch_import import seeded_generator
from funitel.model_server.layers.mlp import MIN_SUM, Router
from funitel.model_server.spec.model_spec import ExpertScore

_MAX_CHOSEN = 32  # each is a turn of an unrolled loop
_EXPERTS_PER_WARP = 256
_PROBED_ROWS = 33


@triton.jit
def choose_experts(
    logits,
    correction,
    expert_scale,
    chosen,
    shares,
    scale,
    min_sum,
    NUM_EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    PADDED_CHOSEN: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """The experts of one token and their shares."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, PADDED_EXPERTS)
    is_in = experts < NUM_EXPERTS
    if HAS_CORRECTION:
        added = tl.load(correction + experts, mask=is_in, other=0.0)
    wait_for_previous(IS_DEPENDENT)
    row = tl.load(logits + token * NUM_EXPERTS + experts, mask=is_in, other=-float("inf"))
    if IS_SOFTMAX:
        scores = tl.exp(row - tl.max(row, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-row))
    ranked = scores
    if HAS_CORRECTION:
        ranked += added
    ranked = tl.where(is_in, ranked, -float("inf"))
    places = tl.arange(0, PADDED_CHOSEN)
    numbers = tl.zeros([PADDED_CHOSEN], tl.int32)
    found = tl.zeros([PADDED_CHOSEN], tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        best = tl.minimum(tl.argmax(ranked, 0), NUM_EXPERTS - 1)  # of numbers that are none any place may be best
        is_best = experts == best
        found = tl.where(places == i, tl.sum(tl.where(is_best, scores, 0.0), 0), found)
        numbers = tl.where(places == i, best, numbers)
        ranked = tl.where(is_best, -float("inf"), ranked)
    if IS_NORMALIZED:
        found = found / (tl.sum(found, 0) + min_sum)
    if HAS_EXPERT_SCALE:
        found = found * tl.load(expert_scale + numbers)
    is_place = places < NUM_CHOSEN
    tl.store(chosen + token * NUM_CHOSEN + places, numbers.to(tl.int64), mask=is_place)
    tl.store(shares + token * NUM_CHOSEN + places, found * scale, mask=is_place)


class TritonChoice:
    """See `Router.choose`; for routers without groups that score all experts at once."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        router, spec, logits = self._router, self._router.spec, logits.contiguous()
        num_tokens, num_experts = logits.shape
        chosen = torch.empty((num_tokens, spec.num_chosen), dtype=torch.int64, device=logits.device)
        shares = torch.empty((num_tokens, spec.num_chosen), dtype=torch.float32, device=logits.device)
        if not num_tokens:
            return chosen, shares
        padded = triton.next_power_of_2(num_experts)
        choose_experts[(num_tokens,)](
            logits,
            logits if router.correction is None else router.correction,
            logits if router.expert_scale is None else router.expert_scale,
            chosen,
            shares,
            float(spec.scale),
            MIN_SUM,
            NUM_EXPERTS=num_experts,
            PADDED_EXPERTS=padded,
            NUM_CHOSEN=spec.num_chosen,
            PADDED_CHOSEN=triton.next_power_of_2(spec.num_chosen),
            IS_SOFTMAX=spec.score is ExpertScore.SOFTMAX,
            IS_NORMALIZED=spec.is_normalized,
            HAS_CORRECTION=router.correction is not None,
            HAS_EXPERT_SCALE=router.expert_scale is not None,
            num_warps=max(1, padded // _EXPERTS_PER_WARP),
            **dependent(),
        )
        return chosen, shares


def choice_of(router: Router) -> TritonChoice | None:
    """The kernel for a router; None where it has none."""
    spec = router.spec
    is_simple = spec.num_groups == 1 and spec.score in (ExpertScore.SOFTMAX, ExpertScore.SIGMOID)
    return TritonChoice(router) if is_simple and spec.num_chosen <= _MAX_CHOSEN else None


def check_choice(router: Router, device: torch.device) -> None:
    """Raise ValueError unless the kernel, if a router has one, gives the shares of the reference."""
    choice, num_experts = choice_of(router), router.spec.num_experts
    if choice is None:
        return
    logits = torch.randn((_PROBED_ROWS, num_experts), device=device, generator=seeded_generator(0, device))
    found, expected = (
        torch.zeros_like(logits).scatter(1, chosen, shares)
        for chosen, shares in (choice(logits), router.choose(logits))
    )
    check_probe(found, expected)
