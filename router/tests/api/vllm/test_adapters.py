"""Adapters over HTTP: how requests of each API name one, vLLM's calls to load and unload, and the list of models."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapter_folders import write_adapter
from fakes import FakeEngine, Serve, eventually

from funitel.proto.errors import InvalidRequest
from funitel.proto.security.keys import Key, digest_of
from funitel.proto.settings.adapter_list import AdapterList
from funitel.router.core.request import Adapter

CHAT = [{"role": "user", "content": "Hi"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "Hi", "parameters": {"adapter_id": "mine"}}),
    ("/generate_stream", {"inputs": "Hi", "parameters": {"adapter_id": "mine"}}),
    ("/", {"inputs": "Hi", "parameters": {"adapter_id": "mine"}}),
    ("/invocations", {"inputs": "Hi", "parameters": {"adapter_id": "mine"}}),
    ("/vertex", {"instances": [{"inputs": "Hi", "parameters": {"adapter_id": "mine"}}]}),
    (
        "/v2/models/any/versions/1/infer",
        {
            "inputs": [{"name": "a", "shape": [1], "datatype": "BYTES", "data": ["Hi"]}],
            "outputs": [{"name": "b"}],
            "parameters": {"adapter_id": "mine"},
        },
    ),
    ("/v1/chat/completions", {"model": "mine", "messages": CHAT}),
    ("/v1/chat/completions", {"model": "mine", "messages": CHAT, "stream": True}),
    ("/v1/completions", {"model": "mine", "prompt": "Hi"}),
    ("/v1/completions", {"model": "mine", "prompt": ["Hi", "Ho"], "n": 2}),
    ("/v1/responses", {"model": "mine", "input": "Hi"}),
    ("/v1/messages", {"model": "mine", "messages": CHAT, "max_tokens": 4}),
]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(takes_adapters=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the adapters `mine` and `yours`."""
    for name in ("mine", "yours"):
        write_adapter(tmp_path / "adapters" / name)
    return tmp_path / "adapters"


def listing(root: Path, *names: str) -> dict[str, Any]:
    return {"lora_adapters": AdapterList(",".join(f"{name}={root / name}" for name in names))}


async def loaded(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/load_lora_adapter", json=body)


async def unloaded(client: httpx.AsyncClient, name: str) -> httpx.Response:
    return await client.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def says(client: httpx.AsyncClient, words: str) -> bool:
    return words in (await client.get("/health")).text


def problem(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["message"].removeprefix("Input validation error: "), error["param"]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_every_api_names_an_adapter(
    serve: Serve, engine: FakeEngine, root: Path, path: str, body: dict[str, Any]
) -> None:
    async with serve(engine, **listing(root, "mine", "yours")) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
    assert [request.adapter and request.adapter.name for request in engine.requests] == ["mine"] * len(engine.requests)
    assert engine.requests


@pytest.mark.parametrize("asked", [None, "", "tgi", "served", "anything", "gpt-4"])
async def test_any_other_model_is_the_model_itself(
    serve: Serve, engine: FakeEngine, root: Path, asked: str | None
) -> None:
    async with serve(engine, served_model_name="served", **listing(root, "mine")) as client:
        response = await client.post("/v1/chat/completions", json={"model": asked, "messages": CHAT})
        assert response.status_code == 200
    assert engine.requests[0].adapter is None


async def test_an_unknown_adapter_id_is_refused(serve: Serve, engine: FakeEngine, root: Path) -> None:
    async with serve(engine, **listing(root, "mine")) as client:
        response = await client.post("/generate", json={"inputs": "Hi", "parameters": {"adapter_id": "other"}})
    assert response.status_code == 422
    assert response.json()["error"].endswith("`adapter_id` must be the name of an adapter. Given: 'other'")
    assert not engine.requests


async def test_models_lists_the_base_and_its_adapters(serve: Serve, engine: FakeEngine, root: Path) -> None:
    async with serve(engine, served_model_name="served", **listing(root, "mine")) as client:
        base, mine = (await client.get("/v1/models")).json()["data"]
        assert (base["id"], base["root"], "parent" in base) == ("served", "served", False)
        assert (mine["id"], mine["root"], mine["parent"]) == ("mine", str(root / "mine"), "served")
        assert (await client.get("/v1/models/mine")).json() == mine
        assert (await client.get("/info")).json()["lora_adapters"] == ["mine"]


async def test_adapters_of_the_settings_are_loaded_at_start_and_the_first_stay(
    serve: Serve, engine: FakeEngine, root: Path
) -> None:
    async with serve(engine, **listing(root, "mine", "yours")):
        assert [adapter.name for adapter in engine.loaded] == ["yours", "mine"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("mine=/nowhere", "--lora-adapters mine=/nowhere: `lora_path` must be a folder"),
        ("served=/nowhere", "--lora-adapters served=/nowhere: 'served' is a name of the model itself"),
        ("tgi=/nowhere", "--lora-adapters tgi=/nowhere: 'tgi' is a name of the model itself"),
    ],
)
async def test_an_adapter_that_cannot_be_served_ends_the_start(
    serve: Serve, engine: FakeEngine, names: str, words: str
) -> None:
    settings = {"lora_adapters": AdapterList(names), "served_model_name": "served"}
    async with serve(engine, ready=False, **settings) as client:
        await eventually(lambda: says(client, words), words)


async def test_a_folder_that_is_not_there_ends_the_start(serve: Serve, engine: FakeEngine) -> None:
    async with serve(engine, ready=False, lora_folder="/nowhere") as client:
        words = "--lora-folder must be a folder, given /nowhere"
        await eventually(lambda: says(client, words), words)


async def test_shards_without_adapters_end_the_start(serve: Serve, root: Path) -> None:
    async with serve(FakeEngine(), ready=False, **listing(root, "mine")) as client:
        words = "--lora-adapters: the shards of this model take no adapters"
        await eventually(lambda: says(client, words), words)


async def test_vllms_calls_load_and_unload(serve: Serve, engine: FakeEngine, root: Path) -> None:
    async with serve(engine, lora_folder=str(root)) as client:
        response = await loaded(client, lora_name="sql", lora_path="mine")
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert response.headers["content-type"].startswith("text/plain")
        assert (await client.post("/v1/completions", json={"model": "sql", "prompt": "Hi"})).status_code == 200
        asked = engine.requests[0].adapter
        assert asked is not None
        assert asdict(asked) == asdict(engine.loaded[0]) | {"name": "sql", "path": str(root / "mine")}
        response = await unloaded(client, "sql")
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert engine.retired == [asked]
        assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]][1:] == []
        for path, body in (("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": CHAT})):
            response = await client.post(path, json={"model": "sql"} | body)
            assert problem(response) == (404, "the adapter 'sql' was unloaded", "model")
        assert (await loaded(client, lora_name="sql", lora_path="mine")).status_code == 200
        assert (await client.post("/v1/completions", json={"model": "sql", "prompt": "Hi"})).status_code == 200


async def test_an_adapter_is_replaced_in_place_and_its_requests_go_on(
    serve: Serve, engine: FakeEngine, root: Path
) -> None:
    async with serve(engine, lora_folder=str(root)) as client:
        await loaded(client, lora_name="sql", lora_path="mine")
        again = await loaded(client, lora_name="sql", lora_path="mine")
        assert problem(again) == (400, "The lora adapter 'sql' has already been loaded.", "lora_name")
        assert (await loaded(client, lora_name="sql", lora_path="mine", load_inplace=True)).status_code == 200
        assert engine.retired == []  # the same files
        write_adapter(root / "mine", r=4)
        assert (await loaded(client, lora_name="sql", lora_path="mine", load_inplace=True)).status_code == 200
        assert engine.retired == [engine.loaded[0]]
        assert engine.loaded[-1].id != engine.loaded[0].id


async def test_pins_leave_a_place_for_others(serve: Serve, engine: FakeEngine, root: Path) -> None:
    async with serve(engine, lora_folder=str(root), max_loras=2) as client:
        assert (await loaded(client, lora_name="one", lora_path="mine", pinned=True)).status_code == 200
        response = await loaded(client, lora_name="two", lora_path="yours", pinned=True)
        assert problem(response) == (400, "`pinned` adapters must be fewer than --max-loras 2. Given: 2", "pinned")
        assert [adapter.name for adapter in engine.pinned] == ["one"]


async def test_pins_at_once_leave_a_place_for_others(
    serve: Serve, engine: FakeEngine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_loading, may_load, load = asyncio.Event(), asyncio.Event(), engine.load_adapter

    async def load_slowly(adapter: Adapter, *, is_pinned: bool = False) -> None:
        is_loading.set()
        await may_load.wait()
        await load(adapter, is_pinned=is_pinned)

    monkeypatch.setattr(engine, "load_adapter", load_slowly)
    async with serve(engine, lora_folder=str(root), max_loras=2) as client:
        going_on = asyncio.create_task(loaded(client, lora_name="one", lora_path="mine", pinned=True))
        await is_loading.wait()
        response = await loaded(client, lora_name="two", lora_path="yours", pinned=True)
        assert problem(response) == (400, "`pinned` adapters must be fewer than --max-loras 2. Given: 2", "pinned")
        response = await loaded(client, lora_name="one", lora_path="mine", pinned=True)
        assert problem(response) == (400, "The lora adapter 'one' is being loaded.", "lora_name")
        may_load.set()
        assert (await going_on).status_code == 200
        assert [adapter.name for adapter in engine.pinned] == ["one"]
        assert (await unloaded(client, "one")).status_code == 200
        assert (await loaded(client, lora_name="two", lora_path="yours", pinned=True)).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words", "param"),
    [
        ({"lora_path": "mine"}, 400, "lora_name: this field is required", "lora_name"),
        ({"lora_name": "a"}, 400, "lora_path: this field is required", "lora_path"),
        ({"lora_name": "", "lora_path": "mine"}, 400, "`lora_name` is empty. Given: ''", "lora_name"),
        ({"lora_name": "a,b", "lora_path": "mine"}, 400, "`lora_name` has a comma", "lora_name"),
        ({"lora_name": "served", "lora_path": "mine"}, 400, "must not be a name of the model itself", "lora_name"),
        ({"lora_name": "tgi", "lora_path": "mine"}, 400, "must not be a name of the model itself", "lora_name"),
        ({"lora_name": "a", "lora_path": ""}, 400, "`lora_path` cannot be empty", "lora_path"),
        ({"lora_name": "a", "lora_path": "/etc"}, 400, "below the folder of --lora-folder. Given: '/etc'", "lora_path"),
        ({"lora_name": "a", "lora_path": "none"}, 404, "`lora_path` must be a folder. Given: 'none'", "lora_path"),
        ({"lora_name": "bad", "lora_path": "mine"}, 400, "of another base", "lora_path"),
    ],
)
async def test_what_cannot_be_loaded_is_one_line_and_leaves_nothing(
    serve: Serve, engine: FakeEngine, root: Path, body: dict[str, Any], status: int, words: str, param: str
) -> None:
    engine.refused["bad"] = InvalidRequest("adapter 'bad' cannot be loaded: of another base", "adapter_id")
    async with serve(engine, lora_folder=str(root), served_model_name="served") as client:
        found = problem(await loaded(client, **body))
        assert (found[0], found[2]) == (status, param)
        assert words in found[1]
        assert len((await client.get("/v1/models")).json()["data"]) == 1
    assert engine.loaded == []


async def test_without_the_folder_nothing_changes_at_run_time(serve: Serve, engine: FakeEngine, root: Path) -> None:
    async with serve(engine, **listing(root, "mine")) as client:
        response = await loaded(client, lora_name="a", lora_path=str(root / "mine"))
        assert response.status_code == 400
        assert "--lora-folder" in problem(response)[1]
        response = await unloaded(client, "mine")
        assert response.status_code == 400
        assert "--lora-folder" in problem(response)[1]


async def test_an_adapter_that_is_not_there_cannot_be_unloaded(serve: Serve, engine: FakeEngine, root: Path) -> None:
    async with serve(engine, lora_folder=str(root)) as client:
        assert problem(await unloaded(client, "none"))[:2] == (404, "The lora adapter 'none' cannot be found.")
        assert problem(await unloaded(client, ""))[0] == 400


async def test_only_keys_that_list_the_routes_change_adapters(
    serve: Serve, engine: FakeEngine, root: Path, tmp_path: Path
) -> None:
    keys = [
        Key(name="user", digest=digest_of(b"user")),
        Key(name="base-only", digest=digest_of(b"base"), models=("served",)),
        Key(name="operator", digest=digest_of(b"operator"), routes=("/v1/load_lora_adapter",)),
        Key(name="team", digest=digest_of(b"team"), routes=("/v1/*",)),
    ]
    lines = [
        json.dumps(
            {"name": key.name, "sha256": key.digest.hex()}
            | ({"routes": list(key.routes)} if key.routes else {})
            | ({"models": list(key.models)} if key.models else {})
        )
        for key in keys
    ]
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    settings = {"api_key_file": str(file), "lora_folder": str(root), "served_model_name": "served"}
    body = {"lora_name": "sql", "lora_path": "mine"}

    def header(key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"}

    async with serve(engine, api_key="setting", **settings) as client:
        answers = {}
        for key in ("none", "user", "team", "operator"):
            response = await client.post("/v1/load_lora_adapter", json=body, headers=header(key))
            answers[key] = response.status_code
        assert answers == {"none": 401, "user": 403, "team": 403, "operator": 200}
        removal = {"lora_name": "sql"}
        response = await client.post("/v1/unload_lora_adapter", json=removal, headers=header("setting"))
        assert response.status_code == 200
        await client.post("/v1/load_lora_adapter", json=body, headers=header("setting"))
        asked = {"inputs": "Hi", "parameters": {"adapter_id": "sql"}}
        assert (await client.post("/generate", json=asked, headers=header("user"))).status_code == 200
        assert (await client.post("/generate", json=asked, headers=header("base"))).status_code == 403
