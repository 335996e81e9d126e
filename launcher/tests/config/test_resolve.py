"""Open settings are decided by rule, in a new object."""

import json
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.config import resolve as module
from funitel.launcher.config.resolve import (
    decide_num_shard,
    describe,
    fit_to_model,
    prefill_tokens,
    resolve,
    share_of_cores,
    visible_gpus,
)
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.settings.shard_count import AUTO, ShardCount
from funitel.launcher.supervisor.announce import example
from funitel.proto.errors import SettingsError
from funitel.proto.settings.layer_parts import LayerParts


@pytest.mark.parametrize(
    ("sharded", "num_shard", "num_devices", "decided"),
    [
        (True, None, 4, 4),
        (True, 2, None, 2),
        (False, None, 4, 1),
        (False, 1, 4, 1),
        (False, 3, 4, 3),
        (None, None, 4, 4),
        (None, None, 0, 1),
        (None, None, None, 1),
        (None, 3, 8, 3),
        (None, AUTO, 8, 8),
        (True, AUTO, 8, 8),
        (None, AUTO, None, 1),
    ],
)
def test_num_shard(sharded: bool | None, num_shard: int | None, num_devices: int | None, decided: int) -> None:
    assert decide_num_shard(LauncherSettings(sharded=sharded, num_shard=num_shard), num_devices) == decided


@pytest.mark.parametrize(
    ("environ", "device", "num_shard"),
    [({}, "auto", 8), ({"CUDA_VISIBLE_DEVICES": "0,2"}, "auto", 2), ({}, "cpu", 1)],
)
def test_auto_asks_for_the_gpus_there_are(
    environ: dict[str, str], device: str, num_shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "listed_gpus", lambda: tuple("01234567"))
    assert module.shards_and_gpus(LauncherSettings(num_shard=AUTO, device=device), environ) == (num_shard, ())
    assert module.shards_and_gpus(LauncherSettings(device=device), {}) == (1, ())  # as with TGI


def test_shard_counts_are_written_as_they_are_read() -> None:
    assert [str(ShardCount(text)) for text in ("auto", "4")] == ["auto", "4"]
    for text in ("", "many", "1.5"):
        with pytest.raises(ValueError, match="neither a number of shards nor auto"):
            ShardCount(text)


@pytest.mark.parametrize(
    ("num_devices", "why"),
    [(None, "is unknown here"), (0, "found 0"), (1, "needs more than one device, found 1")],
)
def test_sharded_without_devices_is_refused(num_devices: int | None, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        decide_num_shard(LauncherSettings(sharded=True), num_devices)


@pytest.mark.parametrize("given", [{"gpu_layers": 9}, {"layer_parts": LayerParts("0-9=cpu,10-19=cuda")}])
def test_one_shard_has_all_layers_that_are_placed(given: dict[str, Any]) -> None:
    assert decide_num_shard(LauncherSettings(**given), 4) == 1
    assert decide_num_shard(LauncherSettings(**given, num_shard=1, num_replicas=2), 4) == 1
    flag = "--gpu-layers 9" if "gpu_layers" in given else "--layer-parts 0-9=cpu,10-19=cuda"
    for more, name in (({"num_shard": 2}, "--num-shard 2"), ({"sharded": True}, "--sharded true")):
        with pytest.raises(SettingsError, match=f"^{flag} cannot be used with {name}: one shard has all layers$"):
            decide_num_shard(LauncherSettings(**given, **more), 4)


@pytest.mark.parametrize(
    ("num_replicas", "sharded", "num_devices", "decided"),
    [(2, None, 4, 2), (3, None, 4, 1), (4, None, 2, 1), (2, True, 4, 2), (2, None, None, 1), (2, False, 8, 1)],
)
def test_replicas_share_the_devices(
    num_replicas: int, sharded: bool | None, num_devices: int | None, decided: int
) -> None:
    settings = LauncherSettings(num_replicas=num_replicas, sharded=sharded)
    assert decide_num_shard(settings, num_devices) == decided


def test_more_shards_than_gpus_are_refused() -> None:
    settings = LauncherSettings(num_replicas=2, num_shard=2)
    with pytest.raises(SettingsError, match=r"--num-replicas 2 with --num-shard 2 need 4 GPUs, there are 3"):
        resolve(settings, 2, "/tmp/path", ("0", "1", "2"))


@pytest.mark.parametrize(("sharded", "num_shard"), [(True, 1), (None, 0), (True, -1)])
def test_impossible_combinations_are_refused(sharded: bool | None, num_shard: int) -> None:
    with pytest.raises(SettingsError, match="--num-shard"):
        LauncherSettings(sharded=sharded, num_shard=num_shard)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1, GPU-2,"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "1", "NVIDIA_VISIBLE_DEVICES": "0,1"}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"NVIDIA_VISIBLE_DEVICES": ""}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 8),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 8),
    ],
)
def test_devices_are_counted_as_cuda_sees_them(
    environ: dict[str, str], count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "listed_gpus", lambda: tuple("01234567"))
    gpus = visible_gpus("auto", environ)
    assert (None if gpus is None else len(gpus)) == count
    assert visible_gpus("cpu", environ) is None


def test_gpus_are_listed_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert module.listed_gpus() == ("0", "1")
    tool.unlink()
    assert module.listed_gpus() is None


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [share_of_cores("cpu", n) for n in (1, 2, 3, 9)] == [8, 4, 2, 1]
    assert share_of_cores("cuda", 2) is None


@pytest.mark.parametrize(
    ("context", "pool", "budget"),
    [(None, None, 4096), (2048, None, 2048), (8192, 1000, 1000), (8192, None, 4096)],
)
def test_prefill_tokens_fit_context_and_pool(context: int | None, pool: int | None, budget: int) -> None:
    assert prefill_tokens(LauncherSettings(max_batch_total_tokens=pool), context) == budget


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions", "max_seq_len"])
def test_the_context_is_read_from_config_json(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({key: 77}))
    settings = resolved()
    assert fit_to_model(settings, tmp_path).max_batch_prefill_tokens == 77
    assert settings.max_batch_prefill_tokens is None


def test_a_config_json_that_tells_no_context_or_is_absent_is_no_limit(tmp_path: Path) -> None:
    for text in (None, '{"max_position_embeddings": null}', "[]"):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        assert fit_to_model(resolved(), tmp_path).max_batch_prefill_tokens == 4096


def test_a_broken_config_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SettingsError, match="config.json is not JSON"):
        fit_to_model(resolved(), tmp_path)


@pytest.mark.parametrize("key", ["num_attention_heads", "n_head"])
def test_more_shards_than_query_heads_are_refused_before_any_shard_starts(tmp_path: Path, key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({key: 2}))
    assert fit_to_model(resolved(), tmp_path).num_shard == 2
    (tmp_path / "config.json").write_text(json.dumps({key: 1}))
    with pytest.raises(SettingsError) as refused:
        fit_to_model(resolved(model_id="org/tiny"), tmp_path)
    assert refused.value.message == "--num-shard 2 is more than the 1 query heads of org/tiny: give at most 1"


@pytest.mark.parametrize(
    ("architectures", "task", "path"),
    [
        (["LlamaForCausalLM"], "generate", "/v1/chat/completions"),
        (["GPT2LMHeadModel"], "generate", "/v1/chat/completions"),
        (["BertModel"], "embed", "/v1/embeddings"),
        (["MPNetForMaskedLM"], "embed", "/v1/embeddings"),
        (["BertForSequenceClassification"], "classify", "/predict"),
        (None, "generate", "/v1/chat/completions"),
        (5, "generate", "/v1/chat/completions"),
    ],
)
def test_the_example_is_for_the_models_task(architectures: object, task: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    settings = fit_to_model(resolved(), tmp_path)
    assert settings.task == task
    assert path in example(settings)


def test_what_was_given_stays(tmp_path: Path) -> None:
    settings = resolved(master_port=4242, num_threads=3, served_model_name="me", max_batch_prefill_tokens=99, port=3001)
    settings = fit_to_model(settings, tmp_path)
    assert (settings.master_port, settings.num_threads, settings.port) == (4242, 3, 3001)
    assert (settings.served_model_name, settings.max_batch_prefill_tokens) == ("me", 99)


def test_what_was_open_is_decided() -> None:
    settings = resolved(model_id="org/model", port=0)
    assert settings.served_model_name == "org/model"
    assert settings.master_port > 0
    assert settings.port > 0
    assert (settings.sharded, settings.num_shard, settings.shard_uds_path) == (True, 2, "/tmp/path")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"port": 99999}, "--port must be within 0..65535"),
        ({"block_size": 0}, "--block-size must be > 0"),
        ({"num_threads": 0}, "--num-threads must be > 0"),
        ({"max_batch_prefill_tokens": 0}, "--max-batch-prefill-tokens must be > 0"),
        ({"validation_workers": 0}, "--validation-workers must be > 0"),
        ({"pipeline_steps": 4}, "--pipeline-steps must be within 1..3, given 4"),
        ({"step_timeout_s": 0.0}, "--step-timeout-s must be > 0 and <= 86400, given 0"),
        ({"step_timeout_s": float("inf")}, "--step-timeout-s must be > 0 and <= 86400, given inf"),
        ({"target_itl_ms": 0.0}, "--target-itl-ms must be > 0 and <= 600000, given 0.0"),
        ({"target_itl_ms": float("nan")}, "--target-itl-ms must be > 0 and <= 600000, given nan"),
        ({"target_itl_ms": 6e5 + 1}, "--target-itl-ms must be > 0 and <= 600000, given 600001.0"),
        (
            {"target_itl_ms": 50.0, "prefill_chunking": False},
            "--target-itl-ms 50.0 needs --prefill-chunking true, given false",
        ),
        ({"target_ttft_ms": 0.0}, "--target-ttft-ms must be > 0 and <= 86400000, given 0.0"),
        (
            {"target_ttft_ms": 500.0, "prefill_chunking": False},
            "--target-ttft-ms 500.0 needs --prefill-chunking true, given false",
        ),
    ],
)
def test_what_a_child_would_refuse_is_refused_before_anything_loads(given: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        resolved(**given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"protect_all_routes": True}, "--protect-all-routes needs --api-key or --api-key-file"),
        ({"api_key_file": "/nowhere/keys"}, "--api-key-file /nowhere/keys: No such file"),
        ({"tls_cert": "/nowhere/a.pem"}, "--tls-cert and --tls-key need each other, given /nowhere/a.pem alone"),
        ({"tls_cert": "/nowhere/a.pem", "tls_key": "/nowhere/a.key"}, "--tls-cert /nowhere/a.pem: No such file"),
        ({"tls_client_ca": "/nowhere/ca.pem"}, "--tls-client-ca /nowhere/ca.pem needs --tls-cert and --tls-key"),
        ({"oidc_issuer": "https://idp"}, "--oidc-issuer https://idp needs --users"),
        ({"users": True, "oidc_role_claim": "roles"}, "--oidc-role-claim roles needs --oidc-issuer"),
        ({"tls_probe_key": "/nowhere/a.key"}, "--tls-probe-cert and --tls-probe-key need each other"),
        ({"tls_probe_cert": "/nowhere/a", "tls_probe_key": "/nowhere/b"}, "--tls-probe-cert /nowhere/a needs --tls-cl"),
        ({"default_hostname": "everywhere"}, "--default-hostname must be like 0.0.0.0, given 'everywhere'"),
    ],
)
def test_who_is_let_in_is_settled_before_anything_loads(given: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        resolved(**given)


def test_without_a_key_the_server_is_for_its_own_machine() -> None:
    assert (resolved().hostname, resolved().is_local_by_default) == ("127.0.0.1", True)
    assert (resolved(api_key="sesame").hostname, resolved(api_key="sesame").is_local_by_default) == ("0.0.0.0", False)
    assert resolved(hostname="0.0.0.0").hostname == "0.0.0.0"


def test_the_legacy_input_limit_is_folded_in() -> None:
    settings = resolved(max_input_length=10, max_total_tokens=20)
    assert (settings.max_input_tokens, settings.max_input_length) == (10, None)


def test_the_description_tells_everything_but_secrets() -> None:
    text = describe(resolved(api_key="sesame"))
    assert "api_key=*** " in text
    assert "sesame" not in text
    assert "num_shard=2 " in text
    assert "api_key=None " in describe(resolved())


def resolved(**given: Any) -> module.ResolvedSettings:
    return resolve(LauncherSettings(**given), num_shard=2, uds_path="/tmp/path")
