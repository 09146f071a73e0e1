"""Which lines of a full record are folded: the older, the more into one."""

from overflow_fast.guard.record.thinning import Folded, LineSpan, thin


def places(count, level, length=100):
    return [LineSpan(i * length, length, level) for i in range(count)]


def levels_of(plan):
    return [line.level for line in plan]


def steps_in(line):
    if isinstance(line, LineSpan):
        return 16**line.level
    return sum(map(steps_in, line.parts))


def test_steps_that_have_room_stay_as_they_are():
    lines = places(20, 0)
    assert thin(lines, 20, 100_000) == lines


def test_the_oldest_steps_are_folded_by_16():
    plan = thin(places(52, 0), 20, 100_000)
    assert levels_of(plan) == [1, 1] + [0] * 20
    assert plan[0].parts == places(16, 0)
    # Fewer wait until there are 16.
    assert levels_of(thin(places(51, 0), 20, 100_000)) == [1] + [0] * 35


def test_a_quarter_of_the_file_is_for_single_steps():
    plan = thin(places(80, 0), 1000, 100 * 4 * 32)
    assert levels_of(plan) == [1, 1, 1] + [0] * 32


def test_full_levels_go_up_in_the_order_of_the_steps():
    lines = places(40, 2) + places(40, 1) + places(40, 0)
    plan = thin(lines, 1000, 100 * 12 * 24)
    assert levels_of(plan) == [3] + [2] * 25 + [1] * 24 + [0] * 40
    assert plan[25] == Folded(2, places(40, 1)[:16])
    assert sum(map(steps_in, plan)) == sum(map(steps_in, lines))


def test_the_top_level_is_folded_into_itself_and_nothing_is_dropped():
    lines = places(30, 3) + places(10, 0)
    plan = thin(lines, 1000, 100 * 12 * 24)
    assert levels_of(plan) == [3] * 24 + [0] * 10
    assert steps_in(plan[0]) == 7 * 4096


def test_a_file_for_a_line_or_two_keeps_one_of_each_level():
    lines = [each for level in (3, 2, 1, 0) for each in places(20, level)]
    plan = thin(lines, 1000, 10)
    assert levels_of(plan) == [3, 2, 1, 0]
    assert sum(map(steps_in, plan)) == sum(map(steps_in, lines))
