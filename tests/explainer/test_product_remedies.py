"""A product that overflows is scaled before it, or is in float32 for a while."""

import textwrap

import pytest
import torch
from remedied_files import edited, explained, module_of, recommended
from torch import nn

from overflow_fast import explain
from overflow_fast.explainer.replayer import Replayer

SOURCE = """import math
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.d, self.scale = 16, 0.25
        self.weight = nn.Parameter(torch.eye(16).half() * 30)

    def forward(self, x):
        q = k = x @ self.weight
        v = x
{}
"""
BODIES = {
    "a statement": """
        return torch.softmax(q @ k.mT / math.sqrt(self.d), -1) @ v
    """,
    "a factor in front": """
        weights = self.scale * (q @ k.transpose(-1, -2))
        weights = weights.masked_fill(weights < -9e3, -1e4)
        return F.softmax(weights, dim=-1) @ v
    """,
    "the next statement": """
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / math.sqrt(self.d)
        probs = nn.functional.softmax(scores, dim=-1)
        return torch.matmul(probs, v)
    """,
    "in place": """
        scores = torch.bmm(
            q,
            k.transpose(-1, -2),
        )
        scores /= self.d ** 0.5
        return F.dropout(scores.softmax(dim=-1), 0.0).bmm(v)
    """,
    "an argument": """
        w = q.bmm(k.mT).contiguous()
        a = F.softmax(w * self.scale + 0.5, dim=-1)
        return a.bmm(v)
    """,
}


def followed(tmp_path, body):
    """The explanation, and whether each recommended remedy helps a fresh run."""
    text = SOURCE.format(textwrap.indent(textwrap.dedent(body), " " * 8))
    module, path = module_of(tmp_path, text)
    x = torch.full((2, 4, 16), 3.0).half()
    found = explain(module.Model(), x, lambda model, x: model(x).float().mean())
    good = [remedy for remedy in found.remedies if remedy.is_recommended]
    for remedy in good:
        if remedy.file:
            model = module_of(tmp_path, edited(path, remedy))[0].Model()
            loss = model(x).float().mean()
            loss.backward()
            assert loss.item() == pytest.approx(remedy.loss), remedy
            assert model.weight.grad.isfinite().all()
    return found, good


@pytest.mark.parametrize("name", BODIES)
def test_scores_are_scaled_before_the_product(name, tmp_path):
    found, good = followed(tmp_path, BODIES[name])
    assert found.cause == "range overflow", found
    assert [each.text.endswith("before the product") for each in good] == [True, False]
    assert good[1].text.startswith("compute `") and "in float32" in good[1].text
    assert ".to(q.dtype)" in good[1].code and ".to(" not in good[0].code


def test_what_is_read_unscaled_as_well_stays_as_it_is(tmp_path):
    _, good = followed(
        tmp_path,
        """
        raw = q @ k.mT
        a = F.softmax(raw / 4, dim=-1)
        return a @ v + raw.clamp(max=1).mean()
        """,
    )
    assert good[0].code == "a = F.softmax(q / 4 @ k.mT, dim=-1)"


def test_what_is_scaled_on_a_condition_is_scaled_before_on_the_same(tmp_path):
    _, good = followed(
        tmp_path,
        """
        scores = q @ k.mT
        if self.scale < 1:
            scores = scores * self.scale
        return F.softmax(scores, dim=-1) @ v
        """,
    )
    assert good[0].code == "scores = q * self.scale @ k.mT"


def test_a_mask_is_no_scale(tmp_path):
    found, good = followed(
        tmp_path,
        """
        a = (q @ k.mT) * torch.eye(4).half().mul(0.1)
        return F.softmax(a, -1) @ v
        """,
    )
    texts = [each.text for each in good]
    assert found.remedies and not any("before" in text for text in texts)


def test_a_number_in_a_tensor_widens_no_tensor(tmp_path):
    _, good = followed(
        tmp_path,
        """
        scale = self.weight[0, 1] + 12
        return (scale.exp() * x[..., :4] @ k[..., :4].mT).softmax(-1) @ v
        """,
    )
    assert "(scale.float().exp() * x[..., :4].float() @" in good[0].code


def test_float32_as_far_as_the_end_of_the_expression(tmp_path, as_kept):
    _, good = followed(
        tmp_path,
        """
        return F.normalize(q @ k.mT, dim=-1) @ v
        """,
    )
    as_kept(good[0].text)
    assert "F.normalize(q.float() @ k.mT.float(), dim=-1).to(q.dtype)" in good[0].code


@pytest.mark.slow
@pytest.mark.parametrize("factor", ["512", "self.gain", "float(self.gain)"])
def test_a_number_has_no_dtype_to_change(tmp_path, factor):
    """Only the tensor of a product is cast, wherever the number comes from."""
    for product in (f"x * {factor}", f"{factor} * x"):
        module, _ = module_of(
            tmp_path,
            "import torch\nfrom torch import nn\n\n"
            "class Model(nn.Module):\n"
            "    gain = 512\n\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.weight = nn.Parameter(torch.ones(4).half())\n\n"
            "    def forward(self, x):\n"
            "        x = x * self.weight\n"
            f"        return nn.functional.layer_norm({product}, (4,))\n",
        )
        x = torch.tensor([[1.0, 2, 3, 400]]).half()
        found = explain(module.Model(), x, lambda m, x: m(x).float().mean())
        first = found.remedies[0]
        assert first.is_recommended and "x.float()" in first.code, found
        assert all(each.tried for each in found.remedies), found


def test_a_sum_that_begins_as_a_number_is_not_cast(tmp_path):
    """In the first turn of the loop 0.5 * y is no tensor, and has no dtype."""
    text = """
def loss_of(x, w):
    y = 0.0
    for u in (x.half() * w.half()).unbind(1):
        y = 0.5 * y + u * u
    return y.float().mean()
"""
    module, path = module_of(tmp_path, text)
    x = torch.ones(4, 3, 2)
    x[1, 1] = 300
    for each in recommended(explained(module.loss_of, x)):
        if each.code and each.file:
            fresh, _ = module_of(tmp_path, edited(path, each))
            assert fresh.loss_of(x, torch.ones(2)).isfinite(), each


def test_a_sum_beside_the_one_that_overflows_is_wider_as_well_if_it_is_nearly_full(
    tmp_path,
):
    """A larger picture overflows it in another step."""
    text = """from torch import nn

class Model(nn.Linear):
    def forward(self, x):
        target = (x * 0 + 1).half()
        pred = (x * self.bias).half()
        both = (pred * target).sum(1)
        union = pred.sum(1) + target.sum(1)
        return 1 - 2 * both / (union + 1)
"""
    module, path = module_of(tmp_path, text)
    model, x = module.Model(1, 1), torch.full((2, 70_000), 0.9)
    nn.init.ones_(model.bias)
    found = explain(model, x, lambda model, x: model(x).mean())
    remedy = recommended(found)[0]
    fresh = module_of(tmp_path, edited(path, remedy))[0].Model(1, 1)
    nn.init.ones_(fresh.bias)
    assert fresh(torch.full((2, 90_000), 0.9)).isfinite().all(), remedy


def test_how_large_results_are_is_listed_without_their_derivatives(
    tmp_path, monkeypatch
):
    parts, run = [], Replayer.run

    def noted(self, *args, **kwargs):
        parts.extend(args[:1])
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Replayer, "run", noted)
    _, good = followed(tmp_path, BODIES["a statement"])
    assert any("in float32" in each.text for each in good)
    assert any(not part.has_backward for part in parts if part.has_calls)
