"""Which model a request means, which service answers it, and what it is told where there is none."""

import asyncio
from pathlib import Path

import httpx
import pytest
from adapter_folders import write_adapter
from fake_control import FakeControl, fake_fleet
from fakes import FakeEngine

from funitel.proto.security.keys import Key, digest_of, line_of


def pieces(address: str) -> FakeEngine:
    """An engine that says which model it is."""
    return FakeEngine(pieces=(address.partition(":///")[2].partition("-")[0],))


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["text"]
    return said


async def test_each_request_is_answered_by_the_model_that_it_names(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta", make=pieces) as fleet:
        answers = await asyncio.gather(*(fleet.generate(name) for name in ("beta", "alpha", "owner/beta")))
        assert [text(answer) for answer in answers] == ["beta", "alpha", "beta"]
        assert [answer.json()["model"] for answer in answers] == ["beta", "alpha", "owner/beta"]


@pytest.mark.parametrize("name", [None, "", "tgi"])
async def test_without_a_name_the_default_answers(tmp_path: Path, name: str | None) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta", make=pieces) as fleet:
        assert text(await fleet.generate(name)) == "alpha"
        fleet.control.default = "beta"
        fleet.control.push()
        await asyncio.sleep(0.05)
        answer = await fleet.generate(name)
        assert (text(answer), answer.json()["model"]) == ("beta", "beta")


async def test_with_one_model_any_name_means_it(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", make=pieces) as fleet:
        assert text(await fleet.generate("gpt-4o")) == "alpha"
        assert (await fleet.client.get("/v1/models/gpt-4o")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": "Hi"}, lambda body: (body["error"]["code"], body["error"]["message"])),
        ("/v1/embeddings", {"input": "Hi"}, lambda body: (body["error"]["code"], body["error"]["message"])),
        ("/generate", {"inputs": "Hi"}, lambda body: ("model_not_found", body["error"])),
        ("/tokenize", {"inputs": "Hi"}, lambda body: ("model_not_found", body["error"])),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
            lambda body: ("model_not_found", body["error"]["message"]),
        ),
    ],
)
async def test_an_unknown_name_is_404_with_the_names(tmp_path: Path, path: str, body: object, words: object) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta") as fleet:
        answer = await fleet.client.post(path, json={"model": "gpt-4o", **body})  # type: ignore[dict-item]
        assert answer.status_code == 404
        code, message = words(answer.json())  # type: ignore[operator]
        assert code == "model_not_found"
        assert message == "no model is named 'gpt-4o'; those here are 'alpha', 'beta'"


async def test_no_model_at_all(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path) as fleet:
        named, unnamed = await fleet.generate("alpha"), await fleet.generate(None)
        assert (named.status_code, unnamed.status_code) == (404, 503)
        assert "no model is launched" in named.text
        assert "no model is launched" in unnamed.text
        assert (await fleet.client.get("/health")).status_code == 200
        assert (await fleet.client.get("/v1/models")).json() == {"object": "list", "data": []}
        assert (await fleet.client.get("/info")).status_code == 503


async def test_huge_numbers_of_unknown_names_are_not_kept(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta") as fleet:
        for number in range(300):
            assert (await fleet.generate(f"name-{number}")).status_code == 404
        models = fleet.app.state.models
        assert len(models) == 2
        assert not [asked for asked in fleet.control.asked if "load" in asked.target]
        page = (await fleet.client.get("/metrics")).text
        assert "name-" not in page


async def test_names_are_chosen_on_every_kind_of_route(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    async with fake_fleet(tmp_path, "alpha", "beta", make=pieces) as fleet:
        asked = [
            ("/generate", {"model": "beta", "inputs": "Hi"}),
            ("/v1/chat/completions", {"model": "beta", "messages": chat}),
            ("/v1/responses", {"model": "beta", "input": "Hi"}),
            ("/v1/messages", {"model": "beta", "max_tokens": 5, "messages": chat}),
            ("/inferflow", {"model": "beta", "text": "Hi", "is_streaming_mode": False}),
            ("/vertex", {"model": "beta", "instances": [{"inputs": "Hi"}]}),
            ("/invocations", {"model": "beta", "inputs": "Hi"}),
            ("/", {"model": "beta", "inputs": "Hi"}),
            ("/v2/models/beta/versions/1/infer", KSERVE),
        ]
        for path, body in asked:
            before = len(fleet.engine("beta").requests)
            answer = await fleet.client.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
            assert len(fleet.engine("beta").requests) == before + 1, path
        assert not fleet.engine("alpha").requests
        fleet.control.add("owner/gamma", replicas=1)["replicas"][0]["address"] = "unix:///gamma-0"
        fleet.control.push()
        await fleet.attached("owner/gamma")
        for name in ("owner/gamma", "owner%2Fgamma"):
            assert (await fleet.client.post(f"/v2/models/{name}/versions/1/infer", json=KSERVE)).status_code == 200
        assert len(fleet.engine("gamma").requests) == 2
        unknown = await fleet.client.post("/v2/models/gamma/versions/1/infer", json=KSERVE)
        assert unknown.status_code == 404


KSERVE = {
    "inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["Hi"]}],
    "outputs": [{"name": "y"}],
}


async def test_a_body_over_the_limit_is_refused_before_a_model_is_chosen(tmp_path: Path) -> None:
    async with fake_fleet(tmp_path, "alpha", "beta", payload_limit=1000) as fleet:
        answer = await fleet.generate("alpha", prompt="x" * 2000)
        assert answer.status_code == 413
        text_body = await fleet.client.post(
            "/v1/completions", content=b"{", headers={"content-type": "application/json"}
        )
        assert text_body.status_code == 400
        no_json = await fleet.client.post("/v1/completions", content=b"x", headers={"content-type": "text/plain"})
        assert no_json.status_code == 415


async def test_a_key_is_for_the_models_that_it_lists(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line_of(Key(name="reader", digest=digest_of(b"sesame"), models=("beta",))) + "\n")
    async with fake_fleet(tmp_path, "alpha", "beta", make=pieces, api_key_file=str(keys)) as fleet:
        fleet.client.headers["authorization"] = "Bearer sesame"
        assert text(await fleet.generate("beta")) == "beta"
        assert (await fleet.generate("alpha")).status_code == 403
        assert (await fleet.generate("owner/alpha")).status_code == 403
        assert (await fleet.generate(None)).status_code == 403  # the default is alpha
        kserve = await fleet.client.post("/v2/models/alpha/versions/1/infer", json=KSERVE)
        assert kserve.status_code == 403
        fleet.client.headers.pop("authorization")
        assert (await fleet.generate("beta")).status_code == 401


async def test_the_default_suits_the_task_of_the_route(tmp_path: Path) -> None:
    def prepare(control: FakeControl) -> None:
        control.add("minilm", task="embed", state="registered")
        control.add("alpha", replicas=1)
        control.default = "minilm"

    async with fake_fleet(tmp_path, prepare=prepare, make=pieces, wait_for_load=0) as fleet:
        assert text(await fleet.generate(None)) == "alpha"
        answer = await fleet.client.post("/embed", json={"inputs": "Hi"})
        assert answer.status_code == 503  # it is not loaded
        assert "'minilm'" in answer.text
        fleet.control.default = "alpha"
        fleet.control.push()
        answer = await fleet.client.post("/embed", json={"inputs": "Hi"})
        assert "'minilm'" in answer.text


async def test_an_adapter_names_its_model(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    write_adapter(folder / "sql")

    def make(address: str) -> FakeEngine:
        return FakeEngine(takes_adapters=True, pieces=(address.partition(":///")[2].partition("-")[0],))

    async with fake_fleet(tmp_path, "alpha", "beta", make=make, lora_folder=str(folder)) as fleet:
        body = {"lora_name": "sql", "lora_path": "sql", "base_model_name": "beta"}
        answer = await fleet.client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text
        assert text(await fleet.generate("sql")) == "beta"
        by_id = await fleet.client.post("/generate", json={"inputs": "Hi", "parameters": {"adapter_id": "sql"}})
        assert by_id.json()["generated_text"] == "beta"
        shown = (await fleet.client.get("/v1/models/sql")).json()
        assert shown["parent"] == "beta"
        answer = await fleet.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert answer.status_code == 200, answer.text
        assert (await fleet.generate("sql")).status_code == 404


async def test_an_adapter_that_is_listed_names_its_model_before_that_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "sql"
    write_adapter(folder)

    def prepare(control: FakeControl) -> None:
        control.add("alpha", replicas=1)
        control.add("beta")["router"]["lora_adapters"] = f"sql={folder}"
        control.add("gamma")["router"]["lora_adapters"] = ","  # is none
        control.on_load = control.load

    def make(address: str) -> FakeEngine:
        return FakeEngine(takes_adapters=True, pieces=(address.partition(":///")[2].partition("-")[0],))

    async with fake_fleet(tmp_path, prepare=prepare, make=make) as fleet:
        unknown = await fleet.generate("law")
        assert unknown.json()["error"]["message"] == (
            "no model is named 'law'; those here are 'alpha', 'beta', 'gamma', 'sql'"
        )
        assert text(await fleet.generate("sql")) == "beta"
        assert fleet.control.told("/v1/fleet/load") == [{"model": "beta"}]


async def test_what_the_router_s_own_model_does_is_told_without_what_others_do(tmp_path: Path) -> None:
    def make(address: str) -> FakeEngine:
        return FakeEngine(pause=0.05)

    async with fake_fleet(tmp_path, "beta", make=make, no_model=False) as fleet:
        assert len(fleet.app.state.models) == 2
        for _ in range(6):
            assert (await fleet.generate("beta", max_tokens=9)).status_code == 200
        own = fleet.app.state.models.own.model_id
        told = [each["models"] for each in await fleet.control.heard("/v1/fleet/activity", 2)]
        assert any(models.get("beta", {}).get("running") for models in told), told
        assert not any(models.get(own, {}).get("running") for models in told), told
