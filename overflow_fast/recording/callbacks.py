"""Gives the extension its Python functions; the extension imports nothing."""

from .. import _C
from ..core.tensors import reason, resolve
from .coverage import warn_of_lack, warn_of_no_kernels

_C.set_callbacks(
    resolve=resolve,
    reason=reason,
    warn_of_no_kernels=warn_of_no_kernels,
    warn_of_lack=warn_of_lack,
)
