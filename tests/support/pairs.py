"""Independent axes in pairs: any two values of two axes occur together."""

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
