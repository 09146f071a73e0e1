"""The doctor's judgements: pure functions of what ranks have measured."""

import dataclasses
import random

import pytest
import torch

from overflow_fast.tools.doctor import checks, roll_call
from overflow_fast.tools.doctor.checks import (
    AGREEMENT,
    ARITHMETIC,
    BARRIER,
    COLLECTIVES,
    OPERATIONS,
    BarrierResult,
    Digests,
    GuardSummary,
    compared_pairs,
    faulty_ranks,
)
from overflow_fast.tools.doctor.diagnosis import Diagnosis
from overflow_fast.tools.doctor.examination import innermost_calls, lost_ranks
from overflow_fast.tools.doctor.roll_call import ROLL_CALL, RankFacts, late_ranks
from overflow_fast.tools.doctor.stage import (
    BROKEN,
    UNJUDGED,
    WARNING,
    ExaminationSettings,
    Finding,
    StageOutcome,
    StageResult,
    odd_ones,
)

WORLD, PER_HOST = 16, 8
HOSTS = {rank: f"Node-{rank // PER_HOST}" for rank in range(WORLD)}
SETTINGS = ExaminationSettings()


# A cluster in numbers.


def facts_of(chance):
    return {
        rank: RankFacts(
            *(HOSTS[rank], 100 + rank, rank % PER_HOST),
            {"torch": "2.13.0", "NCCL": "2.29.2"},
            "nccl",
            gpu=f"GPU-{rank}",
            kind="H200",
            num_gpus=PER_HOST,
            taken=0.01,
            smi={"driver": "580.1", "ecc_errors": "0", "hw_slowdown": "Not Active"},
            waited=chance.uniform(2, 9),
        )
        for rank in range(WORLD)
    }


def healthy(chance):
    digests = {"product": chance.getrandbits(63)}
    yield ROLL_CALL, facts_of(chance)
    yield BARRIER, {rank: BarrierResult(HOSTS[rank], "IB") for rank in range(WORLD)}
    yield COLLECTIVES, {rank: ([], ["all-reduce of int8"]) for rank in range(WORLD)}
    yield (
        ARITHMETIC,
        {r: Digests(HOSTS[r], "H200", [], digests, digests) for r in range(WORLD)},
    )
    yield AGREEMENT, {rank: GuardSummary(8, {1: "it"}, 1, 7) for rank in range(WORLD)}


@pytest.mark.slow
def test_a_thousand_healthy_runs_raise_nothing():
    for seed in range(1000):
        chance = random.Random(seed)
        for stage, data in healthy(chance):
            assert stage.judge(data, SETTINGS) == [], (seed, stage.name)


# The roll call.


@pytest.mark.parametrize(
    ("change", "severity", "text"),
    [
        ({"versions": {"torch": "2.12.0", "NCCL": "2.29.2"}}, BROKEN, "torch is 2.12"),
        ({"backend": "gloo"}, BROKEN, "backend is gloo on rank 5 (Node-0), and nccl"),
        ({"gpu": "GPU-4"}, BROKEN, "Ranks 4 and 5 have the same GPU GPU-4 on Node-0"),
        ({"gpu": "", "local_rank": 0}, 0, ""),
        ({"local_rank": 9}, BROKEN, "LOCAL_RANK is 9, and it sees 8 GPUs"),
        ({"taken": 0.4}, WARNING, "40% of the GPU's memory is taken already"),
        ({"smi": {"driver": "580.1", "ecc_errors": "3"}}, BROKEN, "3 uncorrected ECC"),
        (
            {"smi": {"driver": "580.1", "hw_slowdown": "Active", "clock_mhz": "900"}},
            WARNING,
            "slows down for heat or power (clock 900 of ? MHz)",
        ),
        ({"smi": {"driver": "570.0"}}, WARNING, "GPU driver is 570.0"),
        ({"waited": -20.0}, WARNING, "Rank 5 (Node-0) came 2"),
    ],
)
def test_the_roll_call_names_a_rank_that_does_not_fit(change, severity, text):
    data = facts_of(random.Random(0))
    data[5] = dataclasses.replace(data[5], **change)
    found = ROLL_CALL.judge(data, SETTINGS)
    assert [each.severity for each in found] == [severity] * bool(text)
    assert not text or (5 in found[0].ranks and text in found[0].text)


def test_versions_without_a_majority_are_named_with_their_ranks(as_kept):
    data = {rank: facts_of(random.Random(0))[rank] for rank in (0, 1)}
    data[1] = dataclasses.replace(data[1], versions={"torch": "1", "NCCL": "2.29.2"})
    (found,) = ROLL_CALL.judge(data, SETTINGS)
    assert found.ranks == (0, 1)
    as_kept(found.text)


def test_ranks_that_come_late_have_waited_less():
    assert late_ranks({0: 30.0, 1: 29.0, 2: 31.0, 3: 4.0}, 10) == {3: 26.0}
    assert late_ranks({0: 30.0, 1: 2.0}, 10) == {1: 28.0}
    assert late_ranks({0: 3.0}, 1) == {}


def test_nvidia_smis_line_is_read():
    line = "580.65.06, 345, 1980, 0, Not Active\n"
    found = roll_call.smi_values(line)
    assert found["driver"] == "580.65.06" and found["max_clock_mhz"] == "1980"
    assert "ecc_errors" not in roll_call.smi_values("5, 3, 1, [N/A], Active")
    assert roll_call.smi_values("No devices were found") == {}


# Ranks that do not come out.


def test_ranks_that_are_gone_explain_those_that_wait(as_kept):
    waiting = StageOutcome("error", 4, "all-reduce of int32", "RuntimeError: timed out")
    outcomes = {
        0: waiting,
        1: StageOutcome("died", 3, "all-reduce", "SIGKILL"),
        2: waiting,
    }
    found, lost = lost_ranks("collectives", outcomes, HOSTS)
    assert lost == [1]
    as_kept([f.text for f in found])


def test_a_rank_that_stands_before_a_collective_is_named(as_kept):
    waiting = StageOutcome("hung", 4, "all-reduce of int32")
    outcomes = {0: waiting, 1: StageOutcome("hung", 3, "arithmetic"), 2: waiting}
    found, lost = lost_ranks("collectives", outcomes, HOSTS)
    assert lost == [1]
    as_kept(found[0].text)


def test_nobody_is_named_where_all_wait_in_the_same(as_kept):
    waiting = StageOutcome("error", 2, "a barrier", "RuntimeError: timed out")
    found, lost = lost_ranks("barrier", {0: waiting, 1: waiting}, HOSTS)
    assert lost == [0, 1] and found[0].ranks == ()
    as_kept(found[0].text)


def test_one_that_stays_while_the_others_are_done_is_named(as_kept):
    outcomes = {
        0: StageOutcome("done", 2),
        1: StageOutcome("hung", 2, "a write to /data"),
    }
    found, lost = lost_ranks("memory and folder", outcomes, HOSTS)
    assert lost == [1]
    as_kept(found[0].text)


# Wrong results.


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_wrong_values_are_laid_at_one_ranks_door(operation, world):
    tested = compared_pairs(operation, world)
    giver = 0 if operation == "broadcast" else world - 1
    assert faulty_ranks({p for p in tested if p[0] == giver}, tested)[0] == [giver]
    received = {p for p in tested if p[1] == world - 1}
    if len(received) > 1:
        assert faulty_ranks(received, tested) == ([], [world - 1], [])
    one = {min(tested)}
    assert faulty_ranks(one, tested) == ([], [], sorted(one))
    assert faulty_ranks(set(), tested) == ([], [], [])


def test_a_giver_and_a_taker_are_told_apart():
    tested = compared_pairs("all-gather", 8)
    wrong = {(s, q) for s, q in tested if s == 2 or q == 5}
    assert faulty_ranks(wrong, tested) == ([2], [5], [])


def test_a_single_wrong_element_names_both_ends(as_kept):
    wrong = [("all-to-all", "float16", 1, "2.5 instead of 1.5")]
    data = {4: ([], []), 6: ([], []), 7: (wrong, [])}
    (found,) = COLLECTIVES.judge(data, SETTINGS)
    assert found.ranks == (6, 7)  # positions in the group are not ranks
    as_kept(found.text)


def test_contributions_are_exact_and_differ_between_neighbours():
    for dtype in checks.DTYPES:
        for rank in (0, 1, 99, 9999):
            values = checks.values_of(rank, dtype)
            assert float(values[0]) == float(values[0].double())
            assert not torch.equal(values[:1], checks.values_of(rank + 1, dtype)[:1])
            is_float = dtype.is_floating_point
            assert bool(values.isnan().any()) == is_float
            assert int(values.isinf().sum()) == (2 if is_float else 0)


# Arithmetic.


def test_digests_are_compared_within_one_kind():
    def ranks(kinds, values):
        return {
            r: Digests(HOSTS[r], kind, [], {"exp": value}, {"exp": value})
            for r, (kind, value) in enumerate(zip(kinds, values, strict=True))
        }

    assert ARITHMETIC.judge(ranks("aabb", [1, 1, 2, 2]), SETTINGS) == []
    (found,) = ARITHMETIC.judge(ranks("aaab", [1, 3, 1, 2]), SETTINGS)
    assert found.ranks == (1,) and "silent data corruption" in found.text
    (found,) = ARITHMETIC.judge(ranks("aa", [1, 3]), SETTINGS)
    assert found.ranks == (0, 1) and "no majority" in found.text


def test_a_rank_that_computes_wrongly_is_not_named_twice():
    good = Digests("n", "a", [], {"exp": 1}, {"exp": 1})
    unsteady = dataclasses.replace(good, again={"exp": 2})
    wrong = dataclasses.replace(
        good, wrong=["float32"], first={"exp": 5}, again={"exp": 5}
    )
    found = ARITHMETIC.judge({0: good, 1: unsteady, 2: wrong, 3: good}, SETTINGS)
    assert [each.ranks for each in found] == [(1,), (2,)]


def test_odd_ones():
    assert odd_ones({0: "a", 1: "a"}) is None
    assert odd_ones({0: "a", 1: "a", 2: "b"}) == ("a", [2])
    assert odd_ones({0: "a", 1: "b"}) == (None, [0, 1])


def test_guards_that_do_not_agree_are_named(as_kept):
    good, other = GuardSummary(1, {1: "it"}, 1, 7), GuardSummary(1, {}, 0, 8)
    (found,) = AGREEMENT.judge({0: good, 1: good, 2: other}, SETTINGS)
    assert found.ranks == (2,)
    as_kept(found.text)
    (found,) = AGREEMENT.judge({0: other, 1: other}, SETTINGS)
    assert found.ranks == (0, 1)
    as_kept(found.text)


# NCCL.

LOG = """node1:77:77 [0] NCCL INFO NET/IB : No device found.
node1:77:77 [0] NCCL INFO Using network Socket
node1:77:81 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed
node1:77:81 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed
"""


def test_nccls_log_is_read():
    assert roll_call.network_in(LOG) == "Socket"
    assert roll_call.warnings_in(LOG) == "socketProgress: Connection closed"
    assert roll_call.network_in("") == roll_call.warnings_in("") == ""


def test_the_network_of_nccl_is_judged():
    def judge(*networks):
        data = {r: BarrierResult(f"n{r}", each) for r, each in enumerate(networks)}
        return [(f.severity, f.ranks) for f in BARRIER.judge(data, SETTINGS)]

    assert judge("IB", "IB", "IB") == judge("", "") == []
    assert judge("IB", "Socket", "IB") == [(BROKEN, (1,))]
    assert judge("Socket", "Socket") == [(WARNING, ())]
    assert judge("Socket") == []


def test_a_log_that_the_user_has_chosen_is_left_alone(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    assert roll_call.ask_nccl_for_a_log("s", 0) is None


# The diagnosis.


def diagnosis():
    slow = Finding("collectives", WARNING, (1, 2), "Rank 1 waits for rank 2.")
    return Diagnosis(
        WORLD,
        [slow, Finding("barrier", BROKEN, (3,), "<b>!")],
        [
            StageResult("roll call", "fine", 0.5, WORLD),
            StageResult("collectives", "left out"),
        ],
        facts_of(random.Random(0)),
    )


def test_the_diagnosis_is_a_table_and_a_status(as_kept):
    text = str(diagnosis())
    as_kept(text)
    assert text.endswith("Result: broken.") and diagnosis().status == 2
    assert Diagnosis(1).status == 0


def test_one_rank_is_one_rank_and_what_was_not_judged_is_not_fine(as_kept):
    stages = [
        StageResult("roll call", "fine", 0.5, 1),
        StageResult("collectives", UNJUDGED),
    ]
    facts = {0: facts_of(random.Random(0))[0]}
    note = Finding("collectives", 0, (), "Messages of 64 MiB were not checked.")
    as_kept(Diagnosis(1, [note], stages, facts))


def test_a_stage_with_a_warning_is_not_all_judged_either(as_kept):
    stages = [StageResult("collectives", "warning"), StageResult("barrier", "fine")]
    note = Finding("collectives", 0, (), "Messages of 64 MiB were not checked.")
    warning = Finding("collectives", 1, (1,), "Rank 1 is late.")
    as_kept(Diagnosis(2, [warning, note], stages).result)


def test_the_diagnosis_is_plain_data():
    plain = diagnosis().to_dict()
    assert (plain["kind"], plain["status"], plain["world_size"]) == ("diagnosis", 2, 16)
    assert plain["findings"][0]["ranks"] == [1, 2]
    assert plain["ranks"]["0"]["host"] == "Node-0"


def collectives_of(wrong):
    """Findings of all-reduces with wrong rows: pairs of contributor and receiver."""
    text = "[2.5] instead of [1.5]"
    data = {rank: ([], []) for rank in range(4)}
    for giver, taker in wrong:
        data[taker][0].append(("all-reduce", "float32", giver, text))
    return COLLECTIVES.judge(data, ExaminationSettings())


def test_a_sum_that_all_received_wrongly_names_no_rank(as_kept):
    (found,) = collectives_of([(0, taker) for taker in range(4)])
    assert found.ranks == ()
    as_kept(found.text)


@pytest.mark.parametrize("takers", [[2], [1, 3]])
def test_ranks_that_alone_received_a_wrong_sum_are_named(takers):
    found = collectives_of([(0, each) for each in takers])
    assert [each.ranks for each in found] == [(each,) for each in takers]
    assert all("received wrongly in all-reduce" in each.text for each in found)


def test_a_wrong_part_of_a_scattered_sum_leaves_it_open(as_kept):
    data = {rank: ([], []) for rank in range(4)}
    data[1][0].append(("reduce-scatter", "float32", 2, "1 instead of 2"))
    (found,) = COLLECTIVES.judge(data, ExaminationSettings())
    assert found.ranks == (1,)
    as_kept(found.text)


def test_the_rank_that_is_still_inside_is_named_with_its_stack(as_kept):
    left = StageOutcome("error", 4, "all-reduce of int32", "RuntimeError: timed out")
    inside = StageOutcome("hung", 4, "all-reduce of int32", stack="wait (a.py:3)")
    found, lost = lost_ranks("collectives", {0: left, 1: left, 2: inside}, {})
    assert lost == [2] and found[0].ranks == (2,)
    as_kept(found[0].text)


def test_the_innermost_calls_are_read_from_a_stack(as_kept):
    text = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "/a/b/one.py", line 3 in wait\n  File "/a/two.py", line 9 in run\n'
    )
    as_kept(innermost_calls(text))
    assert innermost_calls("") == ""


@pytest.mark.parametrize(("size", "more"), [(4096, " and more"), (2**26, "")])
def test_sizes_without_time_are_noted(size, more, as_kept):
    data = {
        r: ([("sizes without time", checks.size_text(size), 0, "")], [])
        for r in range(2)
    }
    (found,) = COLLECTIVES.judge(data, ExaminationSettings())
    assert (found.severity, found.ranks) == (0, ())
    assert found.text.startswith(f"Messages of {checks.size_text(size)}{more} were")
    as_kept(found.text)


@pytest.mark.parametrize("number", [2, 3, 8, 1000])
def test_sums_of_all_sizes_are_exact_in_float32(number):
    sums = sum(checks._sized(500, rank).double() for rank in range(number))
    assert torch.equal(sums.float().double(), sums) and sums.max() < 2**24


def test_variables_that_differ_are_named_and_one_rank_is_one_rank(as_kept):
    facts = {rank: fact(environment={"NCCL_ALGO": "Ring"}) for rank in range(3)}
    facts[1] = fact(environment={})
    (found,) = ROLL_CALL.judge(facts, ExaminationSettings())
    as_kept(found.text)
    assert found.severity == WARNING and found.ranks == (1,)


def fact(**options):
    return RankFacts("a", 1, None, {"torch": "2"}, "gloo", waited=0.0, **options)
