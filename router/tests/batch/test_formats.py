"""Lines of input files, and room for batches."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sequences import BLOCK, make_sequence

from funitel.router.batch.formats import MAX_ERRORS, BatchAnswer, InputCheck, InputRules, answer_line, check_input
from funitel.router.batch.records import BatchRequest
from funitel.router.batch.room import Room
from funitel.router.core.request import background_key
from funitel.router.engine.snapshot import EngineView
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.plan import SchedulerPolicy
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.settings import MEDIA_PAYLOAD_LIMIT

RULES = InputRules("/v1/completions", 1000, 200, lambda model: None if model == "known" else f"no {model}")
BATCH = background_key(b"a")


def line(name: str, **changes: Any) -> bytes:
    request = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": "known"}}
    return json.dumps(request | changes).encode()


def checked(path: Path, content: bytes, rules: InputRules = RULES) -> tuple[list[BatchRequest], InputCheck]:
    path.write_bytes(content)
    check = InputCheck()
    return list(check_input(path, rules, check)), check


def test_each_request_has_its_line_and_its_bytes(tmp_path: Path) -> None:
    content = b"\n".join([line("a"), b"", line("ü"), line("c")])
    requests, check = checked(tmp_path / "in", content)
    assert not check.errors
    assert check.num_requests == 3
    assert [(each.line, each.custom_id) for each in requests] == [(1, "a"), (3, "ü"), (4, "c")]
    for each in requests:
        assert json.loads(content[each.offset : each.offset + each.length])["custom_id"] == each.custom_id


def test_a_line_that_is_too_long_is_skipped_and_the_next_is_read(tmp_path: Path) -> None:
    content = b"\n".join([line("a", body={"prompt": "x" * 5000, "model": "known"}), line("b"), b"x" * 201])
    requests, check = checked(tmp_path / "in", content)
    assert [each.line for each in requests] == [2]
    assert [(each.line, each.code) for each in check.errors] == [(1, "request_too_large"), (3, "request_too_large")]
    assert check.errors[0].message.startswith("a line has at most 200 bytes")


def test_the_first_hundred_errors_are_told(tmp_path: Path) -> None:
    requests, check = checked(tmp_path / "in", b"{\n" * 500)
    assert not requests
    assert len(check.errors) == MAX_ERRORS


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"body": {"model": "other"}}, "model_not_found", "no other"),
        ({"body": {"model": "known", "background": True}}, "unsupported_parameter", "background"),
        ({"custom_id": "x" * 600}, "invalid_custom_id", "1 to 512 characters"),
        ({"custom_id": ""}, "invalid_custom_id", "Given"),
        ({"body": None}, "invalid_body", "null"),
        ({"method": None}, "invalid_method", "POST"),
    ],
)
def test_what_is_wrong_with_a_line(tmp_path: Path, changes: dict[str, Any], code: str, said: str) -> None:
    rules = InputRules("/v1/completions", 10, 2000, RULES.check_model)
    _, check = checked(tmp_path / "in", line("a", **changes), rules)
    (error,) = check.errors
    assert error.code == code
    assert said in error.message
    assert len(error.message) < 500


def test_half_a_surrogate_pair_is_an_error_of_its_line(tmp_path: Path) -> None:
    wrong = b'{"custom_id": "a\\ud800", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    found, check = checked(tmp_path / "in", line("good") + b"\n" + wrong)
    assert [each.custom_id for each in found] == ["good"]
    (error,) = check.errors
    assert (error.code, error.line, error.param) == ("invalid_custom_id", 2, "custom_id")
    assert "surrogate" in error.message


def test_nesting_without_end_is_an_error_of_its_line(tmp_path: Path) -> None:
    rules = InputRules("/v1/completions", 10, 1_000_000, RULES.check_model)
    _, check = checked(tmp_path / "in", b"[" * 200_000, rules)
    assert [each.code for each in check.errors] == ["invalid_json_line"]


def test_a_large_line_of_lists_is_not_parsed(tmp_path: Path) -> None:
    rules = InputRules("/v1/completions", 10, MEDIA_PAYLOAD_LIMIT, RULES.check_model)
    begin = time.process_time()
    _, check = checked(tmp_path / "in", b"[" + b"[]," * 20_000_000 + b"1]", rules)
    assert time.process_time() - begin < 3  # and not some 15 s
    assert [each.code for each in check.errors] == ["request_too_large"]


def test_an_answer_is_put_in_as_it_is() -> None:
    answer = BatchAnswer(200, b'{"id": "cmpl-1", "text": "\\u00fc"}', "req-1")
    result = answer_line(BatchRequest(3, 'a"b', 0, 1), answer)
    assert result.is_success
    assert result.content is not None
    found = json.loads(result.content)
    assert found.pop("id").startswith("batch_req_")
    body = {"id": "cmpl-1", "text": "ü"}
    response = {"status_code": 200, "request_id": "req-1", "body": body}
    assert found == {"custom_id": 'a"b', "response": response, "error": None}


# Room ---------------------------------------------------------------------------------------------------------------


def view(scheduler: Scheduler) -> EngineView:
    return cast(EngineView, SimpleNamespace(scheduler=scheduler))


def scheduler(num_blocks: int = 100, **policy: Any) -> Scheduler:
    return Scheduler(SchedulerPolicy(**{"max_batch_prefill_tokens": 64} | policy), BlockPool(num_blocks, BLOCK))


def running(of: Scheduler, *keys: bytes, prompt_len: int = 8) -> None:
    for i, key in enumerate(keys):
        of.add(make_sequence(i, prompt_len, 50, key=key))
    of.preempt()
    plan = of.schedule()
    assert plan is not None


def test_a_few_enter_at_once_and_no_more_than_half_of_all() -> None:
    room, idle = Room(16), scheduler()
    assert room.has_room(3, [view(idle)])
    assert not room.has_room(4, [view(idle)])
    assert room.has_room(7, [view(idle), view(scheduler())])
    assert not room.has_room(8, [view(idle), view(scheduler())])
    assert room.has_room(1, [])
    assert not room.has_room(2, [])


def test_none_is_started_while_another_waits_or_memory_is_short() -> None:
    room, busy = Room(128), scheduler()
    running(busy, BATCH)
    assert room.has_room(1, [view(busy)])
    busy.add(make_sequence(9, 8, 5, key=b"a"))
    assert not room.has_room(1, [view(busy)])
    full = scheduler(num_blocks=16)
    running(full, b"a", prompt_len=60)
    assert not room.has_room(0, [view(full)])
    assert room.has_room(0, [view(full), view(scheduler())])
    slots = scheduler(max_batch_size=1)
    running(slots, b"a")
    assert not room.has_room(0, [view(slots)])
