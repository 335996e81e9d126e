"""Files and batches over HTTP: uploads, the life of a batch, its files, keys, errors and limits."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, eventually

from funitel.proto.errors import ShardFailed
from funitel.proto.security.keys import digest_of
from funitel.router.batch import runner as runner_module
from funitel.router.core.request import is_background

CHAT = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry soon."""
    monkeypatch.setattr(runner_module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(runner_module, "MAX_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(runner_module, "IDLE_SECONDS", 0.05)


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """A request of a batch."""
    given = {"messages": [{"role": "user", "content": f"Hello {custom_id}"}]} if url == CHAT else {}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tgi", **given, **body}}


def jsonl(*requests: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in requests)


async def upload(client: httpx.AsyncClient, content: bytes, **headers: str) -> str:
    answer = await client.post(
        "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def create(client: httpx.AsyncClient, file_id: str, endpoint: str = CHAT, **more: Any) -> dict[str, Any]:
    headers = more.pop("headers", {})
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **more}
    answer = await client.post("/v1/batches", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def ended(client: httpx.AsyncClient, batch: dict[str, Any], **headers: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def has_ended() -> bool:
        nonlocal found
        found = (await client.get(f"/v1/batches/{batch['id']}", headers=headers)).json()
        return found["status"] in ENDED

    await eventually(has_ended, "ended")
    return found


async def lines_of(client: httpx.AsyncClient, file_id: str | None, **headers: str) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    answer = await client.get(f"/v1/files/{file_id}/content", headers=headers)
    assert answer.status_code == 200, answer.text
    return [json.loads(each) for each in answer.text.splitlines()]


async def test_a_batch_of_chats_runs_to_its_end(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        batch = await create(
            client, await upload(client, jsonl(*(line(f"r{i}") for i in range(30)))), metadata={"a": "b"}
        )
        assert batch["status"] == "validating"
        found = await ended(client, batch)
        assert found["status"] == "completed", found
        assert found["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        assert found["error_file_id"] is None
        assert found["metadata"] == {"a": "b"}
        assert found["created_at"] <= found["in_progress_at"] <= found["finalizing_at"] <= found["completed_at"]
        output = await lines_of(client, found["output_file_id"])
        assert [each["custom_id"] for each in output] == [f"r{i}" for i in range(30)]
        for each in output:
            assert each["error"] is None
            assert each["response"]["status_code"] == 200
            assert each["response"]["request_id"].startswith("batch_req_")
            assert each["response"]["body"]["choices"][0]["message"]["content"] == "Hello world!"
        assert all(is_background(request.key) for request in engine.requests)


async def test_requests_that_are_refused_are_in_the_error_file(
    serve: Serve, engine: FakeEngine, tmp_path: Path
) -> None:
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        content = jsonl(line("good"), line("bad", temperature="hot"), line("long", max_tokens=-1))
        found = await ended(client, await create(client, await upload(client, content)))
        assert found["status"] == "completed"
        assert found["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        errors = await lines_of(client, found["error_file_id"])
        assert [each["custom_id"] for each in errors] == ["bad", "long"]
        assert errors[0]["response"]["status_code"] == 422
        assert "temperature" in errors[0]["response"]["body"]["error"]["message"]


async def test_every_endpoint_that_generates(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        for url, body in (("/v1/completions", {"prompt": "Hi"}), ("/v1/responses", {"input": "Hi"})):
            content = jsonl(line("one", url, **body))
            found = await ended(client, await create(client, await upload(client, content), url))
            (only,) = await lines_of(client, found["output_file_id"])
            assert only["response"]["body"]["object"] in ("text_completion", "response")
        found = await ended(
            client,
            await create(
                client, await upload(client, jsonl(line("e", "/v1/embeddings", input="Hi"))), "/v1/embeddings"
            ),
        )
        (only,) = await lines_of(client, found["error_file_id"])
        assert "generates text" in only["response"]["body"]["error"]["message"]


async def test_errors_of_lines_have_their_numbers(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        good = line("a")
        wrong = [
            b"{broken",
            b"[1]",
            json.dumps({**good, "custom_id": None}).encode(),
            json.dumps(good).encode(),
            json.dumps({**line("b"), "url": "/v1/completions"}).encode(),
            json.dumps({**line("c"), "method": "GET"}).encode(),
            json.dumps({**line("d"), "body": 3}).encode(),
            json.dumps(line("e", stream=True)).encode(),
            json.dumps({**line("f"), "body": {"model": 5}}).encode(),
            json.dumps({**line("g"), "custom_id": 7}).encode(),
            b"\xff\xfe",
        ]
        content = b"\n".join([json.dumps(good).encode(), b"", *wrong])
        found = await ended(client, await create(client, await upload(client, content)))
        assert found["status"] == "failed"
        assert found["request_counts"]["total"] == 0
        assert [(each["line"], each["code"]) for each in found["errors"]["data"]] == [
            (3, "invalid_json_line"),
            (4, "invalid_json_line"),
            (5, "missing_custom_id"),
            (6, "duplicate_custom_id"),
            (7, "invalid_url"),
            (8, "invalid_method"),
            (9, "invalid_body"),
            (10, "unsupported_parameter"),
            (11, "invalid_model"),
            (12, "invalid_custom_id"),
            (13, "invalid_json_line"),
        ]
        assert "line 1" in found["errors"]["data"][3]["message"]
        assert not engine.requests


async def test_limits_of_a_file(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    settings = {"max_batch_requests": 2, "max_batch_file_bytes": 2000, "payload_limit": 1000}
    async with serve(engine, batch_dir=str(tmp_path / "b"), **settings) as client:
        found = await ended(client, await create(client, await upload(client, jsonl(*map(line, "abc")))))
        assert found["errors"]["data"][0]["code"] == "too_many_tasks"
        assert "--max-batch-requests" in found["errors"]["data"][0]["message"]
        found = await ended(client, await create(client, await upload(client, jsonl(line("a", user="x" * 1200)))))
        assert [(each["code"], each["line"]) for each in found["errors"]["data"]] == [("request_too_large", 1)]
        answer = await client.post("/v1/files", files={"file": b"x" * 2001}, data={"purpose": "batch"})
        assert answer.status_code == 413
        assert "--max-batch-file-bytes" in answer.json()["error"]["message"]
        found = await ended(client, await create(client, await upload(client, b"\n\n")))
        assert found["errors"]["data"][0]["code"] == "empty_file"
        assert not [path for path in (tmp_path / "b" / "parts").iterdir()]


@pytest.mark.parametrize(
    ("files", "data", "param"),
    [
        ({"file": b"x"}, {}, "purpose"),
        ({"file": b"x"}, {"purpose": "fine-tune"}, "purpose"),
        ({"other": b"x"}, {"purpose": "batch"}, "file"),
        ({"file": b""}, {"purpose": "batch"}, "file"),
    ],
)
async def test_uploads_that_are_refused(
    serve: Serve, engine: FakeEngine, tmp_path: Path, files: Any, data: Any, param: str
) -> None:
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        answer = await client.post("/v1/files", files=files, data=data)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert (await client.get("/v1/files")).json()["data"] == []


async def test_a_body_that_is_no_form(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        assert (await client.post("/v1/files", json={})).status_code == 415
        headers = {"content-type": "multipart/form-data; boundary=x"}
        for body in (b"", b"--y\r\n", b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\nabc'):
            answer = await client.post("/v1/files", content=body, headers=headers)
            assert answer.status_code == 400, body
            assert "form" in answer.json()["error"]["message"]


async def test_files_are_listed_retrieved_and_deleted(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        ids = [await upload(client, f"line {i}\n".encode()) for i in range(3)]
        listed = (await client.get("/v1/files")).json()
        assert [each["id"] for each in listed["data"]] == ids[::-1]
        page = (await client.get("/v1/files", params={"limit": 2, "order": "asc"})).json()
        assert [each["id"] for each in page["data"]] == ids[:2]
        assert page["has_more"]
        assert page["last_id"] == ids[1]
        page = (await client.get("/v1/files", params={"order": "asc", "after": ids[1]})).json()
        assert [each["id"] for each in page["data"]] == ids[2:]
        assert (await client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
        one = (await client.get(f"/v1/files/{ids[0]}")).json()
        assert one["bytes"] == 7
        assert one["filename"] == "in.jsonl"
        assert one["purpose"] == "batch"
        assert (await client.get(f"/v1/files/{ids[0]}/content")).content == b"line 0\n"
        assert (await client.delete(f"/v1/files/{ids[0]}")).json()["deleted"] is True
        for path in (f"/v1/files/{ids[0]}", f"/v1/files/{ids[0]}/content", "/v1/files/..", "/v1/batches/x"):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/v1/files", params={"limit": 0})).status_code == 400


async def test_batches_are_listed_by_page(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        file_id = await upload(client, jsonl(line("a")))
        ids = [(await create(client, file_id))["id"] for _ in range(3)]
        page = (await client.get("/v1/batches", params={"limit": 2})).json()
        assert [each["id"] for each in page["data"]] == [ids[2], ids[1]]
        assert page["has_more"] is True
        page = (await client.get("/v1/batches", params={"after": ids[1]})).json()
        assert [each["id"] for each in page["data"]] == [ids[0]]
        assert page["has_more"] is False


async def test_a_batch_of_no_file_and_of_wrong_fields(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        for change, param in (
            ({"input_file_id": "file-none"}, "input_file_id"),
            ({"endpoint": "/generate"}, "endpoint"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"completion_window": "8d"}, "completion_window"),
        ):
            body = {"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"} | change
            answer = await client.post("/v1/batches", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
        assert (await client.get("/v1/batches")).json()["data"] == []


async def test_cancelling_keeps_results_so_far(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    engine.pause = 0.01
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        batch = await create(client, await upload(client, jsonl(*(line(f"r{i}") for i in range(200)))))

        async def has_some() -> bool:
            found = (await client.get(f"/v1/batches/{batch['id']}")).json()
            return bool(found["request_counts"]["completed"] >= 3)

        await eventually(has_some, "some results")
        deleted = await client.delete(f"/v1/files/{batch['input_file_id']}")
        assert deleted.status_code == 400
        assert batch["id"] in deleted.json()["error"]["message"]
        answer = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert answer["status"] == "cancelling"
        found = await ended(client, batch)
        assert found["status"] == "cancelled"
        output = await lines_of(client, found["output_file_id"])
        assert len(output) == found["request_counts"]["completed"] < 200
        assert found["error_file_id"] is None
        assert found["cancelling_at"] <= found["cancelled_at"]
        count = len(engine.requests)
        assert (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()["status"] == "cancelled"
        await asyncio.sleep(0.05)
        assert len(engine.requests) == count
        done = await ended(client, await create(client, await upload(client, jsonl(line("a")))))
        answer = await client.post(f"/v1/batches/{done['id']}/cancel")
        assert answer.status_code == 400
        assert "completed" in answer.json()["error"]["message"]


async def test_what_is_not_run_in_the_window_expires(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    engine.pause = 0.05
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        content = jsonl(*(line(f"r{i}") for i in range(300)))
        batch = await create(client, await upload(client, content), completion_window="1s")
        found = await ended(client, batch)
        assert found["status"] == "expired"
        assert found["expired_at"] >= found["expires_at"]
        output = await lines_of(client, found["output_file_id"])
        errors = await lines_of(client, found["error_file_id"])
        assert {each["error"]["code"] for each in errors} == {"batch_expired"}
        assert all(each["response"] is None for each in errors)
        counts = found["request_counts"]
        assert (counts["completed"], counts["failed"]) == (len(output), len(errors))
        ids = [each["custom_id"] for each in output + errors]
        assert sorted(ids) == sorted(f"r{i}" for i in range(300))


async def test_a_restart_in_the_middle_loses_none_and_repeats_none(
    serve: Serve, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.pause = 0.005
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        batch = await create(client, await upload(client, jsonl(*(line(f"r{i}") for i in range(60)))))

        async def has_some() -> bool:
            found = (await client.get(f"/v1/batches/{batch['id']}")).json()
            return bool(found["request_counts"]["completed"] >= 5)

        await eventually(has_some, "some results")
    (tmp_path / "b" / "parts" / "left").write_bytes(b"half")
    (tmp_path / "b" / "files" / "file-left").write_bytes(b"half")
    async with serve(FakeEngine(), batch_dir=str(tmp_path / "b")) as client:
        found = await ended(client, batch)
        assert found["status"] == "completed"
        output = await lines_of(client, found["output_file_id"])
        assert [each["custom_id"] for each in output] == [f"r{i}" for i in range(60)]
        assert not (tmp_path / "b" / "parts" / "left").exists()
        assert not (tmp_path / "b" / "files" / "file-left").exists()


async def test_failures_of_the_server_are_tried_again(serve: Serve, tmp_path: Path) -> None:
    engine = FakeEngine(error=ShardFailed("lost"))
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        found = await ended(client, await create(client, await upload(client, jsonl(line("a")))))
        (only,) = await lines_of(client, found["error_file_id"])
        assert only["response"]["status_code"] == 424
        assert len(engine.requests) == 3
        text = (await client.get("/metrics")).text
        assert 'funitel_batch_requests_total{state="retried"} 2.0' in text
        assert 'funitel_batch_requests_total{state="failed"} 1.0' in text


async def test_without_a_folder_the_routes_name_the_flag(serve: Serve, engine: FakeEngine) -> None:
    async with serve(engine) as client:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches/b")):
            answer = await client.request(method, path)
            assert answer.status_code == 404
            assert "--batch-dir" in answer.json()["error"]["message"]


async def test_a_second_router_says_that_the_folder_is_taken_and_goes_on_once_it_is_free(
    serve: Serve, engine: FakeEngine, tmp_path: Path
) -> None:
    folder = str(tmp_path / "b")
    async with serve(engine, batch_dir=folder) as first:
        batch = await create(first, await upload(first, jsonl(line("a"))))
        await ended(first, batch)
        second = serve(FakeEngine(), batch_dir=folder)
        client = await second.__aenter__()
        answer = await client.get("/v1/batches")
        assert answer.status_code == 503
        assert "another router has it" in answer.json()["error"]["message"]

    async def is_open() -> bool:
        return (await client.get("/v1/batches")).status_code == 200

    await eventually(is_open, "taken")
    assert (await client.get(f"/v1/batches/{batch['id']}")).json()["status"] == "completed"
    await second.__aexit__(None, None, None)


async def test_a_folder_that_cannot_be_made(serve: Serve, engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "b").write_text("a file")
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        answer = await client.get("/v1/batches")
        assert answer.status_code == 503
        assert "--batch-dir" in answer.json()["error"]["message"]


# Keys ---------------------------------------------------------------------------------------------------------------

Keys = Callable[..., Path]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Writes the file of keys: the limits and scopes of each, by its name, which with `-key` is the key too."""

    def write(**records: dict[str, Any]) -> Path:
        path = tmp_path / "keys"
        lines = [
            json.dumps({"name": name, "sha256": digest_of(f"{name}-key".encode()).hex()} | record)
            for name, record in records.items()
        ]
        path.write_text("\n".join(lines))
        return path

    return write


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_files_and_batches_belong_to_their_key(
    serve: Serve, engine: FakeEngine, tmp_path: Path, keys: Keys
) -> None:
    path = keys(alpha={}, beta={})
    async with serve(engine, ready=False, batch_dir=str(tmp_path / "b"), api_key_file=str(path)) as client:
        alpha, beta = bearer("alpha-key"), bearer("beta-key")
        await _ready(client)
        file_id = await upload(client, jsonl(line("a")), **alpha)
        refused = await client.post(
            "/v1/batches",
            json={"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"},
            headers=beta,
        )
        assert refused.status_code == 400
        batch = await create(client, file_id, headers=alpha)
        found = await ended(client, batch, **alpha)
        assert found["status"] == "completed"
        for other in (f"/v1/batches/{batch['id']}", f"/v1/files/{file_id}", f"/v1/files/{found['output_file_id']}"):
            assert (await client.get(other, headers=beta)).status_code == 404
            assert (await client.get(other)).status_code == 401
        assert (await client.get("/v1/files", headers=beta)).json()["data"] == []
        text = (await client.get("/metrics")).text
        assert 'funitel_key_tokens_total{key="alpha",kind="completion"}' in text
        assert {request.key_name for request in engine.requests} == {"alpha"}


async def _ready(client: httpx.AsyncClient) -> None:
    async def is_ready() -> bool:
        return (await client.get("/health")).status_code == 200

    await eventually(is_ready, "ready")


async def test_a_quota_that_is_used_up_pauses_the_batch(
    serve: Serve, engine: FakeEngine, tmp_path: Path, keys: Keys
) -> None:
    path = keys(alpha={"max_concurrent_requests": 1, "requests_per_minute": 40})
    async with serve(engine, ready=False, batch_dir=str(tmp_path / "b"), api_key_file=str(path)) as client:
        alpha = bearer("alpha-key")
        await _ready(client)
        batch = await create(
            client, await upload(client, jsonl(*(line(f"r{i}") for i in range(60))), **alpha), headers=alpha
        )

        async def is_used_up() -> bool:
            refused = 'funitel_key_refused_total{key="alpha",reason="requests"}'
            return refused in (await client.get("/metrics")).text

        await eventually(is_used_up, "used up")
        assert len(engine.requests) < 60
        keys(alpha={"max_concurrent_requests": 1})

        async def is_reloaded() -> bool:
            return (await client.get("/v1/batches", headers=alpha)).status_code == 200

        await eventually(is_reloaded, "reloaded")
        found = await ended(client, batch, **alpha)
        assert found["request_counts"] == {"total": 60, "completed": 60, "failed": 0}


async def test_models_that_a_key_is_not_for_are_errors_of_lines(
    serve: Serve, engine: FakeEngine, tmp_path: Path, keys: Keys, model: Path
) -> None:
    path = keys(alpha={"models": ["tgi", str(model)]})
    async with serve(engine, ready=False, batch_dir=str(tmp_path / "b"), api_key_file=str(path)) as client:
        alpha = bearer("alpha-key")
        await _ready(client)
        content = jsonl(line("a"), line("b", model="other"))
        found = await ended(
            client, await create(client, await upload(client, content, **alpha), headers=alpha), **alpha
        )
        assert [(each["line"], each["code"]) for each in found["errors"]["data"]] == [(2, "model_not_found")]


# A full disk --------------------------------------------------------------------------------------------------------


async def test_a_full_disk_fails_the_batch_in_one_clear_line(
    serve: Serve, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    record = runner_module.BatchStore.record

    def full(self: Any, *args: Any) -> bool:
        nonlocal written
        written += 1
        if written > 3:
            self._db.execute("PRAGMA max_page_count = 1")  # no page more than there are
            with self._transaction() as db:
                db.execute("UPDATE requests SET content = zeroblob(100000)")
        return bool(record(self, *args))

    monkeypatch.setattr(runner_module.BatchStore, "record", full)
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        found = await ended(client, await create(client, await upload(client, jsonl(*map(line, "abcdef")))))
        assert found["status"] == "failed"
        (error,) = found["errors"]["data"]
        assert error["code"] == "storage_failed"
        assert "full" in error["message"]
        assert found["output_file_id"] is None
    with sqlite3.connect(tmp_path / "b" / "batches.sqlite3") as db:
        assert db.execute("SELECT count(*) FROM requests").fetchone() == (0,)


# Another router takes over ------------------------------------------------------------------------------------------


async def test_a_router_that_hands_over_gives_the_folder_to_the_next(
    serve: Serve, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.pause = 0.02
    folder = str(tmp_path / "b")
    async with serve(engine, batch_dir=folder) as first, serve(FakeEngine(), batch_dir=folder) as second:
        batch = await create(first, await upload(first, jsonl(*(line(f"r{i}") for i in range(80)))))

        async def has_some() -> bool:
            found = (await first.get(f"/v1/batches/{batch['id']}")).json()
            return bool(found["request_counts"]["completed"] >= 2)

        await eventually(has_some, "some results")
        transport = first._transport
        assert isinstance(transport, httpx.ASGITransport)
        transport.app.state.service.drain.hand_over()  # type: ignore[attr-defined]

        async def is_taken() -> bool:
            return (await second.get("/v1/batches")).status_code == 200

        await eventually(is_taken, "taken")
        assert (await first.get("/v1/batches")).status_code == 503
        found = await ended(second, batch)
        output = await lines_of(second, found["output_file_id"])
        assert [each["custom_id"] for each in output] == [f"r{i}" for i in range(80)]


async def test_a_drain_starts_no_requests_and_lets_those_under_way_end(
    serve: Serve, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.pause = 0.02
    async with serve(engine, batch_dir=str(tmp_path / "b")) as client:
        batch = await create(client, await upload(client, jsonl(*(line(f"r{i}") for i in range(200)))))

        async def has_some() -> bool:
            return len(engine.requests) >= 10

        await eventually(has_some, "some requests")
        transport = client._transport
        assert isinstance(transport, httpx.ASGITransport)
        drain = transport.app.state.service.drain  # type: ignore[attr-defined]
        drain.begin()
        count = len(engine.requests)

        async def has_drained() -> bool:
            return bool(drain.num_running == 0)

        await eventually(has_drained, "drained")
        assert len(engine.requests) <= count + 1
        assert not engine.cancelled
    async with serve(FakeEngine(), batch_dir=str(tmp_path / "b")) as client:
        found = (await client.get(f"/v1/batches/{batch['id']}")).json()
        assert found["request_counts"]["completed"] + found["request_counts"]["failed"] <= 200
        found = await ended(client, batch)
        assert found["request_counts"]["completed"] == 200
