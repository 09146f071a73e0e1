"""Gives the extension its Python functions; the extension imports nothing."""

from .. import _C, tree
from ..core.tensors import reason, resolve
from .coverage import warn_of_lack, warn_of_no_kernels

_C.set_callbacks(
    resolve=resolve,
    reason=reason,
    warn_of_no_kernels=warn_of_no_kernels,
    warn_of_lack=warn_of_lack,
    layout=tree.layout,
    children=tree.children,
    type_name=tree.type_name,
)
