"""Independent axes in pairs: any two values of two axes occur together."""

import itertools

from allpairspy import AllPairs


def pairs(*axes):
    """Cases for `parametrize`, in place of the product of all axes.

    The same ones each time, about as many as the two longest axes have pairs.
    """
    chosen = AllPairs([range(len(axis)) for axis in axes])
    return [
        tuple(axis[place] for axis, place in zip(axes, case, strict=True))
        for case in chosen
    ]


def pairs_of(cases, values):
    """The cases, in their order, that have all pairs of values that are in any.

    For axes that do not go together freely: a filter of allpairspy's loses pairs.

    Args:
        cases: All that there are.
        values: Returns the value of a case on each axis.
    """

    def paired(case):
        return set(itertools.combinations(enumerate(values(case)), 2))

    of = [paired(case) for case in cases]
    chosen, left = set(), set().union(*of)
    while left:
        best = max(range(len(of)), key=lambda place: len(of[place] & left))
        chosen.add(best)
        left -= of[best]
    return [cases[place] for place in sorted(chosen)]
