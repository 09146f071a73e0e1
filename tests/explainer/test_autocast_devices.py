"""The types of devices with an autocast."""

import re

import torch

from overflow_fast.torch_internals.cached_casts import autocast_devices


def test_each_that_torch_names_is_known():
    try:
        torch.device("unknown")
    except RuntimeError as error:
        names = re.search(r"one of (.+) device type", str(error))[1].split(", ")
    assert len(names) > 10
    expected = {each for each in names if torch.amp.is_autocast_available(each)}
    # That of a backend by its general name counts once it has registered itself.
    assert set(autocast_devices()) == expected - {"privateuseone"} > {"cpu", "cuda"}
