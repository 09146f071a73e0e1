"""Files of failing code, and what becomes of them with a remedy."""

import importlib.util
import itertools

import torch
from torch import nn

from overflow_fast import explain

_numbers = itertools.count()


def module_of(tmp_path, text):
    """A module with a text, in a file of its own."""
    name = f"remedied_{next(_numbers)}"
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, path


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))


def explained(loss_of, x, **options):
    model = Holder()
    return explain(model, x, lambda x: loss_of(x, model.w), **options)


def edited(path, remedy):
    """The file as the remedy tells to change it."""
    lines = path.read_text().splitlines()
    first = lines[remedy.line - 1]
    indent = first[: len(first) - len(first.lstrip())]
    lines[remedy.line - 1 : remedy.last_line] = [indent + remedy.code]
    return "\n".join(lines) + "\n"


def recommended(found):
    """The recommended changes of code, weights and settings, not of the batch."""
    return [e for e in found.remedies if e.is_recommended and not e.is_of_data]
