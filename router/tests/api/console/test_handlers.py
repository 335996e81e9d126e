"""The console's routes: files with their headers, live numbers and ended requests, and who may see them."""

from pathlib import Path

import pytest
from fakes import FakeEngine, Serve

from funitel.router.console.assets import assets

BODY = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}


async def test_the_first_page_is_below_its_address(serve: Serve) -> None:
    async with serve(FakeEngine()) as client:
        entered = await client.get("/ui")
        assert (entered.status_code, entered.headers["location"]) == (308, "ui/")
        page = await client.get("/ui/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.content == assets()["index.html"].content


async def test_a_file_is_sent_again_only_when_it_has_changed(serve: Serve) -> None:
    async with serve(FakeEngine()) as client:
        first = await client.get("/ui/app.js", headers={"accept-encoding": "gzip"})
        assert (first.status_code, first.headers["content-encoding"]) == (200, "gzip")
        plain = await client.get("/ui/app.js", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.content == first.content == assets()["app.js"].content
        again = await client.get("/ui/app.js", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["none.js", "vendor", "vendor/vendor.toml", "../app.py", "%2e%2e/app.py"])
async def test_what_is_no_file_of_the_console_is_not_found(serve: Serve, path: str) -> None:
    async with serve(FakeEngine()) as client:
        assert (await client.get(f"/ui/{path}")).status_code == 404


async def test_without_the_console_its_routes_are_not_there(serve: Serve) -> None:
    async with serve(FakeEngine(), console=False) as client:
        for path in ("/ui", "/ui/", "/ui/app.js", "/v1/console/live", "/v1/console/requests"):
            assert (await client.get(path)).status_code == 404


async def test_an_ended_request_is_listed_without_its_text(serve: Serve) -> None:
    async with serve(FakeEngine()) as client:
        await client.post("/generate", json=BODY, headers={"x-request-id": "mine"})
        await client.post("/generate", json={**BODY, "parameters": {"temperature": -1}})
        await client.get("/health")
        answer = await client.get("/v1/console/requests")
        failed, good = answer.json()["requests"]
        assert (good["id"], good["route"], good["status"], good["tokens"]) == ("mine", "/generate", 200, 2)
        assert (failed["status"], failed["error"]) == (422, "InvalidRequest")
        assert "hello" not in answer.text


async def test_live_numbers_count_requests(serve: Serve) -> None:
    async with serve(FakeEngine()) as client:
        await client.post("/generate", json=BODY)
        state = (await client.get("/v1/console/live")).json()
        (model,) = state["models"]
        assert model["now"]["requests"] == 1
        assert (await client.get("/v1/console/live?since=soon")).status_code == 400
        late = (await client.get(f"/v1/console/live?since={state['time'] + 1000}")).json()
        assert late["models"][0]["samples"] == []


async def test_a_key_sees_its_own_requests(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    async with serve(FakeEngine(), api_key_file=str(keys)) as client:
        assert (await client.get("/ui/")).status_code == 200
        for path in ("/v1/console/live", "/v1/console/requests"):
            assert (await client.get(path)).status_code == 401
        of = {name: {"authorization": f"Bearer {name}"} for name in ("one", "two")}
        await client.post("/generate", json=BODY, headers={**of["one"], "x-request-id": "first"})
        seen = {
            name: (await client.get("/v1/console/requests", headers=headers)).json() for name, headers in of.items()
        }
        assert [each["id"] for each in seen["one"]["requests"]] == ["first"]
        assert seen["two"]["requests"] == []
