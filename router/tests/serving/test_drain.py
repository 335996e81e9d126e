"""The drain of a service: no request stays paused, for a client cannot resume it any more."""

import asyncio
from pathlib import Path

import engines
import pytest
from engines import expected, request

from funitel.proto.errors import NotReady
from funitel.router.serving.service import Service
from funitel.router.settings import RouterSettings


@pytest.mark.parametrize("hands_over", [False, True])
async def test_paused_requests_go_on_once_the_server_drains(tmp_path: Path, *, hands_over: bool) -> None:
    async with engines.running(tmp_path) as (engine, _, _):
        service = Service(RouterSettings(tokenizer_name="tiny"))
        service._engine = engine
        asked = request(max_new_tokens=20)
        async with asyncio.timeout(5), engine.submit(asked) as stream:
            ids = list((await anext(stream)).tokens.ids)
            assert engine.paused.pause(stream)
            (service.drain.hand_over if hands_over else service.drain.begin)()
            assert not len(engine.paused)
            with pytest.raises(NotReady, match="shutting down"):
                engine.paused.pause(stream)
            async for generation in stream:
                ids += generation.tokens.ids
        assert ids == expected(asked)


async def test_a_drain_that_begins_before_the_engine_is_there() -> None:
    service = Service(RouterSettings(tokenizer_name="tiny"))
    service.drain.begin()
    assert service.drain.has_begun
