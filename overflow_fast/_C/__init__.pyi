from collections.abc import Callable, Sequence
from typing import Any

import torch

def set_callbacks(
    *,
    resolve: Callable[[torch.Tensor], torch.Tensor | str],
    reason: Callable[[torch.Tensor, Readability], str],
    warn_of_no_kernels: Callable[[], None],
    warn_of_unused_kernels: Callable[[str, str], None],
    warn_of_lack: Callable[[str], None],
    layout: Callable[[type], object],
    children: Callable[[object], list[Any] | None],
    type_name: Callable[[type], str],
) -> None: ...

class Hidden:
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...

class Unwatched:
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...

class Unprofiled:
    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...

def is_unwatched() -> bool: ...

class Readability:
    READABLE: Readability
    UNSUPPORTED: Readability
    FREED: Readability
    WRAPPER: Readability

class EntryKind:
    TENSOR: EntryKind
    NONE: EntryKind
    NOT_TENSOR: EntryKind
    NOT_SCANNED: EntryKind

class Role:
    __members__: dict[str, Role]
    INPUT: Role
    OUTPUT: Role
    GRAD_OUTPUT: Role
    WEIGHT: Role
    BUFFER: Role
    GRADIENT: Role
    OPTIMIZER_STATE: Role
    RECORDED: Role
    name: str

class LabelStyle:
    __members__: dict[str, LabelStyle]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    NAME: LabelStyle
    INDEX: LabelStyle
    KEY: LabelStyle
    ATTRIBUTE: LabelStyle
    name: str

class LabelPart:
    def __init__(self, style: LabelStyle, value: object) -> None: ...
    @property
    def style(self) -> LabelStyle: ...
    @property
    def value(self) -> object: ...

class Label:
    @property
    def role(self) -> Role: ...
    @property
    def name(self) -> str: ...  # of the root
    @property
    def parts(self) -> list[LabelPart]: ...

class Stat:
    @property
    def abs_min(self) -> float | None: ...
    @property
    def abs_max(self) -> float | None: ...
    @property
    def num_nan(self) -> int: ...
    @property
    def num_inf(self) -> int: ...

class FrameKind:
    FORWARD: FrameKind
    RECOMPUTED: FrameKind
    BACKWARD: FrameKind
    RECORDED: FrameKind
    WEIGHTS: FrameKind
    BUFFERS: FrameKind
    GRADIENTS: FrameKind
    OPTIMIZER_STATE: FrameKind
    name: str

class Place:
    @property
    def kind(self) -> FrameKind: ...
    @property
    def module(self) -> int: ...
    @property
    def label(self) -> Label: ...

class Entry:
    @property
    def place(self) -> Place: ...
    @property
    def label(self) -> Label: ...
    @property
    def role(self) -> Role: ...
    @property
    def kind(self) -> EntryKind: ...
    @property
    def stat(self) -> Stat | None: ...  # of a tensor
    @property
    def reason(self) -> str | None: ...  # why it was not scanned
    @property
    def numel(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def is_bad(self) -> bool: ...
    @property
    def is_unseen(self) -> bool: ...
    @property
    def nonfinite_kinds(self) -> int: ...  # of POSITIVE_INF, NEGATIVE_INF and NAN
    @property
    def only_if_bad(self) -> bool: ...  # listed only if it is bad
    # Of an input: its number of in-place writes; True if an autograd node computed it;
    # one more than that node's number, 0 if it is not known.
    @property
    def version(self) -> int: ...
    @property
    def is_computed(self) -> bool: ...
    @property
    def node(self) -> int: ...
    # The order of the earlier frame that scanned it, if its stat is of then; else 0.
    @property
    def seen_in(self) -> int: ...
    # It was finite in that frame, and torch has counted no write since.
    @property
    def is_rewritten(self) -> bool: ...

class Peak:
    @property
    def place(self) -> Place: ...
    @property
    def abs_max(self) -> float: ...
    @property
    def limit(self) -> float: ...  # the largest number of its dtype
    @property
    def dtype(self) -> str: ...

class HeadroomHistory:
    @property
    def last(self) -> Peak: ...
    # The highest abs_max of all steps, inf if a value was not finite.
    @property
    def highest(self) -> float: ...
    @property
    def recent(self) -> list[float]: ...  # the abs_max of each of the last steps

class Underflow:
    @property
    def place(self) -> Place: ...
    @property
    def dtype(self) -> str: ...
    @property
    def numel(self) -> int: ...
    @property
    def num_zero(self) -> int: ...
    @property
    def num_subnormal(self) -> int: ...
    @property
    def num_limit(self) -> int: ...
    @property
    def num_positive(self) -> int: ...

# An entry of rows: its index in them is its index among all columns.
class RowColumn:
    @property
    def place(self) -> Place: ...
    @property
    def dtype(self) -> str: ...
    @property
    def numel(self) -> int: ...  # when it was first seen
    @property
    def limit(self) -> float: ...  # the largest number of its dtype

# Each column as packed numbers of the host's byte order.
class StepRow:
    @property
    def number(self) -> int: ...  # which end_row() gave it
    @property
    def num_entries(self) -> int: ...
    @property
    def num_left_out(self) -> int: ...
    # float32 where that is exact, else float64; nan: not looked at, or a nan.
    @property
    def abs_min(self) -> bytes: ...
    @property
    def abs_max(self) -> bytes: ...
    # int64; empty where all are 0.
    @property
    def num_nan(self) -> bytes: ...
    @property
    def num_inf(self) -> bytes: ...
    @property
    def num_tensors(self) -> bytes: ...  # that each entry is made of
    @property
    def num_zero(self) -> bytes | None: ...  # -1 for entries that were not counted
    @property
    def num_saturated(self) -> bytes | None: ...  # likewise

class Frame:
    module: int
    class_name: str
    batch: int
    opens_batch: bool
    kind: FrameKind
    order: int
    is_recomputed: bool
    is_bad: bool

class Call:
    module: int
    kind: FrameKind
    order: int
    batch: int
    thread: int
    begins_after: int
    ends_before: int
    is_traced: bool
    has_unseen: bool

class StepResults:
    before: list[Frame]
    bad: list[Frame]
    captured_tensors: object

class Coverage:
    tensors_listed: int
    tensors_scanned: int
    bytes_scanned: int
    not_scanned: int
    def reasons(self) -> dict[str, int]: ...
    num_opaque_types: int
    def opaque(self) -> dict[str, int]: ...  # what was not looked into, by its type

class Recorder:
    max_frames: int | None
    in_step: bool
    lists_parameters: bool
    is_paused: bool
    @property
    def is_off(self) -> bool: ...
    def note_depth(self) -> None: ...
    watches_every_frame: bool
    total_calls: int
    coverage: Coverage
    num_syncs: int
    num_sends: int
    @staticmethod
    def num_frames() -> int: ...
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
        step_mode: bool = False,
        lists_parameters: bool = True,
        lists_calls: bool = True,
        parameters_once: bool = False,
        watches_gradients: bool = False,
        captures_tensors: bool = False,
    ) -> None: ...
    def entries(self, frame: Frame) -> list[Entry]: ...
    def calls(self) -> list[Call]: ...
    def forget_calls(self, forgets_all: bool, /) -> None: ...
    def history(self) -> list[Frame]: ...
    def clear_history(self) -> None: ...
    def send(self, with_captured: bool = False) -> None: ...
    def want_flags(self) -> None: ...
    def take_flags(self) -> list[torch.Tensor]: ...
    def process_arrived(
        self,
        max_in_flight: int,
        on_batch: Callable[[int], None],
        on_frame: Callable[[Frame], None],
    ) -> None: ...
    def keep(self, frame: Frame) -> None: ...
    def record(
        self, kind: FrameKind, names: list[str], tensors: list[torch.Tensor]
    ) -> None: ...
    def scan_failed(
        self, find: Callable[[FrameKind, str], torch.Tensor | None]
    ) -> None: ...
    def raise_lost(self) -> None: ...
    def set_gradients_wanted(self, is_wanted: bool, /) -> None: ...
    def take_step_results(self) -> StepResults: ...
    def forget_parameters(self) -> None: ...
    counts_underflow: bool
    @property
    def has_counts(self) -> bool: ...
    def take_underflow(self) -> list[Underflow]: ...
    def keep_rows(self) -> None: ...
    def note_row(self) -> None: ...  # of the step under way alone
    def restart_row(self) -> None: ...
    def running_row(self) -> StepRow: ...
    def end_row(self, number: int, /) -> None: ...
    has_row: bool  # the oldest row of a step that has ended is whole
    def take_row(self) -> StepRow: ...
    def row_columns(self, first: int) -> list[RowColumn]: ...
    def set_rules(self, rules: Callable[[Place], int] | None, /) -> None: ...
    def begin_headroom(self) -> None: ...
    is_headroom_spent: bool
    def set_low_headroom(self, bits: float, /) -> None: ...
    def low_headroom(self) -> list[HeadroomHistory]: ...
    def headroom(self) -> list[HeadroomHistory]: ...
    def least_headroom(self) -> Peak | None: ...
    def last_peak(self, place: Place, /) -> Peak | None: ...
    largest_gradient: float  # in this step; 0 if there was none
    seconds: float
    def end_step(self) -> None: ...
    def begin_batch(self, number: int) -> None: ...
    def begin_apart(self) -> None: ...
    def end_apart(self) -> None: ...
    def leave_out(self, threads: list[int]) -> None: ...

class FrameHook:
    owner: object
    module: int
    handle_tensor: torch.Tensor
    owner_handle: torch.Tensor
    plan: int
    def __init__(self, owner: object, module: int) -> None: ...

def run_hook(
    hook: FrameHook,
    module: torch.nn.Module,
    args: object,
    kwargs: object,
    output: object,
    /,
) -> None: ...
def run_paused(function: Callable[..., Any], /, *args: object) -> Any: ...

class ScanBackend:
    AUTO: ScanBackend
    COMPOSITE: ScanBackend
    DEVICE: ScanBackend

def scan_tensors(
    tensors: list[torch.Tensor], backend: ScanBackend = ...
) -> list[Stat | Readability | str]: ...

class CallWatch:
    def __init__(self, policy: object, audited: Sequence[str]) -> None: ...
    def begin(self, seconds: float) -> None: ...
    def end(self) -> None: ...
    def refuse_all(self) -> None: ...
    def rest(self, rests: bool) -> None: ...

def set_signal_handler(number: int, handler: Callable[[int, Any], object]) -> None: ...
def collected(is_kept: Callable[[type], bool]) -> list[Any]: ...
def hold(dicts: list[dict[Any, Any]], values: list[Any], /) -> bool: ...
def version_of(tensor: torch.Tensor, /) -> int | None: ...
def versions_of(tensors: list[torch.Tensor], /) -> list[int]: ...
def samples_of(tensors: list[torch.Tensor], num: int, /) -> list[bytes | None]: ...
def require_grad(tensors: Sequence[torch.Tensor], /) -> list[bool]: ...
def has_kernels(type: str) -> bool: ...
def check_kernels(device: str) -> None: ...
def unused_kernels() -> dict[str, str]: ...
def register_device_type(type: str, open: int) -> None: ...
def register_scan(
    type: str,
    function: Callable[[torch.Tensor, int, list[torch.Tensor]], None] | None,
) -> None: ...

class MetalLaunch:
    @property
    def first(self) -> int: ...  # its first tensor
    @property
    def count(self) -> int: ...
    @property
    def words(self) -> list[int]: ...
    @property
    def num_threads(self) -> int: ...

class MetalPlan:
    @property
    def launches(self) -> list[MetalLaunch]: ...
    @property
    def others(self) -> list[int]: ...  # the kernel cannot read them

def metal_launches(tensors: list[torch.Tensor]) -> MetalPlan: ...
def isa() -> str: ...

METAL_THREADS: int
METAL_MAX_TENSORS: int

POSITIVE_INF: int
NEGATIVE_INF: int
NAN: int
