"""Random states of before, which nobody kept: torch's generators are run backwards.

How much code draws is seen by running it: it leads from states that are known to later
ones. From the states that lie as far before the known ones it leads to these, if it
always draws as much. Whether it does is left to who runs it then.
"""

from __future__ import annotations

import torch

from ..guard.undo.random import RandomStates

# MT19937 makes a block of numbers of the block before it.
_SIZE, _SHIFT, _MATRIX = 624, 397, 0x9908B0DF
_UPPER, _LOWER, _WORD = 1 << 31, (1 << 31) - 1, (1 << 32) - 1
_MOST_BLOCKS = 4000  # 2.5 million numbers, a second or two; chosen
_PHILOX_BYTES = 16  # its seed, and how many numbers it has drawn
_PLACE, _BLOCK = 2, slice(3, 3 + _SIZE)  # in the CPU's state, in words of 64 bits


def rewound(known: RandomStates, later: RandomStates) -> RandomStates:
    """The states as far before known ones as these are before later ones.

    Python's and NumPy's stay as they are known.
    """
    found = dict(known.states)
    for name in known.others_in(later):
        if name == "cpu":
            found[name] = _before(known.states[name], later.states[name])
        elif getattr(known.states[name], "nbytes", 0) == _PHILOX_BYTES:
            pair = (s.states[name].view(torch.int64) for s in (known, later))
            (seed, now), (_, then) = (each.tolist() for each in pair)
            before = torch.tensor([seed, 2 * now - then], device="cpu")
            found[name] = before.view(torch.uint8)
    return RandomStates.of(found)


def _before(known: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    words, others = known.clone().view(torch.int64), later.view(torch.int64)
    numbers, then = words[_BLOCK], others[_BLOCK]
    num_blocks = 0
    while not torch.equal(then[1:], numbers[1:]):  # of the first, one bit counts
        then, num_blocks = _block_before(then), num_blocks + 1
        if num_blocks > _MOST_BLOCKS:
            return known
    now = int(words[_PLACE]) or _SIZE  # 0 where nothing was drawn since the seed
    place = 2 * now - int(others[_PLACE])
    more = (place <= 0) - (place > _SIZE)
    for _ in range(num_blocks + more):
        numbers = _block_before(numbers)
    place += more * _SIZE
    words[_BLOCK], words[_PLACE] = numbers, place
    words.view(torch.int32)[2] = _SIZE + 1 - place  # what is left of the block
    return words.view(torch.uint8)


def _block_before(block: torch.Tensor) -> torch.Tensor:
    before, mixed = torch.empty_like(block), torch.empty_like(block)
    rest = _SIZE - _SHIFT
    mixed[rest:] = _unmixed(block[rest:] ^ block[:_SHIFT])
    before[rest + 1 :] = _joined(mixed[rest + 1 :], mixed[rest:-1])
    mixed[:rest] = _unmixed(block[:rest] ^ before[_SHIFT:])
    before[1 : rest + 1] = _joined(mixed[1 : rest + 1], mixed[:rest])
    last = _unmixed(before[-1:] ^ before[_SHIFT - 1 : _SHIFT])
    before[:1] = _joined(mixed[:1], last)
    return before


def _unmixed(numbers: torch.Tensor) -> torch.Tensor:
    is_odd = numbers >> 31
    return (((numbers ^ (is_odd * _MATRIX)) << 1) | is_odd) & _WORD


def _joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    return (upper & _UPPER) | (lower & _LOWER)
