"""Modules whose parts are named where they are made: a class has its forward alone."""

from torch import nn


class Assembled(nn.Module):
    """Has what it is given by name: submodules, parameters, buffers, settings."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
