"""The doctor, with real processes: each planted fault is named, and by its rank."""

import dataclasses
import multiprocessing
import os
import signal

import pytest
import torch
import torch.distributed as dist
from examinations import begin, examine, frozen, killed, planted, replaced

from overflow_fast.tools.doctor import arithmetic
from overflow_fast.tools.doctor.arithmetic import ARITHMETIC
from overflow_fast.tools.doctor.collectives import BARRIER, COLLECTIVES
from overflow_fast.tools.doctor.diagnosis import Diagnosis
from overflow_fast.tools.doctor.examination import STAGES
from overflow_fast.tools.doctor.roll_call import ROLL_CALL

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(),
    reason="no gloo: torch was built without it",
)


def findings(results, stage=None):
    """What the leading rank tells, which is what all ranks have found."""
    (told,) = [diagnosis for diagnosis, leads in results.values() if leads]
    assert {d.status for d, _ in results.values()} == {told.status}
    return [each for each in told.findings if stage in (None, each.stage)]


# The faults, as they stand in the processes of their ranks.


def other_version(run, site):
    facts = run(site)
    return dataclasses.replace(facts, versions={**facts.versions, "torch": "1.0"})


def wrong_contribution(run, site):
    """Flips a sign of what it contributes to all-gathers."""
    gather = dist.all_gather

    def wrongly(parts, own):
        gather(parts, -own if own.is_floating_point() else own + 1)

    with replaced(dist, "all_gather", wrongly):
        return run(site)


def wrong_receipt(run, site):
    """Changes one element of what it receives from others."""
    reduce = dist.all_reduce

    def wrongly(rows, *arguments, **options):
        reduce(rows, *arguments, **options)
        rows[..., 0] += 1

    with replaced(dist, "all_reduce", wrongly):
        return run(site)


def flipped_bit(run, site):
    digest = arithmetic.digest_of

    def flipped(tensor):
        other = tensor.clone()
        other.view(torch.uint8).flatten()[-1] ^= 1
        return digest(other)

    with replaced(arithmetic, "digest_of", flipped):
        return run(site)


def wrong_product(run, site):
    with replaced(arithmetic, "is_exact", lambda dtype, device: False):
        return run(site)


def frozen_parent(run, site):
    found = run(site)
    pid = multiprocessing.parent_process().pid
    with open(f"{os.environ['EXAMINATION']}/frozen{site.rank}", "w"):
        os.kill(pid, signal.SIGSTOP)
    return found


def test_soft_faults_are_named_and_the_rest_goes_on(as_kept):
    collectives = planted(COLLECTIVES, 2, wrong_contribution)
    stages = (
        planted(ROLL_CALL, 1, other_version),
        BARRIER,
        planted(collectives, 1, wrong_receipt),
        planted(ARITHMETIC, 3, flipped_bit),
    )
    results = examine(4, stages)
    assert sorted(results) == [0, 1, 2, 3]
    (version,) = findings(results, "roll call")
    assert version.ranks == (1,) and version.severity == 2
    as_kept(version.text)
    received, contributed = findings(results, "collectives")
    assert received.ranks == (1,)
    as_kept(received.text)
    assert contributed.ranks == (2,)
    as_kept(contributed.text)
    (bits,) = findings(results, "arithmetic")
    assert bits.ranks == (3,) and "other bits" in bits.text
    assert findings(results, "barrier") == []


# Ranks that are gone: who waits for them does so together with the others who wait.


@pytest.fixture(scope="module")
def without_some():
    """Examinations that wait for ranks, begun at once; what each has found."""
    freezing = ROLL_CALL, planted(BARRIER, 1, frozen), ARITHMETIC
    going = ROLL_CALL, planted(ARITHMETIC, 1, frozen_parent)
    dying = ROLL_CALL, planted(BARRIER, 2, killed), COLLECTIVES
    begun = {
        "frozen": begin(2, freezing, limit=4.0),
        "no answer": begin(2, going, limit=4.0, grace=0.5),
        "killed": begin(4, dying),
        "0 is absent": begin(2, (ROLL_CALL,), absent=[0], limit=1.0, grace=0.1),
        "1 is absent": begin(2, (ROLL_CALL,), absent=[1], limit=1.0, grace=0.1),
    }
    return {name: end() for name, end in begun.items()}


def test_a_killed_rank_is_named_and_the_others_go_on(without_some, as_kept):
    results = without_some["killed"]
    (found,) = findings(results)
    assert found.ranks == (2,) and found.severity == 2
    as_kept(found.text)
    diagnosis: Diagnosis = results[0][0]
    assert [(s.state, s.ranks) for s in diagnosis.stages] == [
        ("fine", 4),
        ("broken", 4),
        ("fine", 3),
    ]
    assert [d.status for d, _ in results.values()] == [2, 2, 2, 2]


def test_a_frozen_rank_is_named(without_some):
    found = findings(without_some["frozen"], "barrier")
    assert [each.ranks for each in found] == [(1,)]
    assert "did not come out of the making of the process group" in found[0].text


def test_a_rank_that_gives_no_answer_is_named(without_some):
    results = without_some["no answer"]
    assert sorted(results) == [0]
    found = findings(results, "arithmetic")
    assert [each.ranks for each in found] == [(1,)]
    assert "gave no answer" in found[0].text


@pytest.mark.parametrize("absent", [1, 0])
def test_a_missing_rank_is_named_also_if_it_would_lead(absent, without_some, as_kept):
    results = without_some[f"{absent} is absent"]
    missing = [f for f in findings(results) if "did not come" in f.text]
    assert [each.ranks for each in missing] == [(absent,)]
    as_kept(missing[0].text)


def test_two_healthy_ranks_raise_nothing_but_what_one_computes_wrongly(as_kept):
    stages = list(STAGES)
    stages[STAGES.index(ARITHMETIC)] = planted(ARITHMETIC, 1, wrong_product)
    (found,) = [each for each in findings(examine(2, stages)) if each.severity]
    assert (found.stage, found.ranks) == ("arithmetic", (1,))
    as_kept(found.text)
