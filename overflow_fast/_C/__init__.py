"""Puts the compiled extension in this module's place, or what stands in for it.

The first import of it loads torch, and raises an ImportError where the extension cannot
be loaded; so does each later one. A package, since Python prefers its folder to a file
`_C.*.so` beside it: an old build may have left one there, for an unknown torch.
"""

import sys

from ..binaries import load_extension

sys.modules[__name__] = load_extension(__name__)
