"""The doctor's judgements: pure functions of what ranks have measured."""

import dataclasses

import pytest
import torch

from overflow_fast.tools.doctor.arithmetic import ARITHMETIC, Digests
from overflow_fast.tools.doctor.collectives import COLLECTIVES, DTYPES, values_of
from overflow_fast.tools.doctor.diagnosis import Diagnosis
from overflow_fast.tools.doctor.lost_ranks import lost_ranks
from overflow_fast.tools.doctor.rendezvous import Address
from overflow_fast.tools.doctor.roll_call import ROLL_CALL, RankFacts
from overflow_fast.tools.doctor.stage import (
    BROKEN,
    WARNING,
    Finding,
    StageOutcome,
    StageResult,
)

WORLD, PER_HOST = 16, 8
VERSIONS = {"torch": "2.13.0", "NCCL": "2.29.2", "GPU driver": "580.1"}
HOSTS = {rank: f"Node-{rank // PER_HOST}" for rank in range(WORLD)}


# A cluster in numbers.


def facts():
    return {
        rank: RankFacts(
            *(HOSTS[rank], 100 + rank, rank % PER_HOST),
            *(VERSIONS, "nccl"),
            gpu=f"GPU-{rank}",
            num_gpus=PER_HOST,
            environment={"NCCL_ALGO": "Ring"},
        )
        for rank in range(WORLD)
    }


def test_healthy_ranks_raise_nothing():
    digests = {"product": 7}
    kinds = {rank: "H200" if rank % 2 else "H100" for rank in range(WORLD)}
    healthy = {
        ROLL_CALL: facts(),
        COLLECTIVES: {rank: {} for rank in range(WORLD)},
        ARITHMETIC: {r: Digests(kinds[r], [], digests, digests) for r in range(WORLD)},
    }
    for stage, data in healthy.items():
        assert stage.judge(data, HOSTS) == []


# The roll call.


@pytest.mark.parametrize(
    ("change", "severity", "text"),
    [
        ({"versions": VERSIONS | {"torch": "2.12.0"}}, BROKEN, "torch is 2.12"),
        ({"versions": VERSIONS | {"GPU driver": "570.0"}}, WARNING, "driver is 570.0"),
        ({"backend": "gloo"}, BROKEN, "backend is gloo on rank 5 (Node-0), and nccl"),
        ({"gpu": "GPU-4"}, BROKEN, "Ranks 4 and 5 have the same GPU GPU-4 on Node-0"),
        ({"gpu": "", "local_rank": 0}, 0, ""),
        ({"local_rank": 8}, BROKEN, "LOCAL_RANK is 8, and it sees 8 GPUs"),
    ],
)
def test_the_roll_call_names_a_rank_that_does_not_fit(change, severity, text):
    data = facts()
    data[5] = dataclasses.replace(data[5], **change)
    found = ROLL_CALL.judge(data, HOSTS)
    assert [each.severity for each in found] == [severity] * bool(text)
    assert not text or (5 in found[0].ranks and text in found[0].text)


def test_versions_without_a_majority_are_named_with_their_ranks(as_kept):
    data = {rank: facts()[rank] for rank in (0, 1)}
    data[1] = dataclasses.replace(data[1], versions=VERSIONS | {"torch": "1"})
    (found,) = ROLL_CALL.judge(data, HOSTS)
    assert found.ranks == (0, 1)
    as_kept(found.text)


def test_variables_that_differ_are_named_and_one_rank_is_one_rank(as_kept):
    data = facts()
    data[1] = dataclasses.replace(data[1], environment={})
    (found,) = ROLL_CALL.judge(data, HOSTS)
    as_kept(found.text)
    assert found.severity == WARNING and found.ranks == (1,)


# Where the ranks meet.

STORE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "7"}


@pytest.fixture
def launched(monkeypatch):
    """Sets what a launcher sets, and nothing else; reads the address."""

    def read(environment):
        names = *STORE, *AGENT, "RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return Address.from_environment()

    return read


@pytest.mark.parametrize(
    ("launcher", "is_host"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4", **AGENT}, False),  # torchrun holds the store
        ({"RANK": "0", "WORLD_SIZE": "4"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, True),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, False),
    ],
)
def test_ranks_meet_where_the_launcher_says(launcher, is_host, launched):
    address = launched({**STORE, **launcher})
    assert (address.world, address.host, address.port) == (4, "node1", 29500)
    assert address.is_host == is_host


def test_one_rank_needs_no_launcher_and_several_need_a_store(launched, as_kept):
    assert (launched({}).world, launched({}).is_host) == (1, True)
    as_kept.error(ValueError, launched, {"RANK": "1", "WORLD_SIZE": "2"})


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


def test_the_rank_that_is_still_inside_is_named(as_kept):
    left = StageOutcome("error", 4, "all-reduce of int32", "RuntimeError: timed out")
    inside = StageOutcome("hung", 4, "all-reduce of int32")
    found, lost = lost_ranks("collectives", {0: left, 1: left, 2: inside}, {})
    assert lost == [2] and found[0].ranks == (2,)
    as_kept(found[0].text)


# Wrong results.


def found_in(operation, wrong, ranks=range(4)):
    """What is found where these pairs of giver, by position, and taker are wrong."""
    data = {rank: {} for rank in ranks}
    for giver, taker in wrong:
        data[taker].setdefault(operation, {})[giver] = "float32: 2.5 instead of 1.5"
    return COLLECTIVES.judge(data, HOSTS)


@pytest.mark.parametrize("operation", ["all-gather", "all-to-all", "broadcast"])
def test_a_giver_and_a_taker_are_told_apart(operation, as_kept):
    wrong = [(s, q) for s in range(4) for q in range(4) if s == 2 or q == 1]
    contributed, received = found_in(operation, wrong)
    assert contributed.ranks == (2,) and received.ranks == (0, 1, 3)
    as_kept([contributed.text, received.text])


def test_a_single_wrong_element_names_both_ends(as_kept):
    (found,) = found_in("all-to-all", [(1, 7)], ranks=[4, 6, 7])
    assert found.ranks == (6, 7)  # positions in the group are not ranks
    as_kept(found.text)


@pytest.mark.parametrize("takers", [[1], [1, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("operation", ["all-reduce", "reduce-scatter"])
def test_who_received_a_wrong_sum_is_named_and_nobody_who_gave(
    operation, takers, as_kept
):
    (found,) = found_in(operation, [(0, each) for each in takers])
    assert found.ranks == tuple(takers)
    as_kept(found.text)


def test_contributions_are_exact_and_differ_between_neighbours():
    for dtype in DTYPES:
        for rank in (0, 1, 99, 9999):
            values = values_of(rank, dtype)
            assert float(values[0]) == float(values[0].double())
            assert not torch.equal(values[:1], values_of(rank + 1, dtype)[:1])
            is_float = dtype.is_floating_point
            assert bool(values.isnan().any()) == is_float
            assert int(values.isinf().sum()) == (2 if is_float else 0)


# Arithmetic.


def test_digests_are_compared_within_one_kind():
    def ranks(kinds, values):
        return {
            r: Digests(kind, [], {"exp": value}, {"exp": value})
            for r, (kind, value) in enumerate(zip(kinds, values, strict=True))
        }

    assert ARITHMETIC.judge(ranks("aabb", [1, 1, 2, 2]), HOSTS) == []
    (found,) = ARITHMETIC.judge(ranks("aaab", [1, 3, 1, 2]), HOSTS)
    assert found.ranks == (1,) and "silent data corruption" in found.text
    (found,) = ARITHMETIC.judge(ranks("aa", [1, 3]), HOSTS)
    assert found.ranks == (0, 1) and "no majority" in found.text


def test_a_rank_that_computes_wrongly_is_not_named_twice():
    good = Digests("a", [], {"exp": 1}, {"exp": 1})
    unsteady = dataclasses.replace(good, again={"exp": 2})
    wrong = dataclasses.replace(
        good, wrong=["float32"], first={"exp": 5}, again={"exp": 5}
    )
    found = ARITHMETIC.judge({0: good, 1: unsteady, 2: wrong, 3: good}, HOSTS)
    assert [each.ranks for each in found] == [(1,), (2,)]


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
        facts(),
    )


def test_the_diagnosis_is_a_table_and_a_status(as_kept):
    text = str(diagnosis())
    as_kept(text)
    assert text.endswith("Result: broken.") and diagnosis().status == 2
    assert Diagnosis(1).status == 0


def test_the_diagnosis_is_plain_data():
    plain = diagnosis().to_dict()
    assert (plain["kind"], plain["status"], plain["world_size"]) == ("diagnosis", 2, 16)
    assert plain["findings"][0]["ranks"] == [1, 2]
    assert plain["ranks"]["0"]["host"] == "Node-0"
