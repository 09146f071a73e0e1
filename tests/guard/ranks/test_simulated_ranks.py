"""Guards of eight simulated ranks come through the incidents of `bench_ranks.py`."""

import logging
import re

import pytest
from simulated_ranks import SCENARIOS, Network, files_of, play

WORLD = 8


@pytest.fixture(autouse=True)
def quiet():
    log = logging.getLogger("overflow_fast")
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(logging.NOTSET)


def played(name, folder, world=WORLD):
    network = Network(world)
    seen = play(SCENARIOS[name](world), network, folder)
    alive = [each for each in seen if not isinstance(each, Exception)]
    assert all(each.failures == 0 for each in alive)
    return alive, network


def test_quiet_ranks_join_one_collective_of_64_bytes_a_step(tmp_path):
    seen, network = played("quiet", tmp_path)
    assert network.joined == [3] * WORLD and network.num_bytes == [3 * 64] * WORLD
    assert {(each.headline, each.num_skipped) for each in seen} == {("", 0)}
    assert {kind: n for kind, (n, _) in files_of(tmp_path).items()} == {
        "log": 1,
        "record": 1,
        "evidence": 0,
    }


@pytest.mark.slow
@pytest.mark.explains
def test_all_say_what_the_bad_rank_has_found(tmp_path, as_kept):
    seen, _ = played("one bad rank", tmp_path)
    assert len({(each.headline, each.cause, each.weights) for each in seen}) == 1
    as_kept(seen[0].headline)
    assert {each.num_skipped for each in seen} == {1} and seen[0].cause == "bad data"


@pytest.mark.slow
@pytest.mark.explains
def test_of_many_bad_ranks_one_is_told_and_writes(tmp_path, as_kept):
    seen, _ = played("most ranks bad", tmp_path)
    assert len({each.headline for each in seen}) == 1
    # Whichever came first.
    as_kept(re.sub(r"rank \d", "rank R", seen[0].headline))
    assert len(list((tmp_path / "evidence" / "overflow_fast").iterdir())) == 1


@pytest.mark.parametrize("name", ["ranks die", "network split"])
def test_no_rank_hangs_or_steps_where_they_cannot_agree(name, tmp_path):
    seen, _ = played(name, tmp_path)
    assert len(seen) == (WORLD - 2 if name == "ranks die" else WORLD)
    words = "Connection closed by peer", "Timed out waiting for rank"
    assert all(each.error.startswith(words) for each in seen)
    whole, _ = played("quiet", tmp_path / "other")
    assert len({each.weights for each in seen}) == 1  # those after the first step
    assert seen[0].weights > whole[0].weights


def test_a_rank_that_is_a_step_behind_is_a_failure_on_all_and_ends_none(tmp_path):
    network = Network(WORLD)
    seen = play(SCENARIOS["one step behind"](WORLD), network, tmp_path)
    assert {(each.error, each.failures, each.num_skipped) for each in seen} == {
        ("", 2, 0)
    }
    assert network.joined == [3] * WORLD
