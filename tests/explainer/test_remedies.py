"""What is recommended was tried on the step, and helps in a fresh run."""

import re
from collections import Counter

import pytest
import torch
from assembled import Assembled
from guarding import assert_same, state_of
from remedied_files import Holder, edited, explained, module_of, recommended
from torch import nn

import overflow_fast
from overflow_fast import explain
from overflow_fast.explainer.remedies import written

NAN = float("nan")

# A loss of x and w that fails in the marked line, and x. Each rule by itself, and that
# a search tries it, is asked for in test_rules.py.
LINES = {
    "sqrt": ("torch.sqrt((x * w).pow(2).sum(-1)).mean()", torch.zeros(3, 2)),
    "method": ("(x * w).pow(2).sum(-1).sqrt().mean()", torch.zeros(3, 2)),
    "rsqrt": ("torch.rsqrt((x * w).pow(2).sum(-1)).mean()", torch.zeros(3, 2)),
    "pow": ("torch.pow(x.abs() * w, 0.5).mean()", torch.zeros(3, 2)),
    "log": ("torch.log(x * w).mean()", torch.zeros(3, 2)),
    "quotient": ("(x * w / (x * w).sum(-1, keepdim=True)).mean()", torch.zeros(3, 2)),
    "deviation": ("(x * w)[:1].std(0).mean()", torch.ones(3, 2)),
    "softmax": (
        "torch.softmax((x * w).masked_fill(x == 0, -torch.inf), -1)[:, 0].mean()",
        torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
    ),
    "mean of nothing": ("(x * w)[x > 5].mean() + (x * w).mean()", torch.ones(3, 2)),
    "exp": ("torch.exp(x * w).mean().log()", torch.full((3, 2), 200.0)),
    "all ignored": ("F.cross_entropy(x * w, torch.full((3,), -100))", torch.ones(3, 2)),
    "count": ("(x * w * (x > 9)).sum() / (x > 9).sum()", torch.ones(3, 2)),
}
LINES |= {
    "softmax of one's own": (
        "((x * w).exp() / (x * w).exp().sum(-1, keepdim=True))[:, 0].mean()",
        torch.full((3, 2), 200.0),
    ),
    "its logarithm": (
        "torch.log(torch.exp(x * w).sum(dim=-1)).mean()",
        torch.full((3, 2), 200.0),
    ),
    "half": ("(x * w).half().float().mean()", torch.full((3, 2), 1e5)),
    "to float16": (
        "(x * w).to(dtype=torch.float16).float().mean()",
        torch.full((3, 2), 1e5),
    ),
    "several calls, a line each": (
        "(\n        (x * w)\n        .sum(-1)\n        .log()\n        .mean()\n    )",
        torch.zeros(3, 2),
    ),
    "keywords": (
        "torch.div(other=(x * w).sum(), input=x * w).mean()",
        torch.zeros(3, 2),
    ),
    "inf less inf": (
        "(lambda s: (s - s.amax(-1, keepdim=True)).exp())"
        "((x * w).masked_fill(x == 0, -torch.inf)).mean()",
        torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
    ),
}
LINES |= {
    "module, all ignored": ("ENTROPY(x * w, torch.full((3,), -100))", torch.ones(3, 2)),
    "module, weights of 0": ("WEIGHTED(x * w, torch.full((3,), 1))", torch.ones(3, 2)),
    "module, transcript longer than its audio": (
        "CTC((x * w).log_softmax(-1)[:, None], torch.ones(1, 3).long(), "
        "torch.tensor([3]), torch.tensor([3]))",
        torch.ones(3, 2),
    ),
    "matrix that is singular": ("torch.logdet((x * w).T @ (x * w))", torch.ones(3, 2)),
    "equal eigenvalues": (
        "torch.linalg.eigh((x * w).T @ (x * w))[1].square()[0, 0]",
        torch.eye(2),
    ),
}
# Of public reports, in a line.
LINES |= {
    "deviation of one advantage": (
        "((x - (x * w).mean()) / ((x * w)[0, :1].std() + 1e-8) + x * w).mean()",
        torch.ones(3, 2),
    ),
    "standardized weight of one input": (
        "((x * w) / ((x * w)[:, :1].std(1, keepdim=True) + 1e-5)).mean()",
        torch.ones(3, 2),
    ),
    "tanh by hand": (
        "(((x * w).exp() - (-(x * w)).exp())"
        " / ((x * w).exp() + (-(x * w)).exp())).mean()",
        torch.full((3, 2), 200.0),
    ),
    "power that is learned": (
        "((x * w) ** (1 / w.exp().sum())).mean()",
        torch.zeros(3, 2),
    ),
    "cosine of nothing": (
        "((x * w).sum(1) / ((x * w).norm(dim=1) * w.norm())).mean()",
        torch.zeros(3, 2),
    ),
    "median of nothing but nan": (
        "(x / w).masked_fill(x == 1, float('nan')).nanmedian(1).values.sum()",
        torch.tensor([[1.0, 1.0], [2.0, 1.0]]),
    ),
    "mean of nothing but nan": (
        "(x / w).masked_fill(x == 1, float('nan')).nanmean(1).sum()",
        torch.tensor([[1.0, 1.0], [2.0, 1.0]]),
    ),
    "deviation by a difference of squares": (
        "(((x * w) ** 2).mean() - (x * w).mean() ** 2).sqrt()",
        1000 + torch.rand(3, 2, generator=torch.Generator().manual_seed(6)) / 2,
    ),
}
SOURCE = """import torch
import torch.nn.functional as F
ENTROPY, CTC = torch.nn.CrossEntropyLoss(), torch.nn.CTCLoss()
WEIGHTED = torch.nn.CrossEntropyLoss(torch.tensor([1.0, 0.0]), label_smoothing=0.1)
def loss_of(x, w):
    y = 1
    return {}
"""


@pytest.mark.parametrize("name", LINES)
def test_the_line_that_is_recommended_or_nearest_helps(name, tmp_path):
    code, x = LINES[name]
    module, path = module_of(tmp_path, SOURCE.format(code))
    found = explained(module.loss_of, x)
    good = recommended(found) or [found.nearest]
    assert all(good), found
    for remedy in good:
        assert remedy.file == str(path)
        assert 7 <= remedy.line <= 7 + code.count("\n")
        fresh, _ = module_of(tmp_path, edited(path, remedy))
        model = Holder()
        loss = fresh.loss_of(x, model.w)
        loss.backward()
        assert loss.isfinite() and model.w.grad.isfinite().all(), remedy
        assert loss.item() == pytest.approx(remedy.loss)
    assert str(good[0]) in str(found)


@pytest.mark.parametrize("labels", [[0, 0, 1], [0, -100, 1], [0, -100, 0]])
def test_the_function_of_a_loss_module_is_the_same_elsewhere(labels, tmp_path):
    """Also with its class weights, smoothed labels and ignored ones."""
    name = "weights of 0" if 1 in labels else "all ignored"
    code, x = LINES[f"module, {name}"]
    module, _ = module_of(tmp_path, SOURCE.format(code))
    remedy = explained(module.loss_of, x).remedies[0]
    given = code.partition(", ")[2][:-1]
    fixed = remedy.code.removeprefix("return ").replace(given, "y")
    space = {**vars(module), "x": torch.randn(3, 2), "w": torch.ones(2)}
    space["y"] = torch.tensor(labels)
    criterion = module.WEIGHTED if 1 in labels else module.ENTROPY
    assert eval(fixed, space).item() == pytest.approx(
        criterion(space["x"], space["y"]).item()
    )


HALF = """import torch
def dice(p, t, eps):
    return 1 - (2 * (p * t).sum() + eps) / (p.sum() + t.sum() + eps)
def loss_of(x, w):
    return dice(x.half() * w.half().repeat(2), t=x.half(), eps=1.0)
"""


@pytest.mark.slow
def test_a_function_of_the_loss_is_given_float32(tmp_path):
    module, path = module_of(tmp_path, HALF)
    x = torch.full((5_000, 4), 4.0)
    remedy = explained(module.loss_of, x).remedies[0]
    assert remedy.is_recommended
    assert remedy.text == "compute the sums of line 3 in float32"
    assert "(p * t).float().sum()" in remedy.code
    model = Holder()
    loss = module_of(tmp_path, edited(path, remedy))[0].loss_of(x, model.w)
    loss.backward()
    assert loss.isfinite() and loss.item() == pytest.approx(remedy.loss)
    assert model.w.grad.isfinite().all()


def normed(make):
    """A layer with a row of 0, under one of both kinds of weight norm."""
    layer = nn.Linear(3, 2)
    layer.weight.data[1] = 0
    return make(layer)


def with_negative_variance():
    layer = nn.BatchNorm1d(3).eval()
    layer.running_var[1] = -0.5
    return layer


UNUSABLE = {
    "weight norm": lambda: normed(nn.utils.parametrizations.weight_norm),
    "old weight norm": lambda: normed(nn.utils.weight_norm),
    "negative variance": with_negative_variance,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNUSABLE)
def test_what_a_layer_holds_is_repaired(name):
    model = nn.Sequential(nn.Linear(3, 3), UNUSABLE[name]())
    before = {key: each.clone() for key, each in model.state_dict().items()}
    x = torch.randn(4, 3)
    (remedy,) = recommended(explain(model, x, lambda x: model(x).sum()))
    assert all(each.equal(before[key]) for key, each in model.state_dict().items())
    exec(remedy.code, {"torch": torch, "model": model})
    assert model(x).isfinite().all()
    changed = [n for n, each in model.state_dict().items() if not each.equal(before[n])]
    assert [name for name in changed if name in remedy.text] == changed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [nn.utils, nn.utils.parametrizations])
def test_a_weight_of_zeros_that_its_norm_divides_is_initialized(kind):
    layer = nn.Linear(3, 2)
    nn.init.zeros_(layer.weight)
    model, x = (
        nn.Sequential(nn.Linear(3, 3), kind.spectral_norm(layer)),
        torch.ones(4, 3),
    )
    found = explain(model, x, lambda x: model(x).sum())
    remedy = found.remedies[0]
    assert "0 / 0 in `weight / sigma` (torch/nn/utils/" in str(found)
    assert remedy.is_right and "small random numbers when it is made" in remedy.text
    exec(remedy.code, {"model": model})
    assert model(x).isfinite().all()


OWN_SOFTMAX = """import torch
def loss_of(x, w):
    e = torch.exp(x * w)
    total = e.sum(dim=1, keepdim=True)
    return (e / total)[:, 0].mean()
"""


def test_a_softmax_over_several_lines(tmp_path):
    module, path = module_of(tmp_path, OWN_SOFTMAX)
    x = torch.tensor([[200.0, 201.0]])
    remedy = explained(module.loss_of, x).remedies[0]
    less = "x * w - (x * w).detach().amax(1, keepdim=True)"
    assert f"e = torch.exp({less})" in remedy.code
    loss = module_of(tmp_path, edited(path, remedy))[0].loss_of(x, torch.ones(2))
    assert loss.item() == pytest.approx(torch.softmax(x, 1)[0, 0].item())
    assert loss.item() == pytest.approx(remedy.loss)


POWER = """import torch
def loss_of(x, w):
    e = torch.exp(x * w)
    return {}
"""


@pytest.mark.parametrize(
    "line", ["e.log().mean()", "(e / e.sum() / e.sum()).mean()", "e.square().sum()"]
)
def test_an_exp_that_is_used_in_no_ratio_keeps_its_maximum(line, tmp_path):
    module, _ = module_of(tmp_path, POWER.format(line))
    found = explained(module.loss_of, torch.tensor([[200.0, 201.0]]))
    assert not any("maximum" in each.text for each in found.remedies), found


def test_an_augmented_assignment(tmp_path, as_kept):
    text = SOURCE.replace(
        "    return {}", "    y = x * w\n    y **= 0.5\n    return y.sum()"
    )
    module, path = module_of(tmp_path, text)
    good = recommended(explained(module.loss_of, -torch.ones(3, 2)))
    as_kept([remedy.code for remedy in good])
    fresh, _ = module_of(tmp_path, edited(path, good[0]))
    assert fresh.loss_of(-torch.ones(3, 2), torch.ones(2)).isfinite()


HEAD = "import torch\nimport torch.nn.functional as F\n"
ROWS = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
# Code that writes to what the failing call is given, or is called once alone.
WRITING = {
    "an item": (
        "def loss_of(x, w):\n    s = x * w\n    s[x == 0] = -torch.inf\n"
        "    return s.softmax(-1)[:, 0].mean()\n",
        *(ROWS, "s[x == 0] = -1e9"),
    ),
    "a method": (
        "def loss_of(x, w):\n    y = x * w\n    y.div_(x.sum())\n    return y.mean()\n",
        *(torch.zeros(3, 2), "y.div_(torch.where(x.sum() == 0, 1e-8, x.sum()))"),
    ),
    "an element of a list": (
        "def loss_of(x, w):\n    ys = [x * w]\n    for y in ys:\n"
        "        y /= y.sum()\n    return ys[0].mean()\n",
        torch.zeros(3, 2),
        "y /= torch.where(y.sum() == 0, 1e-8, y.sum())",
    ),
    "an eps that is added": (
        "def loss_of(x, w):\n    y = x * w\n    h = y.detach().half()\n"
        "    for each in [h]:\n        each += 1e-8\n"
        "    return (torch.log(h) + y).mean()\n",
        *(torch.eye(200)[1:, :2].logical_not().float(), "each += 1e-4"),
    ),
    "a module that is called once": (
        "LAYER = torch.nn.Dropout(0.0)\ndef loss_of(x, w):\n"
        "    p = torch.softmax(LAYER(x * w * 1e4), -1)\n"
        "    return torch.log(p).mean()\n",
        *(torch.tensor([[0.5, -0.5]]), "(exact_argument := LAYER(x * w * 1e4))"),
    ),
    "a module of torch": (
        "SOFTMAX = torch.nn.Softmax(-1)\ndef loss_of(x, w):\n"
        "    return SOFTMAX(torch.where(x == 0, -torch.inf, x * w))[:, 0].mean()\n",
        *(ROWS, "F.softmax(torch.where(x == 0, -torch.inf, x * w).clamp(min=-1e9),"),
    ),
}


@pytest.mark.parametrize("name", WRITING)
def test_a_line_does_what_was_tried(name, tmp_path):
    code, x, wanted = WRITING[name]
    module, path = module_of(tmp_path, HEAD + code)
    found = explained(module.loss_of, x)
    good = recommended(found)
    assert any(wanted in each.code for each in good), found
    for remedy in (each for each in good if each.code):
        text = path.read_text()
        for part in sorted(remedy.parts or [remedy], key=lambda each: -each.line):
            path.write_text(edited(path, part))
        fresh, model = module_of(tmp_path, path.read_text())[0], Holder()
        path.write_text(text)
        loss = fresh.loss_of(x, model.w)
        loss.backward()
        assert loss.item() == remedy.loss and model.w.grad.isfinite().all(), remedy


def test_a_change_that_could_not_be_made_is_not_said_to_be_tried(tmp_path, as_kept):
    """What it reads is written to before the call."""
    module, _ = module_of(
        tmp_path,
        "import torch\ndef loss_of(x, w):\n    y = x * 1.0\n    p = y.exp()\n"
        "    y.mul_(0)\n    return (torch.log(p) * w).mean()\n",
    )
    found = explained(module.loss_of, torch.full((3, 2), 200.0))
    texts = [each.text for each in found.remedies]
    as_kept(texts)
    assert not any("exp itself" in text for text in texts)


def test_what_is_moved_on_its_way_is_told_in_words(tmp_path, as_kept):
    module, _ = module_of(
        tmp_path,
        "import torch\ndef entropy(p):\n    return -(p * torch.log(p)).sum()\n"
        "def loss_of(x, w):\n    p = torch.softmax(x * w * 1e4, -1)\n"
        "    return entropy(p.flatten())\n",
    )
    found = explained(module.loss_of, torch.tensor([[0.5, -0.5]]))
    line, words = found.remedies[:2]
    assert line.is_recommended and line.code and words.is_recommended
    assert words.code == "" and words.line == 3
    as_kept(re.sub(r"remedied_\d+", "remedied", words.text))


def test_what_did_not_help_is_not_recommended(tmp_path):
    code = "torch.log(x * w).mean() + torch.polygamma(1, x * w).mean()"
    module, _ = module_of(tmp_path, SOURCE.format(code))
    found = explained(module.loss_of, torch.zeros(3, 2))
    assert found.cause == "undefined"
    assert found.remedies and not any(each.is_finite for each in found.remedies)
    assert "did not help:" in str(found) and "tried  " not in str(found)


def test_a_line_over_several_lines_is_replaced_whole(tmp_path):
    code = "torch.sqrt(\n    (x * w).pow(2).sum(\n      -1\n    )\n  ).mean()"
    module, path = module_of(tmp_path, SOURCE.format(code))
    remedy = explained(module.loss_of, torch.zeros(3, 2)).remedies[0]
    assert (remedy.line, remedy.is_recommended) == (7, True)
    fresh, _ = module_of(tmp_path, edited(path, remedy))
    assert fresh.loss_of(torch.zeros(3, 2), torch.ones(2)).isfinite()


NESTED = """import torch
def outer(x, w):
    eps = 0.0
    def inner(y):
        return torch.sqrt(y + eps)
    return inner((x * w).pow(2).sum(-1)).mean()
make = lambda x, w: (lambda y: y.log())(x * w).mean()
"""


@pytest.mark.parametrize("name", ["outer", "make"])
def test_functions_within_functions(name, tmp_path):
    module, path = module_of(tmp_path, NESTED)
    function = getattr(module, name)
    code = function.__code__
    found = explained(function, torch.zeros(3, 2))
    assert found.remedies[0].is_recommended
    assert function.__code__ is code
    fresh, _ = module_of(tmp_path, edited(path, found.remedies[0]))
    assert getattr(fresh, name)(torch.zeros(3, 2), torch.ones(2)).isfinite()


def test_of_a_file_that_is_not_what_runs_no_line_is_shown(tmp_path, as_kept):
    code, x = LINES["sqrt"]
    module, path = module_of(tmp_path, SOURCE.format(code))
    path.write_text(SOURCE.format(code).replace("y = 1", "y = 2"))
    found = explained(module.loss_of, x)
    assert [each.code for each in recommended(found)] == [""]
    as_kept(found.remedies[0].text)


# Precision.


class Wide(Assembled):
    """Overflows in float16 in `body.1`, and is small again after `norm`."""

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


def make_wide():
    torch.manual_seed(0)
    model = Wide(
        body=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        norm=nn.LayerNorm(4),
        head=nn.Linear(4, 1),
    )
    with torch.no_grad():
        model.body[1].weight *= 1e6
    return model


def make_clamped():
    """The same with float16 weights."""
    model = make_wide()
    with torch.no_grad():
        model.body[1].weight.clamp_(-3e4, 3e4)
    return model.half()


def loss_with(model):
    return lambda x: model(x).float().pow(2).mean()


def test_the_fewest_modules_run_in_float32():
    model = make_clamped()
    x = torch.ones(3, 4).half() * 8
    before = {name: (t.dtype, t.data_ptr()) for name, t in model.state_dict().items()}
    found = explain(model, x, loss_with(model), budget=16)
    good = recommended(found)
    assert (found.cause, found.module) == ("range overflow", "body.1")
    assert good[0].code == (
        "overflow_fast.keep_in_fp32(model, ['body.1'], until=['norm'])"
    )
    assert good[1].code.startswith("model.to(torch.bfloat16)")
    after = {name: (t.dtype, t.data_ptr()) for name, t in model.state_dict().items()}
    assert after == before
    assert all("forward" not in vars(module) for module in model.modules())
    exec(good[0].code, {"overflow_fast": overflow_fast, "model": model})
    loss = loss_with(model)(x)
    loss.backward()
    assert loss.item() == pytest.approx(good[0].loss)
    assert all(p.grad.isfinite().all() for p in model.parameters())


class Angle(nn.Module):
    def forward(self, a, b):
        cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
        return torch.sqrt(1 - cosine * cosine)


class Pair(Assembled):
    def forward(self, x, y):
        return self.angle(self.left(x), self.right(y))


def test_a_module_whose_digits_are_lost_in_bfloat16_runs_in_float32():
    torch.manual_seed(0)
    model = Pair(left=nn.Linear(6, 16), right=nn.Linear(6, 16), angle=Angle())
    model.right.load_state_dict(model.left.state_dict())
    model.bfloat16()
    drawn = torch.Generator().manual_seed(2)
    x = torch.randn(8, 6, generator=drawn).bfloat16()
    y = x + (torch.randn(8, 6, generator=drawn) * 0.03).bfloat16()
    found = explain(model, (x, y), lambda batch: model(*batch).float().mean())
    best = recommended(found)[0]
    assert best.code == 'overflow_fast.keep_in_fp32(model, ["angle"])'
    assert best.loss == pytest.approx(best.true_loss, rel=1e-2)


def test_autocast_in_bfloat16(as_kept):
    model = make_wide()

    def loss(x):
        with torch.autocast("cpu", torch.float16):
            return model(x).float().pow(2).mean()

    found = explain(model, torch.ones(3, 4) * 8, loss)
    as_kept([each.text for each in found.remedies if each.is_recommended])
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16  # torch's own default


UNDER_AUTOCAST = """import torch
import torch.nn.functional as F
def loss_of(x, w):
    with torch.autocast("cpu", torch.float16):
        h = x.half()
        a = {}
        return {} * w.sum()
"""
# What overflows, what becomes of it, and whether code is known that computes it in
# float32: autocast casts the operands of a product again.
CAST_AGAIN = {
    "product": ("h @ h", "(a / 100).sum()", False),
    "function": ("F.linear(h, h)", "(a / 100).sum()", False),
    "einsum": ("torch.einsum('ij,jk->ik', h, h)", "(a / 100).sum()", False),
    "no product": ("h * h", "(a / 100).mean()", True),
    "a product of it": (
        *("h * h", "torch.dot(((a * 1e-9) @ (h * 1e-4))[0], (h * 1e-4)[0])"),
        True,
    ),
}


@pytest.mark.parametrize("name", CAST_AGAIN)
def test_code_in_a_wider_dtype_is_finite_under_autocast(name, tmp_path):
    made, used, is_written = CAST_AGAIN[name]
    module, path = module_of(tmp_path, UNDER_AUTOCAST.format(made, used))
    x = torch.full((4, 4), 300.0)
    found = recommended(explained(module.loss_of, x))
    assert found
    written = [each for each in found if each.file]
    assert any("in float32" in each.text for each in written) == is_written
    for remedy in written:
        fresh, _ = module_of(tmp_path, edited(path, remedy))
        loss = fresh.loss_of(x, Holder().w)
        assert loss.item() == pytest.approx(remedy.loss), remedy


@pytest.mark.parametrize("name", ["half", "to float16"])
def test_a_cast_of_the_programs_own_is_none_of_autocasts(name, tmp_path, as_kept):
    code, x = LINES[name]
    module, _ = module_of(tmp_path, SOURCE.format(code))
    cast, clamp = explained(module.loss_of, x).remedies
    assert cast.is_right
    as_kept(cast.text)
    assert ".clamp(-65504, 65504)" in clamp.code and clamp.misses == "loss"


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("import torch as T", "T.log(x * w)"),
        ("from torch import special as s", "s.xlogy(x * w, x * w)"),
        ("from torch.nn import functional as fn", "fn.normalize(x * w, eps=0.0)"),
    ],
)
def test_a_module_by_another_name_is_no_argument(imports, call, tmp_path):
    text = f"{imports}\n{SOURCE.format(f'{call}.mean()')}"
    module, path = module_of(tmp_path, text)
    for remedy in explained(module.loss_of, torch.zeros(3, 2)).remedies:
        again, _ = module_of(tmp_path, edited(path, remedy) if remedy.file else text)
        assert again.loss_of(torch.ones(3, 2), torch.ones(2)).isfinite()
        name = imports.split()[-1]
        assert f"{name}.clamp" not in remedy.code and f"({name} " not in remedy.code


def test_code_has_the_names_that_its_file_has(tmp_path):
    lines = "y = x * w\n    return (y / y.sum(-1, keepdim=True)).mean()"
    text = f"import torch as T\ndef loss_of(x, w):\n    {lines}\n"
    module, path = module_of(tmp_path, text)
    remedy = recommended(explained(module.loss_of, torch.zeros(3, 2)))[0]
    assert "T.where(" in remedy.code
    again, _ = module_of(tmp_path, edited(path, remedy))
    assert again.loss_of(torch.zeros(3, 2), torch.ones(2)).isfinite()


def test_a_torch_modules_call_has_the_files_names(tmp_path):
    lines = "labels = torch.full((3,), -100)\n    return loss(x * w, labels)"
    text = "import torch\nfrom torch import nn as n\nloss = n.CrossEntropyLoss()\n"
    text += f"def loss_of(x, w):\n    {lines}\n"
    module, path = module_of(tmp_path, text)
    remedy = recommended(explained(module.loss_of, torch.ones(3, 2)))[0]
    assert "n.functional.cross_entropy(" in remedy.code
    again, _ = module_of(tmp_path, edited(path, remedy))
    assert again.loss_of(torch.ones(3, 2), torch.ones(2)).isfinite()


def test_a_number_is_chosen_for_the_narrowest_dtype(tmp_path):
    lines = "scale = (x * 1e-9).half()\n    return (w / scale[0]).mean()"
    module, _ = module_of(tmp_path, f"import torch\ndef loss_of(x, w):\n    {lines}\n")
    found = explained(module.loss_of, torch.ones(3, 2))
    divided = [each for each in found.remedies if "where" in each.code]
    assert divided and all(each.is_finite for each in divided)
    assert not any("1e-8" in each.text for each in found.remedies)  # 0 in float16


def test_of_what_is_far_outside_of_a_domain_no_clamp_is_tried(tmp_path):
    code = "torch.log(1 - x.square() + 0 * w.detach()).mean() * w.sum()"
    module, _ = module_of(tmp_path, SOURCE.format(code))
    found = explained(module.loss_of, torch.full((3, 2), 1.2))
    assert found.reason == "1 - 1.44 is -0.44, where 1.2 ** 2 is 1.44"
    assert not any("clamp" in each.text for each in found.remedies)
    assert not any("clamp" in each.text for each in found.remedies)


def test_of_a_loop_the_texts_of_its_first_turns_are_compared(tmp_path, monkeypatch):
    code = "sum((x * w).half().square().float().mean() for _ in range(200))"
    module, _ = module_of(tmp_path, SOURCE.format(code))
    begun, begin = [], written.Writer.__init__

    def counted(self, root, calls):
        begun.append(root)
        begin(self, root, calls)

    monkeypatch.setattr(written.Writer, "__init__", counted)
    found = explained(module.loss_of, torch.full((3, 2), 1e3))
    assert any(each.is_right and each.code for each in found.remedies)
    turns = Counter(call.key for call in begun)
    assert turns and max(turns.values()) < 2 * 200


def test_a_remedy_of_one_turn_of_a_loop_is_of_all_turns_as_its_line_is(tmp_path):
    code = "sum((x * w)[x > each].mean() for each in (0, 5))"
    module, path = module_of(tmp_path, SOURCE.format(code))
    remedy = recommended(explained(module.loss_of, torch.ones(3, 2)))[0]
    assert "nothing to average" in remedy.text and remedy.code
    again, _ = module_of(tmp_path, edited(path, remedy))
    assert again.loss_of(torch.ones(3, 2), torch.ones(2)).item() == remedy.loss


# Data and weights.


def test_a_sample_that_is_no_outlier_comes_again(tmp_path):
    module, _ = module_of(tmp_path, SOURCE.format("(x * w).exp().mean()"))
    x = torch.tensor([[10.0, 10.0], [10.0, 200.0], [10.0, 20.0]])
    texts = [each.text for each in explained(module.loss_of, x).remedies]
    again = " (the next such one does it again)"
    assert f"leave sample 1 out of this batch{again}" in texts


@pytest.mark.parametrize("near", [1.0, 1e-30])
def test_one_of_several_samples_that_are_as_near_is_not_left_out(near, tmp_path):
    module, _ = module_of(tmp_path, SOURCE.format("(w / x).mean()"))
    x = torch.tensor([[1.0, 1.0], [1e-39, 1.0], [1.0, near], [1.0, 1.0]])
    found = explained(module.loss_of, x)
    assert found.sample == 1 and found.is_overflow, found
    assert any("sample 1" in e.text for e in found.remedies) == (near == 1), found


def test_samples_that_are_bad_are_left_out(as_kept):
    model, x = nn.Linear(4, 1), torch.randn(6, 4)
    x[2, 1] = x[4, 0] = NAN
    found = explain(model, (x,), lambda batch: model(batch[0]).pow(2).mean())
    (remedy,) = found.remedies
    assert remedy.is_recommended
    as_kept(remedy.text)
    wanted = model(x[[0, 1, 3, 5]]).pow(2).mean()
    assert remedy.loss == pytest.approx(wanted.item())


def test_without_a_loss_the_output_is_all_that_counts(as_kept):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    x = torch.ones(3, 4)
    x[1] = NAN
    (remedy,) = explain(model, x).remedies
    assert remedy.is_recommended
    as_kept(remedy.text)


def test_nothing_of_the_users_changes(tmp_path):
    model = make_clamped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state_of(model, optimizer)
    grads = [parameter.grad for parameter in model.parameters()]
    assert explain(model, torch.ones(3, 4).half() * 8, loss_with(model)).remedies
    assert_same(before, state_of(model, optimizer))
    after = [parameter.grad for parameter in model.parameters()]
    assert all(a is b for a, b in zip(grads, after, strict=True))


def test_the_budget_holds():
    model = make_clamped()
    found = explain(model, torch.ones(3, 4).half() * 8, loss_with(model), budget=2)
    assert found.replays <= 4 and len(found.remedies) <= 2


def test_a_change_that_the_budget_has_no_replay_for_is_said_to_be_left_out():
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.fill_(75.0)
        model.bias.zero_()
    x = torch.ones(4, 2)
    found = explain(model, x, lambda x: (model(x).exp() ** 5).mean(), budget=1)
    failed, left_out = found.remedies
    assert failed.tried and not failed.is_finite and not left_out.tried
    assert f"not tried {left_out.text}: the budget" in str(found)


def test_samples_that_the_budget_does_not_compare_are_not_named_and_it_is_said():
    x = torch.tensor([[1.0], [30.0], [60.0], [130.0]])
    model = Warp()
    for budget in range(1, 6):
        found = explain(model, x, lambda x: model(x).square().mean(), budget=budget)
        is_said = any("Which sample" in n for n in found.notes)
        assert is_said == (found.sample is None)
    assert found.sample == 3


def test_operands_that_need_brackets_get_them(tmp_path):
    code = "((x * w).half() * 60000 + (x * w).half() * 60000).float().mean()"
    module, _ = module_of(tmp_path, SOURCE.format(code))
    found = explained(module.loss_of, torch.ones(3, 2))
    assert found.cause == "range overflow"
    assert "does not compile" not in str(found)
    assert not any("does not compile" in note for note in found.notes)


# What remedies do to the samples that did not fail.


class Warp(nn.Module):
    def forward(self, y):
        return torch.log(torch.expm1(y))


class Bounded(nn.Module):
    def forward(self, y):
        return torch.exp(y).log1p()


def explain_last_sample(layer):
    model = nn.Sequential(nn.Linear(1, 1), layer)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.zero_()
    x = torch.tensor([[1.0], [30.0], [60.0], [130.0]])
    found = explain(model, x, lambda x: (model(x) - x).square().mean())
    assert found.sample == 3
    return found


@pytest.mark.slow
def test_a_remedy_that_changes_other_samples_says_so(as_kept):
    found = explain_last_sample(Warp())
    exact, bound, *_ = (each for each in found.remedies if each.elsewhere)
    assert exact.is_recommended and not bound.is_recommended
    assert not exact.elsewhere.change
    as_kept(exact)
    _, after = bound.elsewhere.losses
    others = torch.tensor([1.0, 30.0, 60.0])
    bounded = others.clamp(max=20).expm1().log()
    assert after == pytest.approx((bounded - others).square().mean().item(), rel=1e-3)
    as_kept(bound)


def test_a_remedy_that_changes_no_other_sample_comes_first(as_kept):
    remedies = recommended(explain_last_sample(Bounded()))
    changes = [each.change for each in remedies]
    assert changes == sorted(changes)
    as_kept(remedies[0].text)


@pytest.mark.slow
def test_the_places_of_a_long_loop_are_read_once_each(monkeypatch):
    class Scan(nn.Module):
        def forward(self, x):
            state, states = torch.zeros_like(x[0]), []
            for place in range(40):
                state = state + x[place] / (x[place] - 5)
                states.append(state)
            return torch.stack(states)

    read, writers = [], []
    node_at, init = written.node_at, written.Writer.__init__
    monkeypatch.setattr(written, "node_at", lambda at: read.append(at) or node_at(at))
    monkeypatch.setattr(
        written.Writer,
        "__init__",
        lambda self, *args: writers.append(args) or init(self, *args),
    )
    with torch.no_grad():
        explain(Scan(), torch.full((40, 2), 5.0))
    assert len(writers) >= 40  # one a turn
    assert len(read) < 40 * len(writers)  # 360 torch calls
