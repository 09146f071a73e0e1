"""The compiled extension: for each minor release of torch one, in a folder of its own.

Torch's C++ interface changes with each of them, and an extension for another one may be
loaded without an error and crash later. So only the folder for this torch is searched.
"""

from __future__ import annotations

import importlib
import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
EXTENSION = "overflow_fast._C"  # of an ImportError that is about it, the name


def folder_for(torch_version: str) -> Path:
    """Returns where the extension for this torch lies, such as `torch2_13`."""
    major, minor = torch_version.split("+")[0].split(".")[:2]
    return HERE / f"torch{major}_{minor}"


def is_there(torch_version: str) -> bool:
    """True if there is an extension for this torch and this Python."""
    return _file_for(torch_version).exists()


def require_extension() -> None:
    """Loads the extension, for what does nothing without it.

    Raises:
        ImportError: If there is none for this torch, or it cannot be loaded.
    """
    import torch

    if not is_there(torch.__version__):
        raise ImportError(_why_not_there(torch.__version__), name=EXTENSION)
    importlib.import_module(EXTENSION)


def load_extension(name: str) -> ModuleType:
    """Loads the extension for this torch, or what stands in for it.

    Args:
        name: Its name as a module.

    Raises:
        ImportError: If there is one that cannot be loaded.
    """
    import torch  # (first: the extension needs torch's libraries)

    from ..base import log  # noqa: F401  (its lines begin with the package's name)

    if not is_there(torch.__version__):
        from ..scanner.fallback import stand_in

        return stand_in(_why_not_there(torch.__version__))
    spec = importlib.util.spec_from_file_location(name, _file_for(torch.__version__))
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ImportError(
            f"overflow_fast's extension cannot be loaded: {error}.\n"
            f"To build it again, {_how_to_build()}.",
            name=EXTENSION,
        ) from error
    return module


def _file_for(torch_version: str) -> Path:
    return folder_for(torch_version) / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def _why_not_there(torch_version: str) -> str:
    """Returns a message that says what is missing, and how to build it."""
    found = sorted(HERE.glob("torch*_*/_C.*"))
    here = [path for path in found if path.parent == folder_for(torch_version)]
    if not found:
        return (
            f"overflow_fast is not built: there is no extension in {HERE}.\n"
            f"To build it, {_how_to_build()}."
        )
    if here:
        others = ", ".join(path.name for path in here)
        lack = f"this Python ({_file_for(torch_version).name}), only {others}"
    else:
        folders = sorted({path.parent.name for path in found}, key=_release)
        others = ", ".join(".".join(map(str, _release(name))) for name in folders)
        lack = f"torch {torch_version}, only for torch {others}"
    return (
        f"overflow_fast has no extension for {lack}.\n"
        "Install a release of overflow_fast or of torch that fits, or "
        f"{_how_to_build()}."
    )


def _release(folder: str) -> tuple[int, ...]:
    return tuple(int(part) for part in folder.removeprefix("torch").split("_"))


def _how_to_build() -> str:
    checkout = HERE.parents[1]
    if (checkout / "setup.py").exists():
        return (
            f"run `pip install --no-build-isolation -e .` in {checkout} (or "
            "`make build`), or import an installed overflow_fast from another folder"
        )
    return (
        "run `pip install --force-reinstall --no-build-isolation --no-deps` with the "
        "folder of its sources"
    )
