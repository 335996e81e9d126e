"""A quantised model from end to end: written by the command's own function, found out, checked and served."""

from pathlib import Path
from typing import Any

import pytest

from funitel.model_server.settings import QuantizeSettings
from funitel.model_server.tools.quantize.command import quantize
from funitel_testing.clients import client_of, generate
from funitel_testing.tiny import save_tiny


@pytest.mark.parametrize(("num_shard", "flags"), [(1, ("--quantize", "gptq")), (2, ())])
async def test_a_gptq_folder_is_served(num_shard: int, flags: tuple[str, ...], launch: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    model = save_tiny("llama", tmp_path / "model", head_dim=16, **sizes)
    settings = QuantizeSettings(
        model_id=str(model), output_dir=str(tmp_path / "gptq"), groupsize=32, num_samples=2, device="cpu"
    )
    assert quantize(settings, model).num_quantised == 21
    server = launch("--model-id", settings.output_dir, "--num-shard", str(num_shard), *flags)
    async with client_of(server.url) as client:
        found = await generate(client, "Hello", max_new_tokens=6)
    assert len(found.ids) == 6
