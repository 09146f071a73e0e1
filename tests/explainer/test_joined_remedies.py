"""Remedies of several edits: of two failures in one step, or of one in two lines."""

import pytest
import torch
from remedied_files import Holder, edited, explained, module_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard, explain

HEAD = """import math
import torch
import torch.nn.functional as F
"""
# Code with two failures in one step, of which the second is seen without the first.
TWO = {
    "two lines": """
def loss_of(x, w):
    a = torch.sqrt(x * w - 1e-3)
    b = a.sum(-1) + 1
    c = torch.log(x * w)
    return (b + c.sum()).mean()
""",
    "one line": """
def loss_of(x, w):
    return torch.sqrt(x * w - 1).mean() + torch.log(x * w).mean()
""",
    "the same operation twice in a line": """
def loss_of(x, w):
    return torch.log(2 * x * w).mean() + torch.log(x * w).mean()
""",
    "one around the other": """
def loss_of(x, w):
    return torch.log(torch.sqrt(x * w - 1) * 0).mean()
""",
    "forward and backward": """
def loss_of(x, w):
    y = torch.log(x * w).mean()
    return y + torch.sqrt(x * w).mean()
""",
    "two functions": """
def inner(y):
    return torch.log(y)

def loss_of(x, w):
    y = inner(x * w)
    return torch.sqrt(x * w - 1).mean() + y.mean()
""",
    "several lines": """
def loss_of(x, w):
    y = torch.log(
        x
        * w
    )
    return (
        y.mean()
        + (x * w - 1)
        .sqrt()
        .mean()
    )
""",
    "three": """
def loss_of(x, w):
    a = torch.log(x * w).mean()
    b = torch.sqrt(x * w - 1).mean()
    c = torch.acos(x * w + 3).mean()
    return a + b + c
""",
    "closures": """
def loss_of(x, w):
    eps = 0.0
    def inner(y):
        return torch.log(y + eps)
    return inner(x * w).mean() + (lambda y: torch.sqrt(y - 1))(x * w).mean()
""",
}


@pytest.mark.parametrize("name", TWO)
def test_a_second_failure_is_remedied_with_the_first(name, tmp_path):
    module, path = module_of(tmp_path, HEAD + TWO[name])
    codes = {k: f.__code__ for k, f in vars(module).items() if hasattr(f, "__code__")}
    found = explained(module.loss_of, torch.zeros(3, 2))
    good = [remedy for remedy in found.remedies if remedy.is_recommended]
    assert good and (", and " in good[0].text or "twice" in name), found
    assert len(good[0].parts) != 1
    said, *code = str(good[0]).splitlines()
    assert said.startswith(good[0].text) and all(each[:4] == "    " for each in code)
    for remedy in good:
        fresh, _ = module_of(tmp_path, edited(path, remedy))
        model = Holder()
        loss = fresh.loss_of(torch.zeros(3, 2), model.w)
        loss.backward()
        assert loss.isfinite() and model.w.grad.isfinite().all(), remedy
        assert loss.item() == pytest.approx(remedy.loss)
    assert all(getattr(module, k).__code__ is code for k, code in codes.items())


def test_parts_that_are_far_from_one_another_are_listed(tmp_path):
    far = "\n" * 60
    text = TWO["two functions"].replace("def loss_of", f"{far}def loss_of")
    module, path = module_of(tmp_path, HEAD + text)
    remedy = explained(module.loss_of, torch.zeros(3, 2)).remedies[0]
    assert remedy.is_recommended and remedy.file == ""
    assert [part.file for part in remedy.parts] == [str(path)] * 2
    assert remedy.code.splitlines() == [part.code for part in remedy.parts]
    for part in sorted(remedy.parts, key=lambda part: -part.line):
        path.write_text(edited(path, part))
    fresh, _ = module_of(tmp_path, path.read_text())
    loss = fresh.loss_of(torch.zeros(3, 2), torch.ones(2, requires_grad=True))
    assert loss.item() == pytest.approx(remedy.loss)


def test_two_keys_of_the_batch_that_are_bad():
    model = nn.Linear(4, 1)
    batch = {"x": torch.randn(6, 4), "y": torch.randn(6, 1)}
    batch["x"][2, 1] = batch["y"][4] = float("nan")

    def loss(batch):
        return (model(batch["x"]) - batch["y"]).pow(2).mean()

    remedy = explain(model, batch, loss).remedies[0]
    assert remedy.is_recommended and len(remedy.parts) == 2
    for part in remedy.parts:
        space = {"torch": torch, "batch": batch}
        exec(part.code, space)
        batch = {key: value[space["keep"]] for key, value in batch.items()}
    assert len(batch["x"]) == 4
    assert loss(batch).item() == pytest.approx(remedy.loss)


def test_the_budget_holds_for_both(tmp_path):
    module, _ = module_of(tmp_path, HEAD + TWO["three"])
    assert explained(module.loss_of, torch.zeros(3, 2), budget=2).replays <= 3 * 2


OPTIMIZER = """
class Rescaled(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad / p.grad.norm(), alpha=-0.02)
"""


def test_a_line_of_an_optimizer_of_ones_own(tmp_path, as_kept):
    module, path = module_of(tmp_path, HEAD + OPTIMIZER)

    def run(optimizer_class):
        model = nn.Linear(2, 1)
        optimizer = optimizer_class(model.parameters())
        with OverflowGuard(model, optimizer):
            for _ in range(2):
                (model(torch.zeros(1, 2)) * 0).sum().backward()
                optimizer.step()
        return model

    with pytest.raises(NonFiniteError) as error:
        run(module.Rescaled)
    found = error.value.report.explanation
    assert (found.phase, found.cause) == ("optimizer", "undefined")
    remedy = found.remedies[0]
    assert remedy.is_recommended
    as_kept(remedy.text)
    fresh, _ = module_of(tmp_path, edited(path, remedy))
    assert all(p.isfinite().all() for p in run(fresh.Rescaled).parameters())


MANY = """
def loss_of(x, w):
    growth = torch.exp(x * w)
    first = torch.tanh(growth)
    second = torch.tanh(2 * growth)
    return first.mean() + second.mean()
"""


def test_one_line_stands_before_float64_over_several(tmp_path):
    """They come to the true loss both, though one changes a number that was finite."""
    module, _ = module_of(tmp_path, HEAD + MANY)
    found = explained(module.loss_of, torch.tensor([[1.0, 2.0], [400, 30], [3, 0.5]]))
    first, second, *_ = [each for each in found.remedies if each.is_recommended]
    assert first.text == "clamp the argument of exp to 20" and not first.parts
    assert "float64" in second.text and len(second.parts) == 3
    assert first.moves_results > 0.9


def test_each_line_of_several_has_its_place_beside_it(tmp_path):
    module, path = module_of(tmp_path, HEAD + MANY)
    found = explained(module.loss_of, torch.tensor([[1.0, 2.0], [400, 1], [3, 0.5]]))
    remedy = next(each for each in found.remedies if "float64" in each.text)
    said, *code = str(remedy).splitlines()
    assert f"in float64, up to line 8 ({path.name}:6-8): finite" in said
    assert code == [
        f"    growth = torch.exp((x * w).double())  # {path.name}:6",
        f"    first = torch.tanh(growth).float()  # {path.name}:7",
        f"    second = torch.tanh(2 * growth).float()  # {path.name}:8",
    ]


HUES = """
def loss_of(x, w):
    r, g, b = (x * w[0]).unbind(-1)
    most, least = torch.stack([r, g, b], -1).amax(-1), (x * w[0]).amin(-1)
    spread, lightness = most - least, most + least
    s = torch.where(lightness < 1, spread / lightness, spread / (2 - lightness))
    hue = torch.zeros_like(s)
    place = x.argmax(-1)
    hue[place == 0] = ((g - b) / spread % 6)[place == 0]
    hue[place == 1] = ((b - r) / spread + 2)[place == 1]
    hue[place == 2] = ((r - g) / spread + 4)[place == 2]
    hls = torch.stack([hue, lightness, s], -1)
    return torch.where(hls.isnan(), 0.0, hls).mean()
"""


def test_another_failure_is_sought_besides_what_changes_the_most_calls(tmp_path):
    """Of a black pixel three quotients by one divisor are nan, and one by another."""
    module, _ = module_of(tmp_path, HEAD + HUES)
    x = torch.tensor([[0.1, 0.2, 0.3], [0.0, 0.0, 0.0], [0.3, 0.2, 0.1]])
    found = explained(module.loss_of, x)
    best = found.remedies[0]
    assert best.is_recommended and best.kind == "code", found
    assert len(best.parts) == 4 and best.code.count("1e-8") == 5


class Small(nn.Module):
    """Gives numbers that float16 has, and not the slope of a logarithm there."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((3, 4), 1.5e-6).half())

    def forward(self, x):
        return x * self.w


@pytest.mark.parametrize(
    "function", [lambda y: y.log().sum(), lambda y: 0.01 * y.rsqrt().sum()]
)
def test_a_part_that_is_not_needed_is_none_of_a_remedy(function):
    model, x = Small(), torch.ones(3, 4).half()
    found = explain(model, x, lambda x: function(model(x)))
    whole = "use bfloat16 for the model and its inputs"
    (first,) = (each for each in found.remedies if whole in each.text)
    assert first.text == whole and first.is_recommended
    # No number is left out: what is as it was is no trial.
    assert "leave values out" not in str(found)
