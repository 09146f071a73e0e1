"""Yields the tensors of files and folders that hold a checkpoint, one after another.

1. A file is of safetensors or of `torch.save`, told by what it begins with.
2. A folder is one of `torch.distributed.checkpoint` if it holds `.metadata`, else all
   files below it with the suffix of a checkpoint: the shards of a model, and what a
   trainer saves beside them.
3. Of safetensors and of `torch.distributed.checkpoint` one tensor is in memory at a
   time. Files of `torch.save` are mapped into memory and read page by page, but those
   in the format before torch 1.6, which are read as a whole.
4. Nothing in a file is executed: of classes that torch does not know as safe, what
   their objects hold is looked through, and none of their code runs.
5. What cannot be read is noted, and the rest is read all the same.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...base import tree
from ...base.text import error_line
from .reading import FileError, open_regular, read_bytes, why_unreadable
from .tensor_files import open_tensors

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_DISTRIBUTED = ".metadata"  # the file that a folder of torch.distributed has
_INDEX = ".index.json"  # of a model in shards, as transformers and diffusers write it
# A file of safetensors: 8 bytes with the length of its header, which is JSON.
_HEADER_AT = 8
_LONGEST = 160  # characters of a reason; more are cut off


class SavedTensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        file: The file, from the folder on that was asked for; "" for a file itself.
        name: Its name there, with dots between the keys that lead to it.
        tensor: The tensor, on the host.
    """

    file: str
    name: str
    tensor: torch.Tensor


def saved_tensors(
    path: str | os.PathLike[str], not_read: list[str]
) -> Iterator[SavedTensor]:
    """Yields the tensors of a file, or of the files of a folder.

    Args:
        path: The file or folder.
        not_read: Receives a sentence for each file that could not be read.

    Raises:
        OSError: If there is no such path.
        FileError: If a folder holds no file of a checkpoint.
    """
    path = Path(path)
    if not path.is_dir():
        open_regular(path).close()
        yield from _of_part(path, "", not_read)
        return
    parts = sorted(_parts_of(path))
    if not parts:
        raise FileError(
            f"{path} must hold a checkpoint, which is {_DISTRIBUTED} of "
            f"torch.distributed.checkpoint or files *{', *'.join(SUFFIXES)}, got none"
        )
    for index in sorted(path.rglob(f"*{_INDEX}")):
        not_read += _missing_shards(index)
    for part in parts:
        name = "" if part == path else str(part.relative_to(path))
        yield from _of_part(part, name, not_read)


def tensors_in_state(state: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a state dict, or of any nesting of them, with names."""
    for path, tensor in tree.tensors(state):
        yield ".".join(str(tree.plain_key(part.value)) for part in path), tensor


def load_saved(path: Path) -> Any:
    """Loads a file of `torch.save`; runs no code of it, and maps its tensors."""
    # Of a file in the format before torch 1.6 no parts can be mapped into memory.
    is_mapped = zipfile.is_zipfile(path)
    unknown = (
        torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_mapped else []
    )
    stand_ins: list[Any] = [(_Unknown, name) for name in unknown]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)


class _Unknown:
    """Stands in for an object of a class that is not loaded; holds what it is given."""

    def __init__(self, *given: object) -> None:
        self.given = list(given)

    def __new__(cls, *given: object) -> _Unknown:
        made = super().__new__(cls)
        made.given = list(given)
        return made

    def __setstate__(self, state: object) -> None:
        self.given.append(state)


def _parts_of(folder: Path) -> Iterator[Path]:
    """Yields what is read as a whole: files, and folders of torch.distributed."""
    for parent, _, names in os.walk(folder):
        if _DISTRIBUTED in names:
            yield Path(parent)
        for name in names:
            if name.endswith(SUFFIXES):
                yield Path(parent, name)


def _of_part(part: Path, name: str, not_read: list[str]) -> Iterator[SavedTensor]:
    try:
        for key, tensor in _tensors_of(part):
            yield SavedTensor(name, key, tensor)
    except (OSError, FileError, ImportError) as error:
        not_read.append(f"{name or part} was not read: {why_unreadable(error)}")
    except Exception as error:  # of a pickle that anyone has made
        why = error_line(error, _LONGEST)
        if isinstance(error, pickle.UnpicklingError):  # torch's begins with advice
            why = str(error).rpartition("WeightsUnpickler error: ")[2].strip()
            why = why.partition("\n")[0]
        not_read.append(
            f"{name or part} is no file of safetensors or torch.save that can be read: "
            f"{why[:_LONGEST]}"
        )


def _tensors_of(part: Path) -> Iterable[tuple[str, torch.Tensor]]:
    if part.is_dir():
        return _of_distributed(part)
    if _is_of_safetensors(part):
        return _of_safetensors(part)
    return tensors_in_state(load_saved(part))


def _is_of_safetensors(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(_HEADER_AT + 1)[_HEADER_AT:] == b"{"


def _of_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with open_tensors(path) as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def _of_distributed(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the whole tensors of a folder of `torch.distributed.checkpoint`."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    with open_regular(folder / _DISTRIBUTED) as file:
        metadata: Any = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise FileError(f"{_DISTRIBUTED} holds no metadata of a checkpoint")
    safe: Metadata = metadata

    class Reader(FileSystemReader):
        """Gives the metadata that was read without running code of the file."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return safe

    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, TensorStorageMetadata):
            tensor = torch.empty(about.size, dtype=about.properties.dtype)
            load({name: tensor}, storage_reader=Reader(folder), no_dist=True)
            yield name, tensor


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the metadata of a folder, of classes that torch writes there alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Finds a class or a dtype that is data, or raises `UnpicklingError`."""
        is_dtype = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype
        )
        if is_dtype or name in _DATA.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"{_DISTRIBUTED} must hold data of torch.distributed.checkpoint alone, got "
            f"{module}.{name}"
        )


_METADATA = "torch.distributed.checkpoint.metadata"
_DATA = {
    _METADATA: (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),  # a lookup of a layout by its name
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "Path"),
    "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "Path"),
}


def _missing_shards(index: Path) -> list[str]:
    """Sentences for the shards that an index names and that are not there."""
    try:
        shards = set(json.loads(read_bytes(index))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{index.name} was not read: {error_line(error, _LONGEST)}"]
    lacking = sorted(each for each in shards if not (index.parent / each).is_file())
    return [f"{each}, which {index.name} names, is missing" for each in lacking]
