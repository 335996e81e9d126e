"""Memory is known before it is taken: weights by the spec alone."""

from pathlib import Path

import pytest

from funitel.model_server.checkpoint import read_json
from funitel.model_server.cpu.footprint import weight_bytes
from funitel.model_server.cpu.tiers import Tier
from funitel.model_server.families import spec_of
from funitel.model_server.parallel import TensorParallel
from funitel_testing.forward_worker import fused_decoder
from funitel_testing.tiny import FAMILIES, save_tiny


@pytest.mark.parametrize("tier", [Tier.INT8, Tier.FLOAT16, Tier.FLOAT32], ids=lambda tier: tier.label)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_take_what_was_predicted_on_every_rank(family: str, tier: Tier, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path)
    spec = spec_of(read_json(folder / "config.json"))
    for rank, size in ((0, 1), (0, 3), (2, 3), (3, 4)):
        parallel = TensorParallel(rank, size)
        assert (
            weight_bytes(spec, parallel, tier, lambda layer, columns: None)
            == fused_decoder(folder, tier, parallel).program.held_bytes
        )
