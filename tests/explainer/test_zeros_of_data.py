"""What is tried where the data holds a 0, and which of several attempts stand first."""

import pytest
import torch
from remedied_files import Holder, edited, explained, module_of
from test_right_remedies import stopped

DEPTH = """import torch

def silog(input, target, mask):
    input, target = input[mask], target[mask]
    g = torch.log(input) - torch.log(target)
    return (g - g.mean()).square().mean()

def loss_of(x, w):
    return silog((x + 1) * w.exp(), x, {})
"""
X = torch.tensor([[1.0, 2.0], [0.0, 4.0], [5.0, 2.0]])


@pytest.mark.parametrize(
    ("mask", "better"),
    [
        ("x >= 0", "(x >= 0) & (x != 0)"),
        ("0 <= x", "(0 <= x) & (x != 0)"),
        ("(x < 9) & (x >= 0)", "((x < 9) & (x != 0)) & (x >= 0)"),
        ("x.ge(0)", "x.ge(0) & (x != 0)"),
    ],
)
def test_the_mask_that_has_selected_a_0_leaves_it_out(mask, better, tmp_path):
    module, path = module_of(tmp_path, DEPTH.format(mask))
    remedy = explained(module.loss_of, X).remedies[0]
    assert remedy.is_right and remedy.text == "leave out with the mask what is 0"
    assert f"x, {better})" in remedy.code
    mended, _ = module_of(tmp_path, edited(path, remedy))
    assert mended.loss_of(X, Holder().w).item() == pytest.approx(remedy.loss)


def test_a_floor_of_data_is_below_all_else_in_it(tmp_path):
    """The other logarithm of the line is left as it is."""
    code = DEPTH.format("torch.ones(x.shape, dtype=torch.bool)")
    remedy = explained(module_of(tmp_path, code)[0].loss_of, X / 2).remedies[0]
    assert remedy.is_right and remedy.moves_results == 0
    assert "torch.log(input) - torch.log(target.clamp(min=0.1))" in remedy.code


@pytest.mark.parametrize("read", ["shares[rows]", "shares.gather(0, rows)"])
def test_a_floor_of_a_buffer_is_below_all_else_in_it(read, tmp_path):
    """The batch has a row of which it holds 0."""
    code = (
        "import torch\nshares = torch.tensor([3.0, 0.0, 1.0, 4.0]) / 8\n"
        f"def loss_of(rows, w):\n    return (w.exp()[0] * torch.log({read})).mean()\n"
    )
    module, _ = module_of(tmp_path, code)
    remedy = explained(module.loss_of, torch.tensor([0, 2, 1, 3])).remedies[0]
    assert remedy.is_recommended and ".clamp(min=0.1))" in remedy.code


def test_a_floor_of_what_was_computed_is_that_of_its_dtype(tmp_path):
    code = "import torch\ndef loss_of(x, w):\n    return torch.log(x * w).mean()\n"
    remedy = explained(module_of(tmp_path, code)[0].loss_of, X).remedies[0]
    assert "min=1e-8" in remedy.code


def test_a_scale_of_0_that_a_distribution_is_given_is_bounded_by_the_others(tmp_path):
    code = (
        "import torch\ndef loss_of(x, w):\n"
        "    normal = torch.distributions.Normal(w[0], x, validate_args=False)\n"
        "    return normal.log_prob(torch.ones(())).mean()\n"
    )
    found = explained(module_of(tmp_path, code)[0].loss_of, X / 2)
    assert " in `" in str(found) and "(torch/distributions/normal.py:" in str(found)
    (bound,) = [each for each in found.remedies if "clamp `" in each.text]
    assert "to at least 0.1, below its positive numbers" in bound.text


def test_a_norm_a_line_away_is_no_twin(tmp_path):
    code = (
        "def loss_of(x, w):\n    a = x / x.norm(dim=1, keepdim=True)\n"
        "    b = w / w.norm(dim=0, keepdim=True)\n    return (a * b).sum()\n"
    )
    remedy = explained(module_of(tmp_path, code)[0].loss_of, X * 0).remedies[0]
    assert (remedy.line, remedy.last_line) == (2, 2)


def test_what_has_failed_as_well_is_changed_with_it(tmp_path):
    """More of them than are found one after another."""
    names = "abcd"
    code = "def loss_of(x, w):\n" + "".join(
        f"    {name} = (x.pow({i + 1}) * 2).log() * w\n" for i, name in enumerate(names)
    )
    code += "    return (a + b + c + d).mean()\n"
    remedy = explained(module_of(tmp_path, code)[0].loss_of, X).remedies[0]
    assert remedy.is_right and remedy.code.count("clamp(") == len(names)


def of_a_product(model, x):
    return (x * model.w).log().square().mean()


def test_a_loss_that_is_far_from_those_before_is_told_beside_them():
    batches = [X.clamp(min=i / 10) for i in range(9, 2, -1)]
    found = stopped(Holder(), of_a_product, [*batches, X])
    (clamp,) = [each for each in found.remedies if "clamp" in each.text][:1]
    low, high = clamp.usual
    before = f"({low:.3g} to {high:.3g} in magnitude before)"
    assert clamp.loss > 2 * high and before in str(clamp)
    assert found.remedies[0].usual is None  # another attempt stays near them


def test_a_loss_of_which_few_are_known_is_told_alone():
    found = stopped(Holder(), of_a_product, [X.clamp(min=0.5), X])
    assert not any(each.usual for each in found.remedies)


def test_what_does_without_the_change_before_it_stands_alone(tmp_path):
    code = (
        "def loss_of(x, w):\n    a, b = x[:, 0] * w[0], x[:, 1] * w[1]\n"
        "    sigma = (a ** 2 + b ** 2) ** 0.5\n    return (a.abs() / sigma).mean()\n"
    )
    found = explained(module_of(tmp_path, code)[0].loss_of, X * (X > 2))
    first, *_ = found.remedies
    assert first.text == "add 1e-8 to the base of the power" and first.line == 3
    assert not any(each.parts for each in found.remedies if each.is_recommended)


def test_float64_is_no_remedy_of_a_difference_of_numbers_near_1(tmp_path):
    code = (
        "import torch\ndef cdf(y):\n    return 0.5 * (1 + torch.erf(y))\n"
        "def loss_of(x, w):\n    y = x * w\n"
        "    return -torch.log2(cdf(y + 0.5) - cdf(y - 0.5)).mean()\n"
    )
    found = explained(module_of(tmp_path, code)[0].loss_of, X)
    assert found.cause == "rounding" and found.remedies
    assert not any(each.in_float64 for each in found.remedies)
    assert any("where both are small" in each for each in found.notes)
