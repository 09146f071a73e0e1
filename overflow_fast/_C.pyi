from collections.abc import Callable

import torch

class Readability:
    READABLE: Readability
    UNSUPPORTED: Readability
    FREED: Readability
    INDIRECT: Readability

class EntryKind:
    TENSOR: EntryKind
    NONE: EntryKind
    NOT_TENSOR: EntryKind
    NOT_SCANNED: EntryKind

StatTuple = tuple[float | None, float | None, int, int]
# label path, kind, stat or reason, numel, is_quiet, is_bad
EntryTuple = tuple[
    tuple[tuple[int, object], ...], EntryKind, StatTuple | str | None, int, bool, bool
]

class Frame:
    module: int
    type: type
    batch: int
    opens_batch: bool
    is_recomputed: bool
    is_bad: bool

class Coverage:
    tensors_listed: int
    tensors_scanned: int
    bytes_scanned: int
    not_scanned: int
    def reasons(self) -> dict[str, int]: ...

class Recorder:
    max_frames: int | None
    in_step: bool
    watches_every_frame: bool
    total_calls: int
    coverage: Coverage
    num_syncs: int
    last_batch: int
    def __init__(
        self,
        max_frames: int | None,
        *,
        strict_compat: bool = False,
        list_kwargs: bool = False,
        memo: bool = True,
        defer: bool = False,
        fetch_frames: bool = False,
    ) -> None: ...
    def entries(self, frame: Frame) -> list[EntryTuple]: ...
    def history(self) -> list[Frame]: ...
    def clear_history(self) -> None: ...
    def send(self) -> None: ...
    def send_captured(self) -> None: ...
    def judge_arrived(
        self,
        max_in_flight: int,
        on_batch: Callable[[int], None],
        on_frame: Callable[[Frame], None],
    ) -> None: ...
    def keep(self, frame: Frame) -> None: ...
    def end_step(self) -> None: ...
    def begin_batch(self, number: int) -> None: ...

class FrameHook:
    owner: object
    module: int
    def __init__(self, owner: object, module: int) -> None: ...
    def __call__(
        self,
        module: torch.nn.Module,
        args: object,
        kwargs: object,
        output: object,
        /,
    ) -> None: ...

class ScanBackend:
    AUTO: ScanBackend
    COMPOSITE: ScanBackend
    DEVICE: ScanBackend

def scan_tensors(
    tensors: list[torch.Tensor], backend: ScanBackend = ...
) -> list[StatTuple | Readability]: ...
def has_kernels(type: str) -> bool: ...
def register_device_type(type: str, open: int) -> None: ...
def isa() -> str: ...
