"""A router is lost with its host, keeper and all: its streams end, and cannot be followed at the next router."""

from pathlib import Path

import httpx
import pytest

from funitel_testing.faults.model import save_endless
from funitel_testing.faults.scenes import by_hand

ID = "lost-with-its-host"


def test_a_stream_that_was_lost_with_its_router_is_not_found(tmp_path: Path) -> None:
    model = save_endless(tmp_path / "model")
    with by_hand(model, tmp_path) as scene, httpx.Client(base_url=scene.url, timeout=60) as client:
        body = {"inputs": "a", "parameters": {"max_new_tokens": 1000, "ignore_eos_token": True}}
        headers = {"x-resume-seconds": "30", "x-request-id": ID}
        with client.stream("POST", "/generate_stream", json=body, headers=headers) as answer:
            pieces = answer.iter_bytes()
            assert next(pieces).startswith(b"id: 1\n")
            scene.router.process.kill()
            with pytest.raises(httpx.TransportError):
                for _ in pieces:
                    pass
        scene.router.process.wait()
        scene.router.start_again()
        scene.until_whole()
        again = client.get(f"/v1/requests/{ID}/stream", params={"after": 1})
        assert again.status_code == 404
        assert ID in again.text
        repeated = client.post("/generate", json=body | {"parameters": {"max_new_tokens": 3}}, headers=headers)
        assert repeated.status_code == 200
