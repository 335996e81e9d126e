"""What a request, a token, a step and a start cost stays within the bounds of the table, in counts of work."""

import pytest

from funitel_testing.guard import table
from funitel_testing.guard.groups import COUNTED, checked, in_process, reason_to_skip

BOUNDS = table.read()


@pytest.mark.parametrize("group", COUNTED)
def test_counts_are_within_their_bounds(group: str) -> None:
    if reason := reason_to_skip(group, BOUNDS):
        pytest.skip(reason)
    findings = checked(group, BOUNDS)
    for finding in findings:
        print(finding.line)
    assert [finding.line for finding in findings if finding.is_over] == []
    assert any(not finding.is_skipped for finding in findings)


def test_one_call_or_system_call_more_for_each_token_is_over() -> None:
    rows = in_process("router", "more")
    bounds = {name: BOUNDS["router"][name] for name in rows}
    findings = {finding.name: finding for finding in table.check("router", rows, bounds)}
    assert findings["calls a token /generate_stream"].is_over
    system_calls = findings["system calls a token"]
    assert system_calls.is_over or system_calls.is_skipped


def test_a_count_over_its_bound_is_told_with_the_command_that_writes_bounds() -> None:
    [finding] = table.check("router", {"calls a token": 12.5}, {"calls a token": {"measured": 10, "bound": 11}})
    assert finding.is_over
    assert finding.line == f"router: calls a token: 12.50, bound 11.00; if it must be so: {table.COMMAND}"
    [within] = table.check("router", {"calls a token": 11.0}, {"calls a token": {"measured": 10, "bound": 11}})
    assert not within.is_over


def test_a_row_without_a_bound_and_a_bound_without_a_row_are_over() -> None:
    findings = table.check("shard", {"new": 1.0}, {"old": {"measured": 1, "bound": 2}})
    assert [(finding.name, finding.is_over) for finding in findings] == [("new", True), ("old", True)]
    assert all(table.COMMAND in finding.line for finding in findings)


def test_what_cannot_be_counted_is_skipped_with_its_reason() -> None:
    [finding] = table.check("router", {"calls": "ptrace: refused"}, {"calls": {"measured": 1, "bound": 2}})
    assert (finding.is_over, finding.is_skipped) == (False, True)
    assert "ptrace: refused" in finding.line


def test_bounds_of_other_tools_are_not_held() -> None:
    other = {"tools": {"python": "2.7", "compiler": "cfront 1"}, "start": {}}
    assert "python 2.7" in reason_to_skip("start", other)
    assert reason_to_skip("router", other) == ""


def test_a_count_that_is_over_by_chance_is_measured_again() -> None:
    counts = iter([{"modules": 9.0, "calls": 1.0}, {"modules": 4.0, "calls": 3.0}])
    bounds = {"start": {name: {"measured": 4.0, "bound": 5.0} for name in ("modules", "calls")}}
    assert not any(finding.is_over for finding in checked("start", bounds, lambda _: next(counts)))


def test_tolerances_are_known_for_every_row() -> None:
    for group, rows in BOUNDS.items():
        if group != "tools":
            for name, row in rows.items():
                allowed = row["measured"] + table.tolerance(f"{group} {name}", row["measured"])
                assert row["bound"] == pytest.approx(allowed, abs=0.02)
