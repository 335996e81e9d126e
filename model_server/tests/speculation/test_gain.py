"""Rows whose drafts are rejected ask for fewer, ever more rarely; rows whose drafts are accepted ask for all again."""

from funitel.model_server.speculation.gain import LEARNING, MAX_WAIT, POOR, Gains, RowGain


def drafted_steps(row: RowGain, num_steps: int, num_accepted: int, most: int = 4) -> list[int]:
    """The widths of so many steps, each drafted one with so many accepted."""
    widths = []
    for _ in range(num_steps):
        width = row.next_width(most)
        if width:
            row.observe(width, min(width, num_accepted), most)
        widths.append(width)
    return widths


def test_a_row_of_which_nothing_is_accepted_backs_off_exponentially() -> None:
    row = Gains().begin("class", 4)
    widths = drafted_steps(row, 1000, 0)
    drafted = [i for i, width in enumerate(widths) if width]
    gaps = [after - before for before, after in zip(drafted, drafted[1:], strict=False)]
    assert widths[0] == 4
    assert gaps == sorted(gaps)
    assert gaps[-1] == MAX_WAIT + 1
    assert sum(widths) < 0.03 * len(widths)


def test_a_row_with_accepted_drafts_asks_for_all_in_every_step() -> None:
    row = Gains().begin("class", 4)
    drafted_steps(row, 20, 0)
    row.wait = 0
    assert drafted_steps(row, 6, 4) == [1, 2, 4, 4, 4, 4]


def test_a_row_asks_for_one_more_than_was_accepted() -> None:
    row = Gains().begin("class", 8)
    assert drafted_steps(row, 3, 2, most=8) == [8, 3, 3]


def test_new_rows_of_a_class_that_gains_nothing_begin_to_wait() -> None:
    gains = Gains()
    row = gains.begin("sampled", 4)
    while gains.classes["sampled"].share >= POOR:
        row.observe(4, 0, 4)
    assert gains.begin("sampled", 4).next_width(4) == 0
    assert gains.begin("greedy", 4).next_width(4) == 4
    while gains.classes["sampled"].share < POOR + LEARNING:
        row.observe(4, 1, 4)
    assert gains.begin("sampled", 4).next_width(4) == 4
