"""`funitel models MODEL --explain`: every option has its reason, and what loading would do is what is said."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub_constants
import pytest

from funitel.model_server.device.host_memory import AvailableMemory
from funitel.model_server.settings import DTYPES, ENGINES, QUANTIZATIONS, ModelsSettings
from funitel.model_server.tools.models import needs
from funitel.model_server.tools.models.explanation import explain, suggestion_of, tell_options
from funitel.model_server.tools.models.options import Option, suggest
from funitel.proto.errors import SettingsError, StartupError, WeightsError
from funitel_testing.cache import demo_folder
from funitel_testing.fake_hub import FakeHub, running
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_encoders import save_tiny_encoder
from funitel_testing.zoo import ZOO

FREE = 10**9
OPTION = {"engine", "format", "quantize", "dtype", "device", "usable", "reason", "bytes", "fits"}
SUGGESTED = {"engine", "format", "quantize", "dtype", "device", "num_shard", "bytes", "reason"}


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "available_memory", lambda: AvailableMemory(FREE, "a test"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def told(model: Path | str, **given: Any) -> dict[str, Any]:
    text, is_usable = tell_options(ModelsSettings(model_id=str(model), explain=True, json=True, **given))
    found: dict[str, Any] = json.loads(text)
    assert found.keys() == {"model", "suggested", "options"}
    assert all(option.keys() == OPTION and option["reason"] for option in found["options"])
    assert all("\n" not in option["reason"] for option in found["options"])
    assert is_usable is (found["suggested"] is not None) is any(option["usable"] for option in found["options"])
    return found


def one(found: dict[str, Any], engine: str, precision: str, device: str = "cpu") -> dict[str, Any]:
    (option,) = (
        each
        for each in found["options"]
        if (each["engine"], each["device"]) == (engine, device) and precision in (each["quantize"], each["dtype"])
    )
    return dict(option)


def reason(found: dict[str, Any], engine: str, precision: str, device: str = "cpu") -> str:
    option = one(found, engine, precision, device)
    assert not option["usable"], option
    return str(option["reason"])


def test_x4_every_combination_of_the_demo_model_has_a_reason() -> None:
    """Acceptance check X4: what is usable for the demo model on a CPU, and why the rest is not."""
    found = told(demo_folder())
    listed = {(each["engine"], each["quantize"], each["dtype"], each["device"]) for each in found["options"]}
    assert {each[0] for each in listed} == set(ENGINES)
    for device in ("cpu", "cuda"):
        assert {("native", None, dtype, device) for dtype in DTYPES} <= listed
        named = {*QUANTIZATIONS} - {"a8w8"}  # which is int8
        assert {("native", quantize, None, device) for quantize in named} <= listed
    for precision in ("gguf", "int8", *DTYPES):
        option = one(found, "native", precision)
        assert option["usable"], option
        assert option["fits"]
        assert option["bytes"] > 80e6
    assert reason(found, "native", "fp8") == "fp8 needs a GPU; on a CPU int8 takes as little memory"
    assert reason(found, "native", "fp8", "cuda") == "fp8 needs a GPU, and this machine has none that torch can use"
    assert reason(found, "native", "bfloat16", "cuda") == "this machine has no GPU that torch can use"
    assert reason(found, "native", "gguf", "cuda") == "blocks of a GGUF are kept as they are on a CPU only"
    assert "--method gptq makes a checkpoint that is" in reason(found, "native", "gptq")
    assert "published so" in reason(found, "native", "awq")
    assert reason(found, "transformers", "float32") == "transformers reads safetensors, and this model is a GGUF"
    assert reason(found, "llama_cpp", "gguf", "cuda") == "--engine llama_cpp runs on a CPU only"
    assert one(found, "native", "gguf")["reason"] == "the fused C++ step computes blocks of Q4_1 and Q8_0 as they are"
    suggested = found["suggested"]
    assert suggested.keys() == SUGGESTED
    assert (suggested["engine"], suggested["quantize"], suggested["device"]) == ("native", "gguf", "cpu")
    assert suggested["num_shard"] == 1


def test_llama_cpp_is_usable_where_its_extra_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funitel.proto.extras.find_spec", lambda name: None)
    assert "pip install 'funitel[llama-cpp]'" in reason(told(demo_folder()), "llama_cpp", "gguf")
    monkeypatch.setattr("funitel.proto.extras.find_spec", lambda name: object())
    option = one(told(demo_folder()), "llama_cpp", "gguf")
    assert option["usable"]
    assert "architecture llama" in option["reason"]
    assert "one shard" in reason(told(demo_folder(), num_shard=3), "llama_cpp", "gguf")


def test_a_checkpoint_of_safetensors(tmp_path: Path) -> None:
    found = told(save_tiny("llama", tmp_path))
    assert one(found, "native", "int8")["usable"]
    assert "rounded as they are loaded" in one(found, "native", "int8")["reason"]
    assert reason(found, "native", "gguf") == "blocks are kept as they are of a GGUF, and this model is safetensors"
    assert "name one, such as owner/name:Q4_K_M" in reason(found, "llama_cpp", "gguf")
    slower = one(found, "transformers", "float32")
    assert slower["usable"]
    assert slower["reason"] == "transformers' own code computes it in float32, slower than native"
    assert found["suggested"]["quantize"] == "int8"


def test_a_model_that_the_fused_step_does_not_compute(tmp_path: Path) -> None:
    ZOO["apertus"].save(tmp_path)
    found = told(tmp_path)
    assert reason(found, "native", "int8").startswith("--quantize int8 needs the fused CPU step: ")
    option = one(found, "native", "float32")
    assert option["usable"]
    assert option["reason"].startswith("torch computes it in float32: ")
    assert (found["suggested"]["engine"], found["suggested"]["dtype"]) == ("native", "float32")


def test_an_architecture_without_a_row_names_the_nearest(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamoidForCausalLM"]}))
    found = told(folder)
    assert reason(found, "native", "float32") == (
        "no row for this architecture (no row of the table is for it): the nearest is LlamaForCausalLM"
    )
    assert found["suggested"]["engine"] == "transformers"
    assert "slower" not in found["suggested"]["reason"]


def test_what_does_not_fit_says_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("llama", tmp_path)
    sizes = {each["dtype"] or each["quantize"]: each["bytes"] for each in told(folder)["options"] if each["bytes"]}
    assert sizes["int8"] < sizes["float32"]
    for free in (600_000, 400_000, 300_000, 200_000, 150_000, 100_000, 70_000, 50_000):
        monkeypatch.setattr(needs, "available_memory", lambda free=free: AvailableMemory(free, "a test"))
        found = told(folder)
        large, small = one(found, "native", "float32"), one(found, "native", "int8")
        if small["fits"] and not large["fits"]:
            break
    else:
        pytest.fail("no size tells the two apart")
    assert not large["usable"]
    assert large["reason"].startswith("does not fit: needs ")
    assert "are free; --quantize int8 would take " in large["reason"]
    monkeypatch.setattr(needs, "available_memory", lambda: AvailableMemory(1000, "a test"))
    found = told(folder)
    assert found["suggested"] is None
    assert all(not each["usable"] for each in found["options"])


def test_an_encoder_is_not_quantised(tmp_path: Path) -> None:
    found = told(save_tiny_encoder("Bert", "Model", tmp_path))
    assert found["suggested"]["engine"] == "native"
    assert found["suggested"]["dtype"] == "float32"
    assert reason(found, "native", "int8") == "--quantize int8 is for decoders, and this is an encoder"
    assert reason(found, "transformers", "float32") == "--engine transformers is for decoders, and this is an encoder"


def test_a_gpu_comes_first_and_then_the_engine_and_the_precision() -> None:
    def option(engine: str, quantize: str | None, dtype: str | None, device: str, *, usable: bool = True) -> Option:
        chosen = {"engine": engine, "quantize": quantize, "dtype": dtype, "device": device, "usable": usable}
        return Option(format="safetensors", reason="why", bytes=1, fits=usable, **chosen)  # type: ignore[arg-type]

    ways = [
        option("transformers", None, "float32", "cpu"),
        option("native", None, "float32", "cpu"),
        option("native", "int8", None, "cpu"),
        option("native", "int8", None, "cuda"),
        option("native", "fp8", None, "cuda"),
        option("native", None, "bfloat16", "cuda"),
        option("native", "gptq", None, "cuda"),
    ]
    order = []
    while (best := suggest(ways, 2)) is not None:
        assert best.num_shard == 2
        order.insert(0, (best.engine, best.quantize or best.dtype, best.device))
        ways = [each for each in ways if (each.engine, each.quantize or each.dtype, each.device) != order[0]]
    assert order == [
        ("transformers", "float32", "cpu"),
        ("native", "float32", "cpu"),
        ("native", "int8", "cpu"),
        ("native", "int8", "cuda"),
        ("native", "fp8", "cuda"),
        ("native", "bfloat16", "cuda"),
        ("native", "gptq", "cuda"),
    ]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    folder = tmp_path / "origin"
    save_tiny("llama", folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    content = {"org/tiny": {"main": files}, "org/pickled": {"main": {"config.json": b"{}", "model.bin": b"PK"}}}
    with running(FakeHub(content)) as hub:
        monkeypatch.setattr(hub_constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield hub


def test_of_a_hub_repository_headers_alone_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    found = told("org/tiny", cache_dir=str(tmp_path / "cache"))
    assert found["model"] == "org/tiny"
    local = told(tmp_path / "origin")
    assert found["options"] == local["options"]
    assert found["suggested"] == local["suggested"]
    kept = [path for path in tmp_path.joinpath("hub").rglob("*.safetensors") if os.path.getsize(path)]
    assert not kept


def test_of_a_gguf_of_the_hub_the_header_alone_is_fetched(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.model_server.hub.headers._CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr("funitel.model_server.hub.headers._FIRST_CHUNKS", 1)
    gguf = next(demo_folder().glob("*.gguf"))
    hub.repositories["org/ggufs"] = {"main": {"smol-Q4_1.gguf": gguf.read_bytes()}}  # type: ignore[index]
    found = told("org/ggufs:Q4_1")
    local = told(demo_folder())
    assert found["options"] == local["options"]
    assert found["suggested"]["quantize"] == "gguf"
    with pytest.raises(WeightsError, match="Q8_0"):
        explain(ModelsSettings(model_id="org/ggufs:Q8_0", explain=True))


def test_a_repository_without_safetensors_says_how_to_learn_more(hub: FakeHub) -> None:
    with pytest.raises(
        WeightsError, match="org/pickled has no safetensors on the hub: .* download-weights org/pickled"
    ):
        explain(ModelsSettings(model_id="org/pickled", explain=True))
    with pytest.raises(StartupError, match="no repository org/none"):
        explain(ModelsSettings(model_id="org/none", explain=True))


def test_the_suggestion_is_a_function_and_the_page_a_table() -> None:
    settings = ModelsSettings(model_id=str(demo_folder()), explain=True)
    best = suggestion_of(settings)
    assert best is not None
    text, _ = tell_options(settings)
    assert text.splitlines()[0].split() == [
        "engine", "format", "quantize", "dtype", "device", "usable", "memory", "reason",
    ]  # fmt: skip
    assert f"suggested: --engine native --device cpu --quantize gguf: {best.reason}" in text
    assert "fp8 needs a GPU" in text


def test_explain_needs_a_model() -> None:
    with pytest.raises(SettingsError, match="--explain needs a model"):
        ModelsSettings(explain=True)
