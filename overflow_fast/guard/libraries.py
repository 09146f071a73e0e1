"""The libraries that train models, a row for each.

What `overflow-fast run` guards by a callback, whose objects no replay keeps, what `env`
lists and a table of docs/works-with.md follow from it.
"""

from __future__ import annotations

from typing import NamedTuple


class Library(NamedTuple):
    """A library with a module of its name in `overflow_fast.integrations`.

    Attributes:
        packages: Its packages whose objects hold no state of a model.
        trainer: The class that trains, `module:Class`, if `run` is to find it; the
            module in `integrations` has `add_to(trainer, arguments)` then.
    """

    packages: tuple[str, ...] = ()
    trainer: str = ""


LIBRARIES = {
    "trainer": Library(trainer="transformers.trainer:Trainer"),
    "lightning": Library(
        ("lightning", "lightning_fabric", "pytorch_lightning"),
        "lightning.pytorch.trainer.trainer:Trainer",
    ),
    "accelerate": Library(("accelerate",)),
    "deepspeed": Library(("deepspeed",)),
    "torchtitan": Library(),
}
PACKAGES = tuple(name for each in LIBRARIES.values() for name in each.packages)
