"""The command on models: against transformers' logits, through the fused CPU step and torch; its errors."""

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from funitel.model_server.cpu.build import cpu_flags
from funitel.model_server.settings import ModelServerSettings, PerplexitySettings, Tiers
from funitel.model_server.tools.perplexity.command import run
from funitel.model_server.tools.perplexity.subject import Subject
from funitel.proto.errors import BrokenScores, FunitelError, SettingsError
from funitel_testing.tiny import byte_tokenizer, save_tiny, save_tokenizer
from funitel_testing.tiny_encoders import save_tiny_encoder
from funitel_testing.tiny_seq2seq import save_tiny_seq2seq
from funitel_testing.zoo import ZOO

PROSE = "The quick brown fox jumps over the lazy dog; naïve readers doubt it. " * 4
BLOCKS = Path(__file__).parents[4] / "benchmarks" / "heldout.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text(PROSE)
    return str(path)


@pytest.fixture(params=["fused", "torch"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes the model on this CPU."""
    if request.param == "torch":
        monkeypatch.setattr("funitel.model_server.loading.decoder.load_fused", lambda *_: None)
    elif "avx2" not in cpu_flags():
        pytest.skip("the fused step needs AVX2")
    return str(request.param)


def measured(model: Path, text: str, **settings: Any) -> Any:
    chosen = {"device": "cpu", "num_threads": 1, "block_size": 4, "json": True, "model_id": str(model), "text": text}
    return json.loads(run(PerplexitySettings(**(chosen | settings))))


def losses(model: Path, text: str, window: int, stride: int) -> list[float]:
    """Negative log-likelihoods by transformers in float32, each token with the context that its first window has."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = byte_tokenizer().encode(text).ids
    found: dict[int, float] = {}
    for begin in range(0, len(ids), stride):
        part = ids[begin : begin + window]
        with torch.inference_mode():
            logprobs = oracle(torch.tensor([part])).logits[0].double().log_softmax(-1)
        for i in range(1, len(part)):
            found.setdefault(begin + i, -float(logprobs[i - 1, part[i]]))
        if begin + window >= len(ids):
            break
    return list(found.values())


@pytest.mark.parametrize(("window", "stride"), [(32, 32), (32, 20), (250, 250)])
def test_perplexity_is_that_of_the_logits_of_transformers(
    model: Path, text: str, step: str, window: int, stride: int
) -> None:
    found = measured(model, text, dtype="float32", window=window, stride=stride)
    expected = losses(model, PROSE, window, stride)
    (row,) = found["results"]
    assert found["tokens"] == len(expected)
    assert row["perplexity"] == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)
    assert row["perplexity_error"] == pytest.approx(
        row["perplexity"] * np.std(expected, ddof=1) / math.sqrt(len(expected)), rel=1e-3
    )
    assert row["bits_per_byte"] == pytest.approx(sum(expected) / math.log(2) / found["bytes"], rel=1e-4)
    assert row["precision"] == row["kv_precision"] == "float32"
    assert row["kl_mean"] is row["same_top_token"] is None


def test_logits_in_pieces_are_those_of_one_forward(model: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(model, text, dtype="float32")
    monkeypatch.setattr("funitel.model_server.tools.perplexity.subject.max_scored_tokens", lambda size: 7)
    pieces = measured(model, text, dtype="float32")
    assert pieces["tokens"] == whole["tokens"]
    assert pieces["results"][0]["perplexity"] == pytest.approx(whole["results"][0]["perplexity"], rel=1e-5)


def test_keys_and_values_are_read_from_the_pool(model: Path, step: str) -> None:
    settings = ModelServerSettings(model_id=str(model), device="cpu", dtype="float32", num_threads=1, block_size=4)
    subject = Subject.load("tiny", settings, model)
    subject.reserve(32)
    ids = byte_tokenizer().encode(PROSE).ids[:32]
    found = []
    for is_changed in (False, False, True):
        subject.forward(ids, 0, 16, "none")
        if is_changed:
            subject._executor.runner.pool.pool.mul_(0.5)
        logits = subject.forward(ids, 16, 32, "all")
        assert logits is not None
        found.append(logits.clone())
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2], rtol=0.01)


def test_a_model_that_keeps_states_begins_every_window_anew(tmp_path: Path, text: str) -> None:
    oracle = ZOO["mamba2"].save(tmp_path)
    save_tokenizer(tmp_path)
    ids = byte_tokenizer().encode(PROSE).ids
    expected = []
    for begin in range(0, 200, 20):
        with torch.inference_mode():
            logprobs = oracle(torch.tensor([ids[begin : begin + 20]])).logits[0].double().log_softmax(-1)
        expected += [-float(logprobs[i - 1, ids[begin + i]]) for i in range(1, 20)]
    found = measured(tmp_path, text, dtype="float32", window=20, max_text_tokens=200)
    assert found["results"][0]["perplexity"] == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)


def test_a_model_against_itself_has_no_distance(model: Path, text: str) -> None:
    found = measured(model, text, dtype="float32", against=str(model))
    reference, row = found["results"]
    assert found["reference"] == reference["name"] == f"{model} float32"
    assert (row["kl_mean"], row["kl_max"], row["same_top_token"], row["perplexity_ratio"]) == (0, 0, 1, 1)
    assert reference["perplexity"] == row["perplexity"]
    assert reference["kl_mean"] is None


def test_tiers_are_compared_with_the_first(model: Path, text: str, step: str, tmp_path: Path) -> None:
    picture = tmp_path / "it.svg"
    tiers = Tiers("float32,float16,int8" if step == "fused" else "float32,bfloat16")
    found = measured(model, text, tiers=tiers, picture=str(picture))
    rows = {row["name"]: row for row in found["results"]}
    assert list(rows) == list(tiers)
    assert found["reference"] == "float32"
    last = rows[tiers[-1]]
    assert 1e-6 < last["kl_mean"] <= last["kl_p99"] <= last["kl_max"]
    assert last["same_top_token"] > 0.8
    assert last["perplexity_ratio"] == pytest.approx(last["perplexity"] / rows["float32"]["perplexity"], rel=1e-9)
    if step == "fused":
        assert rows["float16"]["kl_mean"] < rows["int8"]["kl_mean"]
        assert (last["precision"], last["kv_precision"]) == ("int8", "bfloat16")
        assert last["weight_bytes"] < rows["float16"]["weight_bytes"] < rows["float32"]["weight_bytes"]
    drawn = "".join(ElementTree.parse(picture).getroot().itertext())
    for row in rows.values():
        assert f"{row['perplexity']:.3f}" in drawn


def test_tiers_are_compared_with_another_model(model: Path, text: str, tmp_path: Path) -> None:
    other = save_tiny("llama", tmp_path / "other", seed=5)
    found = measured(model, text, tiers=Tiers("float32"), against=str(other), against_dtype="float16")
    assert [row["name"] for row in found["results"]] == [f"{other} float16", "float32"]
    assert found["results"][0]["precision"] == "float16"
    assert found["results"][1]["kl_mean"] > 0.1


def test_texts_of_a_jsonl_file_share_no_context(model: Path, tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text('"first text"\n{"text": "another\u2028one"}\n')
    found = measured(model, str(tmp_path / "two.jsonl"), dtype="float32")
    expected = [*losses(model, "first text", 99, 99), *losses(model, "another\u2028one", 99, 99)]
    assert found["tokens"] == len(expected) == 9 + 12
    assert found["results"][0]["perplexity"] == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)


def test_max_tokens_bounds_what_is_read(model: Path, text: str, tmp_path: Path) -> None:
    assert measured(model, text, max_text_tokens=50)["tokens"] == 49
    (tmp_path / "two.jsonl").write_text('"12345678"\n"12345678"\n"12345678"\n')
    assert measured(model, str(tmp_path / "two.jsonl"), max_text_tokens=12)["tokens"] == 7 + 3


def test_the_table_has_a_row_for_each_model(model: Path, text: str) -> None:
    settings = PerplexitySettings(model_id=str(model), text=text, device="cpu", num_threads=1, tiers=Tiers("float32"))
    alone = run(settings).splitlines()
    assert alone[0].endswith("window 256, stride 256")
    assert "ratio" not in alone[2]
    assert alone[3].split()[:3] == ["float32", "float32", "float32"]
    both = PerplexitySettings(
        model_id=str(model), text=text, device="cpu", num_threads=1, dtype="float32", against=str(model)
    )
    lines = run(both).splitlines()
    assert lines[1] == f"ratio and KL (nats) against {model} float32"
    assert lines[3].split()[-9:] == ["ratio", "KL", "mean", "KL", "p99", "KL", "max", "same", "top"]
    assert lines[5].split()[-2:] == ["100.00", "%"]


# Errors


def refused(kind: type[FunitelError], model: Path | str, text: str, **settings: Any) -> str:
    with pytest.raises(kind) as raised:
        measured(Path(model), text, **settings)
    assert "\n" not in raised.value.message
    return raised.value.message


def test_texts_that_cannot_be_measured(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "it.txt"
    assert "cannot be read: No such file" in refused(SettingsError, model, str(path))
    for content, words in (
        (b"", "holds no text"),
        (b" \n", "holds no text"),
        (b"x", "holds less than two tokens"),
        (b"caf\xe9", "is not UTF-8 text: byte 3"),
    ):
        path.write_bytes(content)
        message = refused(SettingsError, model, str(path))
        assert words in message
        assert message.startswith(f"--text {path} ")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window": 257}, "--window 257 is longer than the model's context of 256 tokens"),
        ({"stride": 400}, "--stride 400 is longer than a window of 256 tokens"),
        ({"window": 8, "stride": 9}, "--stride must be at most --window 8, given 9"),
        ({"window": 1}, "--window must be > 1, given 1"),
        ({"stride": 0}, "--stride must be > 0, given 0"),
        ({"max_text_tokens": 1}, "--max-text-tokens must be > 1, given 1"),
        ({"against_dtype": "float16"}, "--against-dtype float16 is for --against MODEL"),
        ({"against_quantize": "int8"}, "--against-quantize int8 is for --against MODEL"),
        ({"tiers": Tiers("float32"), "dtype": "float32"}, "both say the precision"),
        ({"picture": "it.png"}, "--picture must end in .svg, given it.png"),
        ({"picture": "nowhere/it.svg"}, "--picture nowhere/it.svg: there is no folder"),
        ({"text": ""}, "--text FILE is missing"),
    ],
)
def test_settings_that_cannot_be(model: Path, text: str, settings: dict[str, Any], words: str) -> None:
    assert words in refused(SettingsError, model, settings.pop("text", text), **settings)


@pytest.mark.parametrize(
    ("tiers", "words"), [("float32,in8", "'in8': did you mean int8?"), ("int8,int8", "has int8 2 times"), ("", "''")]
)
def test_tiers_that_are_none(tiers: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        Tiers(tiers)


def test_tiers_may_be_full_names_of_blocks() -> None:
    assert Tiers("float32,a16w8_g-1,q4_b64t1") == ("float32", "a16w8_g-1", "q4_b64t1")


def test_a_reference_must_have_the_same_tokens(model: Path, text: str, tmp_path: Path) -> None:
    wide = save_tiny("llama", tmp_path / "wide", vocab_size=300)
    assert "a vocabulary of 300 tokens" in refused(SettingsError, model, text, against=str(wide))
    other = save_tiny("llama", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "its tokenizer makes other tokens of the text" in refused(SettingsError, model, text, against=str(other))


def test_models_that_predict_no_next_token(text: str, tmp_path: Path) -> None:
    encoder = save_tiny_encoder("Bert", "Model", tmp_path / "encoder")
    seq2seq = save_tiny_seq2seq("t5", tmp_path / "seq2seq")
    for folder in (encoder, seq2seq):
        assert "only decoders have a perplexity" in refused(FunitelError, folder, text)


def test_logits_beyond_float32_are_one_line(text: str, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 1e38
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = refused(BrokenScores, folder, text, dtype="float32")
    assert message == f"{folder}: the logits are NaN or infinite, so the text has no perplexity"


def test_the_program_prints_one_json_object_and_errors_in_one_line(model: Path, text: str) -> None:
    environ = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}

    def start(*argv: str) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "funitel.model_server", "perplexity", str(model), "--device", "cpu", *argv]
        return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=120)

    done = start("--text", text, "--json", "--max-tokens", "40", "--dtype", "float32", "--num-threads", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == ["text", "tokens", "bytes", "window", "stride", "reference", "results"]
    assert (found["text"], found["tokens"], found["window"], found["reference"]) == (text, 39, 256, None)
    assert set(found["results"][0]) == {
        "name", "model", "precision", "kv_precision", "weight_bytes", "tokens_per_second", "perplexity",
        "perplexity_error", "bits_per_byte", "perplexity_ratio", "perplexity_ratio_error", "kl_mean", "kl_p99",
        "kl_max", "same_top_token",
    }  # fmt: skip
    assert f"predicting with {model}: 100% of 40 tokens" in done.stderr
    wrong = start("--text", text, "--tiers", "float32,q9")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert "'q9'" in wrong.stderr


# The demo model


def test_the_blocks_of_a_gguf_predict_as_well_as_float32(demo_model: Path) -> None:
    if "avx2" not in cpu_flags():
        pytest.skip("the fused step needs AVX2")
    found = measured(demo_model, str(BLOCKS), tiers=Tiers("float32,gguf"), max_text_tokens=200)
    _, row = found["results"]
    assert row["precision"] == "gguf"
    assert row["perplexity_ratio"] == pytest.approx(1, abs=0.02)
    assert 0 < row["kl_mean"] < 0.01
    assert row["same_top_token"] > 0.9


# Bytes of an output: groups of 128 where inputs are whole ones, else 64 or those of the whole output in blocks of 64.
BYTES_OF_GROUPS = {
    "a16w8": {576: 9 * 68, 1536: 12 * 132},
    "a16w8_g-1": {576: 9 * 68, 1536: 6 * 260},
    "a16w4": {576: 9 * 36, 1536: 24 * 36},
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [("a16w8", "a16w8_g-1"), tuple(BYTES_OF_GROUPS)], ids=len)
def test_groups_with_zeros_predict_as_well_as_they_should(demo_model: Path, names: tuple[str, ...]) -> None:
    """8 bits within 1 % of float32, 4 bits in groups of 64 within 40 %; memory is that of the formula."""
    if "avx2" not in cpu_flags():
        pytest.skip("the fused step needs AVX2")
    tiers = Tiers(",".join(["float32", *names]))
    rows = {row["name"]: row for row in measured(demo_model, str(BLOCKS), tiers=tiers)["results"]}
    for name in names:
        row_bytes = BYTES_OF_GROUPS[name]
        assert abs(rows[name]["perplexity_ratio"] - 1) < (0.01 if "w8" in name else 0.4), name
        layer = (576 + 2 * 192 + 576 + 2 * 1536) * row_bytes[576] + 576 * row_bytes[1536]
        table, norms = 49152 * (576 // 32 * 34), 61 * 576 * 4
        assert rows[name]["weight_bytes"] == 30 * layer + table + norms, name
    assert rows["a16w8"]["kl_mean"] < rows["a16w8_g-1"]["kl_mean"] < 0.01


@pytest.mark.parametrize(
    "names",
    [("q8", "q3h", "q3"), pytest.param(("q8", "q6", "q5", "q3h", "q3"), marks=pytest.mark.slow)],
    ids=len,
)
def test_fewer_bits_predict_worse(demo_model: Path, names: tuple[str, ...]) -> None:
    """Of formats that its weights are on no grid of; at 4 bits 11 levels in 3.5 bits are better than 8 levels in 3."""
    if "avx2" not in cpu_flags():
        pytest.skip("the fused step needs AVX2")
    tiers = Tiers(",".join(["float32", *names]))
    rows = measured(demo_model, str(BLOCKS), tiers=tiers, max_text_tokens=300)["results"]
    assert [row["name"] for row in rows] == ["float32", *names]
    errors = [row["kl_mean"] for row in rows[1:]]
    assert errors == sorted(errors)
    values = [row["perplexity"] for row in rows]
    assert all(more <= 1.005 * fewer for more, fewer in pairwise(values))
    assert rows[-2]["perplexity"] < rows[-1]["perplexity"]
    assert rows[-2]["weight_bytes"] == rows[-1]["weight_bytes"]
