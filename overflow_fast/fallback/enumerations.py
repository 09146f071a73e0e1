"""The enumerations of the extension, with its names."""

from __future__ import annotations

from enum import Enum, IntEnum


class Readability(Enum):
    """The reasons why a tensor's memory cannot be read."""

    READABLE = 0
    UNSUPPORTED = 1
    FREED = 2
    WRAPPER = 3


class EntryKind(Enum):
    """The kinds of entries of a frame."""

    TENSOR = 0
    NONE = 1
    NOT_TENSOR = 2
    NOT_SCANNED = 3


class Role(Enum):
    """The roles of entries in their frames."""

    INPUT = 0
    OUTPUT = 1
    GRAD_OUTPUT = 2
    WEIGHT = 3
    BUFFER = 4
    GRADIENT = 5
    OPTIMIZER_STATE = 6
    RECORDED = 7


class LabelStyle(IntEnum):
    """How a part of a label is written."""

    NAME = 0
    INDEX = 1
    KEY = 2
    ATTRIBUTE = 3


class FrameKind(Enum):
    """The kinds of frames, by the tensors that they list."""

    FORWARD = 0
    RECOMPUTED = 1
    BACKWARD = 2
    RECORDED = 3
    WEIGHTS = 4
    BUFFERS = 5
    GRADIENTS = 6
    OPTIMIZER_STATE = 7


class ScanBackend(Enum):
    """The ways to scan; here always torch operations."""

    AUTO = 0
    COMPOSITE = 1
    DEVICE = 2


# Kinds of non-finite values, as bits.
POSITIVE_INF = 1
NEGATIVE_INF = 2
NAN = 4
