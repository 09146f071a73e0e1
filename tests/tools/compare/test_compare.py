"""Comparisons of recordings: silent on healthy pairs, right on planted errors."""

import copy
import json
import re

import pytest
import torch
from compared_models import batch, tower

import overflow_fast


@pytest.fixture
def compared(tmp_path):
    """Records a step of two models and compares them."""

    def compare(model, reference, x=None, y=None, **options):
        numbers = len(list(tmp_path.iterdir()))
        folders = [tmp_path / f"{numbers}{name}" for name in "ab"]
        x = batch() if x is None else x
        pairs = ((model, x), (reference, x if y is None else y))
        for folder, (each, given) in zip(folders, pairs, strict=True):
            with overflow_fast.recording(folder, each):
                each(given).backward()
        return overflow_fast.compare(*folders, **options)

    return compare


def eps(model):
    model.blocks[1].norm.eps = 1e-1


def weight(model):
    model.blocks[1].up.weight.data.mul_(1.01)


def temperature(model):
    model.blocks[1].attention.temperature = 0.2


def float8(model):
    def rounded(module, args, output):
        return output + (output.to(torch.float8_e4m3fn).to(output) - output).detach()

    model.blocks[1].down.register_forward_hook(rounded)


def swapped(model):
    model.blocks[1], model.blocks[2] = model.blocks[2], model.blocks[1]


def backward(model):
    weight = model.blocks[1].up.weight
    weight.register_hook(lambda gradient: gradient * 1.1)


def overflow(model):
    model.blocks[1].act.register_forward_hook(lambda m, a, out: out / 0)


PLANTED = {
    weight: ("blocks.1.up", "weights"),
    eps: ("blocks.1.norm", "forward"),
    temperature: ("blocks.1.attention", "forward"),
    swapped: ("blocks.1.attention.qkv", "weights"),
    backward: ("blocks.1.up", "backward"),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_wrong_layer_is_named(compared, plant, dtype):
    model, reference = tower().to(dtype), tower().to(dtype)
    plant(model)
    diff = compared(model, reference, batch().to(dtype))
    assert (diff.first.module, diff.first.kind) == PLANTED[plant], diff
    assert diff.differs


def test_a_function_between_modules_is_placed(compared, as_kept):
    model = tower()
    temperature(model)
    diff = compared(model, tower())
    assert diff.first.after == "blocks.1.attention.qkv"
    as_kept(diff.first)


def test_what_follows_is_inherited(compared):
    model = tower()
    eps(model)
    diff = compared(model, tower())
    made = [row for row in diff.rows if row.verdict == "introduced"]
    assert [str(row.place) for row in made] == ["blocks.1.norm: output"]
    head = next(row for row in diff.rows if str(row.place) == "head: output")
    assert head.verdict == "propagated" and 0.1 < head.relative / head.propagated < 8


def test_non_finite_values_are_made_where_they_arise(compared):
    model = tower()
    overflow(model)
    diff = compared(model, tower(), batch())
    assert diff.first.module in ("blocks.1.act", "blocks.1")
    mine, its = diff.first.row.numbers("num_inf")
    assert mine > 0 == its


def test_equal_runs_are_equal(compared, as_kept):
    diff = compared(tower(), tower())
    assert diff.first is None and not diff.differs
    assert diff.counts()["equal"] == len(diff.rows) > 100
    assert diff.said == []
    as_kept(diff.said, diff.verdict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_narrower_dtype_is_explained_by_rounding(compared, dtype, seed):
    model = tower(seed)
    half = copy.deepcopy(model).to(dtype)
    diff = compared(half, model, batch(seed).to(dtype), batch(seed))
    assert diff.first is None, diff
    assert max(row.times or 0 for row in diff.rows) < 4
    assert any("dtypes of weights" in each for each in diff.said)


def test_another_batch_is_said(compared):
    diff = compared(tower(), tower(), batch(1), batch(2))
    assert diff.first.kind == "batch" and "other inputs" in str(diff)


def test_dropout_and_random_states_are_said(compared, tmp_path, as_kept):
    model = tower(dropout=0.5)
    torch.manual_seed(1)
    diff = compared(model, model)
    said = "\n".join(diff.said)
    as_kept(said)
    assert diff.first.module == "drop" and "unequal states" in diff.first.remark


def test_what_has_no_twin_is_said(compared, as_kept):
    as_kept("\n".join(compared(tower(num_blocks=2), tower(num_blocks=3)).said))


def test_wrapped_models_have_the_same_names(compared):
    model = torch.nn.DataParallel(tower())
    diff = compared(model, tower())
    assert diff.said == [] and diff.counts()["equal"] == len(diff.rows)


class Renamed(torch.nn.Module):
    """A tower whose blocks have other names."""

    def __init__(self):
        super().__init__()
        inner = tower()
        self.stem, self.drop, self.head = inner.embed, inner.drop, inner.head
        self.layer = inner.blocks

    def forward(self, x):
        x = self.drop(self.stem(x))
        for block in self.layer:
            x = block(x)
        return self.head(x).float().square().mean()


def test_names_are_mapped_by_patterns(compared):
    names = {r"^layer\.(\d+)": r"blocks.\1", "^stem$": "embed"}
    diff = compared(Renamed(), tower(), names=names)
    assert diff.said == [] and diff.counts()["equal"] == len(diff.rows)


def test_other_names_are_matched_by_order_and_shape(compared, as_kept):
    diff = compared(Renamed(), tower())
    assert diff.first is None
    assert diff.counts()["equal"] == len(diff.rows) > 100
    assert [each for each in diff.said if "not compared" in each] == []
    as_kept(diff.said[0])


def test_a_fingerprint_breaks_a_tie(compared, as_kept):
    class Chain(torch.nn.Module):
        def __init__(self, names):
            super().__init__()
            torch.manual_seed(0)
            layers = [torch.nn.Linear(8, 8) for _ in range(3)]
            self.layers = torch.nn.ModuleDict(zip(names, layers, strict=False))

        def forward(self, x):
            for layer in self.layers.values():
                x = layer(x).tanh()
            return x.sum()

    # The second lacks the first layer: what is given to it is as if that were done.
    whole, part = Chain("abc"), Chain("uvw")
    del part.layers["u"]
    given = whole.layers["a"](batch()).tanh().detach()
    as_kept(compared(part, whole, given, batch()).said)


def test_the_values_of_a_row(compared):
    class Scale(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.inner = torch.nn.Identity()
            self.factor = factor

        def forward(self, x):
            return (self.inner(x) * self.factor).sum()

    x = torch.tensor([[1.0, 2.0, -4.0]], requires_grad=True)
    diff = compared(Scale(1.0), Scale(1.5), x)
    row = next(row for row in diff.rows if row.place.role == "input_gradient")
    assert row.relative == pytest.approx(1 / 3)
    assert (row.numbers("low"), row.numbers("high")) == ((1.0, 1.5), (1.0, 1.5))


def test_it_is_written_in_all_formats(compared, tmp_path):
    model = tower()
    eps(model)
    diff = compared(model, tower())
    plain = json.loads(diff.to_json())
    assert plain["first"]["module"] == "blocks.1.norm" and plain["differs"] is True
    page = diff.to_html(tmp_path / "diff.html").read_text()
    assert page.count(str(diff.first)) == 1
    assert "http" not in page.lower() and page.count("<tr") > 20
    heads = re.findall('<th scope="col">([^<]*)', page)
    assert "relative" in heads and not {"nan", "inf", "reference"} & set(heads)
    first_row = page[page.index("<tbody>") : page.index("</tr>", page.index("<tbody>"))]
    assert first_row.count("<td") == len(heads)


def test_what_is_no_recording_is_an_error(tmp_path, as_kept):
    with pytest.raises(overflow_fast.RecordingError, match="holds no recording"):
        overflow_fast.compare(tmp_path, tmp_path)
    (tmp_path / "rank-0.step-0.jsonl").write_text(
        '{"kind": "recording", "schema": 99}\n'
    )
    with pytest.raises(overflow_fast.RecordingError) as raised:
        overflow_fast.compare(tmp_path, tmp_path)
    as_kept(raised.value)


class Masked(torch.nn.Module):
    """Attention scores under a mask of the lowest numbers."""

    def __init__(self):
        super().__init__()
        self.scores = Scores()

    def forward(self, x):
        mask = torch.zeros(x.shape[-1]).masked_fill(torch.arange(x.shape[-1]) > 2, -1)
        mask = mask.to(x.dtype) * torch.finfo(x.dtype).max
        return self.scores(x, mask).float().sum()


class Scores(torch.nn.Module):
    def forward(self, x, mask):
        return (x + mask).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masks_are_not_judged(compared, dtype):
    x = batch().requires_grad_()
    diff = compared(Masked(), Masked(), x.detach().to(dtype).requires_grad_(), x)
    assert diff.first is None, diff
    row = next(r for r in diff.rows if str(r.place) == "scores: input[1]")
    assert row.verdict == "rounding" and "a mask" in row.notes[0]
    same = compared(Masked(), Masked(), x, x)
    assert same.counts()["equal"] == len(same.rows)


def test_a_sign_that_changes_before_a_relu_is_no_difference(compared):
    def net(shift):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        model.append(torch.nn.Linear(64, 64)).append(Mean())
        # An output that rounding moves over 0: its whole gradient comes or goes.
        model[0].register_forward_hook(
            lambda m, a, out: torch.cat([out[:, :1] * 0 + shift, out[:, 1:]], 1)
        )
        return model

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    diff = compared(net(1e-9), net(-1e-9), x)
    assert diff.first is None, diff
    assert any(row.verdict == "propagated" for row in diff.rows)


class Mean(torch.nn.Module):
    def forward(self, x):
        return x.square().mean()


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_peft_are_looked_through(compared):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["up"], r=2)
    adapted = peft.get_peft_model(tower(), config)
    diff = compared(adapted, tower())
    assert diff.first is None, diff
    names = {str(row.place): row for row in diff.rows}
    row = names["base_model.model.blocks.1.up.base_layer.weight: parameter"]
    assert str(row.its.line) == "blocks.1.up.weight: parameter"
    assert names["base_model.model.blocks.1: output"].relative < 1e-6
    matched = [row for row in diff.rows if row.place.phase != "backward"]
    assert len(matched) > 70
