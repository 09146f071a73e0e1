"""Numbers of a batch that stand for something else, and rows of tables that are bad."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard, explain

LARGEST = torch.finfo(torch.float32).max


class Squared(nn.Linear):
    def forward(self, x):
        return super().forward(x.pow(2))


def explained(batch, model=None):
    model = model or Squared(3, 1)
    return explain(model, batch, lambda batch: model(batch).mean())


@pytest.mark.parametrize(
    "number", [LARGEST, -LARGEST, 9.969209968386869e36, 1e20, 3e25]
)
def test_a_number_of_one_row_that_is_like_no_other(number, as_kept):
    batch = torch.ones(4, 3)
    batch[2, 1] = number
    found = explained(batch)
    assert found.cause == "range overflow" and found.sample == 2
    as_kept(found.evidence[1])
    first = found.remedies[0]
    assert first.is_recommended
    space = {"batch": batch}
    exec(first.code, space)
    assert space["batch"].equal(
        torch.ones(4, 3).index_put_(
            (torch.tensor(2), torch.tensor(1)), torch.tensor(0.0)
        )
    )


@pytest.mark.parametrize("make", [lambda x: (x, 1), lambda x: [x], lambda x: {0: x}])
def test_the_change_of_a_part_of_the_batch_can_be_pasted(make):
    x = torch.ones(4, 3)
    x[2, 1] = 1e30
    batch, model = make(x), Squared(3, 1)
    first = explain(model, batch, lambda b: model(b[0]).mean()).remedies[0]
    assert first.is_recommended and "masked_fill" in first.code
    exec(first.code, {"batch": batch})
    assert batch[0][2, 1] == 0 and float(batch[0].sum()) == 11


def test_a_missing_value_that_is_not_large(as_kept):
    class Root(nn.Linear):
        def forward(self, x):
            return super().forward((x + 100).log())

    batch = torch.ones(4, 3)
    batch[1, 0] = -9999
    as_kept(explained(batch, Root(3, 1)).evidence[1])


def test_large_numbers_in_all_rows_are_none():
    batch = 1e25 * torch.rand(4, 3)
    batch[2, 1] = 1e30
    assert "holds" not in str(explained(batch).evidence)
    batch = torch.full((4, 3), 30.0)
    batch[2] = -999  # no more than the others, for a missing value
    assert "holds" not in str(explained(batch, Logarithm(3, 1)).evidence)


def test_a_batch_of_complex_numbers_is_explained():
    batch = torch.ones(4, 3, dtype=torch.complex64)
    batch[2, 1] = 1j
    model = nn.Linear(3, 1)
    found = explain(model, batch, lambda batch: model(batch.real.log()).mean())
    assert (found.op.name, found.sample) == ("aten.log", 2)
    assert not found.notes


class Logarithm(nn.Linear):
    def forward(self, x):
        return super().forward(x.log())


def test_the_same_number_in_two_tensors_is_not_replaced(as_kept):
    class Two(nn.Linear):
        def forward(self, batch):
            return super().forward(batch[0].pow(2) + batch[1])

    batch = torch.ones(4, 3), torch.ones(4, 3)
    batch[0][2, 1] = batch[1][2, 1] = 1e30
    found = explained(batch, Two(3, 1))
    as_kept(found.evidence)
    assert not any("1e+30" in each.text for each in found.remedies)


@pytest.mark.parametrize("most", [1.0, 50.0])
def test_labels_are_no_placeholders(most):
    batch = torch.zeros(4, 3)
    batch[2, 1] = most
    model = Squared(3, 1)
    found = explain(model, batch, lambda batch: (model(batch) / (50 - batch)).mean())
    assert "holds" not in str(found.evidence)
    found = explain(model, batch, lambda batch: (model(batch) / (1 - batch)).mean())
    assert "holds" not in str(found.evidence)


def test_a_mask_is_named_and_not_removed(as_kept):
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(4, 3)
    mask[2, 1] = lowest

    class Scores(nn.Linear):
        def forward(self, mask):
            return super().forward(torch.ones_like(mask)) + mask + 1e38 * mask.sign()

    found = explained(mask, Scores(3, 3))
    as_kept(found.evidence[1])
    assert not any("0 for" in each.text for each in found.remedies)


# Tables.


def test_the_bad_row_of_an_embedding(as_kept):
    model = nn.Sequential(nn.Embedding(32, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight[[7, 30]] = torch.nan
    ids = torch.tensor([[1, 2], [3, 7]])
    found = explain(model, ids, lambda batch: model(batch).mean())
    as_kept(found.evidence[0])
    optimizer = torch.optim.SGD(model.parameters())
    with OverflowGuard(model, optimizer) as guard:
        with pytest.raises(NonFiniteError) as caught:
            guard.run(lambda: model(ids).mean()).backward()
            optimizer.step()
    as_kept(caught.value.report.explanation)


# Numbers and rates.


def test_a_nan_that_torch_itself_gives_is_not_said_to_be_the_programs(as_kept):
    model = nn.Linear(3, 3, bias=False)
    model.weight.data = -torch.eye(3)
    loss = lambda batch: torch.logdet(model(batch))  # noqa: E731
    found = explain(model, torch.eye(3), loss)
    assert found.cause == "undefined"
    as_kept(found.reason)


def test_a_negative_rate_is_clamped(as_kept):
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])

    def loss(batch):
        return F.poisson_nll_loss(model(batch), torch.ones(3, 2), log_input=False)

    found = explain(model, torch.ones(3, 2), loss)
    as_kept(found.remedies[0].text)
    assert found.remedies[0].is_recommended


@pytest.mark.parametrize(("size", "is_named"), [(90.0, False), (250.0, True)])
def test_a_sample_far_above_the_others_is_said_before_a_clamp_is_offered(
    size, is_named
):
    batch = torch.ones(4, 3)
    batch[2] = size
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 1 / 3)
    found = explain(model, batch, lambda batch: model(batch).exp().mean())
    assert found.sample == 2 and found.nearest.text.startswith("clamp the argument")
    said = "`batch` is up to 250 in magnitude there, 250 times the largest of the other"
    lines = str(found).splitlines()
    where = [i for i, line in enumerate(lines) if said in line]
    assert bool(where) is is_named is bool(found.to_dict()["sample_outlier"])
    first = next(i for i, line in enumerate(lines) if line.startswith("nearest"))
    assert ".clamp(" in lines[first + 1]
    assert all(lines[i].startswith("sample ") and i < first for i in where)
    of_data = [each for each in found.remedies if each.is_of_data]
    assert of_data and all(each.is_recommended for each in of_data)
    assert any("above 20" in each.text for each in of_data) is is_named
