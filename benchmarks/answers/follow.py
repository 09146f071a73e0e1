"""Follows the recommended remedies of all failures of one process, in fresh runs.

python benchmarks/answers/follow.py [--only NAME] [--write]
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from facts import table

from answers.families import FAILURES
from answers.remedied import Followed, can_be_remedied, followed
from answers.run import write_result
from overflow_fast.explainer import budget

# What is tried on a bad step does not depend on what else runs here.
budget.LEAST_SECONDS = 600.0
_TITLE = "Which remedies help"
_NOTES = (
    "The failures of one process: those that a change of the program cures, which of "
    "them get a recommended remedy or the nearest, and whether each one, followed to "
    "the letter in a fresh run, makes that run finite: to its end, and for 50 further "
    "steps where the run that is cured by hand is, too. A healthy batch is one that is "
    "finite as the program is, or the failing one without the sample that fails."
)


# First remedies that are the change of the cure by hand with another number, or the
# other cure that its description names, which gives another loss: by reading both.
_SAME_CHANGE = {
    "normalized_counts_of_an_empty_cell": "the cell is left out",
    "action_over_a_deviation_of_zero": "the deviation is bounded below",
    "weight_of_a_sure_box": "the logarithm of the weight is bounded",
    "geodesic_angle_of_equal_rotations": "the cosine is kept below 1",
    "state_of_a_linear_recurrence": "the recurrent weights are made smaller",
    "gradient_through_time": "the recurrent weights are made smaller",
    "scales_of_a_deep_flow": "the logarithm of the scale is bounded",
    "deviation_of_an_unbounded_logarithm": "the logarithm is bounded",
    "scale_of_a_normal_distribution": "the scale is bounded below",
    "logarithm_of_silence": "the logarithm is bounded below",
    "depth_without_a_normalization": "the weights are made smaller",
    "deviation_by_a_difference_of_squares": "the mean is subtracted first",
    "weight_of_pure_noise": "the step of pure noise has no weight",
    "gates_that_sum_to_zero": "the sum of the gates is bounded below",
}


def rows_of(only: str) -> list[dict[str, Any]]:
    """Follows all that is recommended for the failures with a part of a name."""
    rows = []
    for failure in FAILURES.values():
        if only not in failure.name or failure.ranks > 1 or failure.kind == "compiled":
            continue
        found = followed(failure)
        first = next((each for each in found if each.is_finite is not None), None)
        rows.append(
            {
                "failure": failure.name,
                "curable": can_be_remedied(failure),
                "recommended": sum(each.is_recommended for each in found),
                "nearest": sum(not each.is_recommended for each in found),
                "in_words": sum(each.is_finite is None for each in found),
                "finite": sum(each.is_finite is True for each in found),
                "long": sum(each.lasts is not None for each in found),
                "lasts": sum(each.lasts is True for each in found),
                "known": sum(each.is_true is not None for each in found),
                "true": sum(each.is_true is True for each in found),
                "stepped": sum(each.state_lasts is not None for each in found),
                "state": sum(each.state_lasts is True for each in found),
                "healthy": sum(each.healthy is not None for each in found),
                "as_said": sum(
                    each.healthy is not None and each.keeps_its_word for each in found
                ),
                "first_like_cured": None if first is None else first.like_cured,
                "first_is_exact": first is not None and first.is_exact,
            }
        )
        texts = [f"  {_marks(each)} {each.text}" for each in found]
        print("\n".join([failure.name, *texts]), flush=True)
    return rows


def _marks(each: Followed) -> str:
    """How a remedy did, in a few signs, and by how much losses differ."""
    signs = [each.is_finite, each.lasts, each.keeps_its_word]
    signs += [each.is_true, each.state_lasts]
    marks = "".join({True: "+", False: "!", None: "."}[sign] for sign in signs)
    return f"{marks} {each.healthy} (said {each.announced}) {each.like_cured}"


_ALIKE = 0.01


def _part_of(rows: list[dict[str, Any]], right: str, asked: str) -> str:
    return f"{sum(row[right] for row in rows)} of {sum(row[asked] for row in rows)}"


def table_of(rows: list[dict[str, Any]]) -> str:
    """The numbers in Markdown."""
    curable = [row for row in rows if row["curable"]]
    firsts = [row["first_like_cured"] for row in curable]
    are_alike = [each is not None and each <= _ALIKE for each in firsts]
    pairs = list(zip(are_alike, curable, strict=True))
    alike, exact = sum(are_alike), sum(i or row["first_is_exact"] for i, row in pairs)
    good = sum(
        is_alike or row["first_is_exact"] or row["failure"] in _SAME_CHANGE
        for is_alike, row in pairs
    )
    facts = {
        "failures": len(rows),
        "that a change of the program cures": len(curable),
        "with a recommended remedy": sum(row["recommended"] > 0 for row in curable),
        "whose nearest change is named, as none keeps the loss of float64": sum(
            row["nearest"] > 0 for row in curable
        ),
        "remedies, recommended or nearest": sum(
            row["recommended"] + row["nearest"] for row in rows
        ),
        "of these told in words, which cannot be followed": sum(
            row["in_words"] for row in rows
        ),
        "finite in a fresh run": sum(row["finite"] for row in rows),
        "finite for 50 further steps": _part_of(rows, "lasts", "long"),
        "loss of a healthy batch raised by no more than they say": _part_of(
            rows, "as_said", "healthy"
        ),
        "loss of the failing step that of float64 within 1 %, or said to be off": (
            _part_of(rows, "true", "known")
        ),
        "optimizer's state finite at the end": _part_of(rows, "state", "stepped"),
        "failures whose first remedy gives the loss of the cure by hand, within 1 %": (
            f"{alike} of {len(curable)}"
        ),
        "those, and the ones that give the loss and gradients of float64": (
            f"{exact} of {len(curable)}"
        ),
        "those, and the ones that are its change with another number, by reading": (
            f"{good} of {len(curable)}"
        ),
    }
    lines = [{"what": name, "number": number} for name, number in facts.items()]
    return "\n".join(table(["what", "number"], lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of failures")
    parser.add_argument("--write", action="store_true", help="keep the result")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = rows_of(options.only)
    print(table_of(rows))
    if options.write:
        write_result("remedies-cpu", _TITLE, _NOTES, rows, table_of(rows))


if __name__ == "__main__":
    main()
