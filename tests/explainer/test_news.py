"""What is new in a bad step: one line of what clean steps have kept anyway."""

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

NAN = float("nan")
BAD = 3  # the step


def numbers(step):
    return torch.Generator().manual_seed(step)


def rows(step, *size):
    return torch.rand(*size, generator=numbers(step)) + 0.5


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def news_of(
    batch_of, loss_of, model=None, runs=True, lr=1e-3, before=lambda model, step: None
):
    """The line of the first bad step of a loop."""
    model = make() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    guard = OverflowGuard(model, optimizer, explain=True)
    with pytest.raises(NonFiniteError) as error:
        for step in range(8):
            before(model, step)
            batch = batch_of(step)
            loss = (
                guard.run(lambda batch=batch: loss_of(model, *batch))
                if runs
                else loss_of(model, *batch)
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    report = error.value.report
    assert report.step == BAD, report
    found = report.explanation
    assert (f"new       {found.news}" in str(report)) == bool(found.news)
    return found.news


def in_another_unit(step):
    return (rows(step, 8, 4) * (1e30 if step == BAD else 1),)


@pytest.mark.parametrize("runs", [True, False])
def test_a_batch_in_another_unit(runs):
    name = "batch[0]" if runs else "input"
    text = news_of(in_another_unit, lambda m, x: (m(x) ** 2).mean(), runs=runs)
    assert text.startswith(f"`{name}` is up to 1.4")
    told = "at most 1.48 in the last one, and in 64 values of each of the 2 before it"
    assert text.endswith(f"in this batch, {told}")


def test_steps_before_the_last_one_that_had_larger_numbers_are_told_apart():
    def batch_of(step):
        return (rows(step, 8, 4) * {0: 3, BAD: 1e30}.get(step, 1),)

    text = news_of(batch_of, lambda m, x: (m(x) ** 2).mean())
    assert "in the last one (64 values of each of the 2 before it: at most " in text


def test_what_the_function_makes_of_the_batch_is_known_by_samples():
    def loss_of(model, x, scale):
        return (model(x * scale) ** 2).mean()

    text = news_of(lambda s: (rows(s, 8, 4), 1e30 if s == BAD else 1.0), loss_of)
    assert text.startswith("the model's `input` is up to ")
    assert "(64 values of each of the 3 before it: at most 1." in text


class Graphs:
    """A batch of graphs, with its nodes and its edges; hands out what it stores."""

    def __init__(self, x):
        self._store = {"x": x, "edges": torch.tensor([[0, 1, 2], [1, 2, 3]])}

    def __getattr__(self, key):
        if key.startswith("_"):
            raise AttributeError(key)
        return self._store[key]


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_object_of_which_each_step_has_another_is_a_batch(is_kept):
    model, kept = make(), Graphs(rows(0, 8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = OverflowGuard(model, optimizer, explain=True)
    with pytest.raises(NonFiniteError) as error:
        for step in range(BAD + 1):
            (x,) = in_another_unit(step)
            data = kept if is_kept else Graphs(x)
            data._store["x"] = x
            loss = guard.run(
                lambda data=data: model(data.x)[data.edges[0]].pow(2).mean()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    new = error.value.report.explanation.news
    assert new.startswith("`data.x` is up to 1.45e+30 in this") == (not is_kept), new


def of_lengths(lengths):
    """A batch of another length in each step, with numbers as large as usual."""
    return lambda step: (rows(step, 4, lengths[step], 4), step)


def that_overflows(model, x, step):
    return (model(x) ** 2 * (1e38 if step == BAD else 1.0) * 100).mean()


def test_a_batch_that_is_longer_than_any_before():
    text = news_of(of_lengths([9, 20, 10, 42]), that_overflows)
    was = "its dimension 1 was at most 20 in clean steps"
    assert text == f"`batch[0]` is [4, 42, 4] in this batch; {was}"


@pytest.mark.parametrize("lengths", [[30, 20, 10, 42], [42, 42, 42, 42]])
def test_a_batch_of_a_usual_length_is_no_news(lengths):
    assert news_of(of_lengths(lengths), that_overflows) == ""


@pytest.mark.parametrize("num", [1, 9])
def test_all_forwards_of_clean_steps_are_known_by_their_length(num):
    """Not only the last one of each, which is all of the batch that is kept."""

    def before(model, step):
        for i in range(num if step < BAD else 0):  # of more than 8 not all are kept
            model(rows(step, 4, 10 if i else 41, 4)).mean().backward()

    lengths = of_lengths([9, 9, 9, 42])
    assert news_of(lengths, that_overflows, before=before) == ""


def test_a_length_is_told_of_overflows_alone():
    def of_step(model, x, step):
        return (model(x) * 0).log().mean() if step == BAD else model(x).mean()

    assert "dimension" not in news_of(of_lengths([9, 9, 9, 42]), of_step)


def test_labels_that_are_nan():
    def batch_of(step):
        y = rows(step, 8, 1)
        y[2] = NAN if step == BAD else y[2]
        return rows(step, 8, 4), y

    text = news_of(batch_of, lambda m, x, y: (m(x) - y).square().mean())
    assert text.startswith("1 of 8 values of `batch[1]` are not finite; none was in")


def test_a_divisor_of_zero():
    def batch_of(step):
        y = rows(step, 8, 1)
        y[2] = 0 if step == BAD else y[2]
        return rows(step, 8, 4), y

    text = news_of(batch_of, lambda m, x, y: (m(x) / y).mean())
    assert text == "`batch[1]` has 1 zero among 8 values, none in the last clean step"


def test_a_number_of_zero():
    def batch_of(step):
        return rows(step, 8, 4), torch.tensor(0.0 if step == BAD else 1.0)

    text = news_of(batch_of, lambda m, x, y: m(x).mean() / y)
    assert text == "`batch[1]` is 0, and was not in the last clean step"


def test_a_column_that_is_constant():
    def batch_of(step):
        x = rows(step, 8, 4)
        x[:, 2] = 0.5 if step == BAD else x[:, 2]
        return (x,)

    def loss_of(model, x):
        return (model(x) / x.std(0)).mean()

    text = news_of(batch_of, loss_of)
    assert text == "`batch[0][:, 2]` is 0.5 throughout, alone of 4"


@pytest.mark.parametrize("num", [1, 2])
def test_a_channel_that_is_constant_is_told_where_it_is_alone(num):
    def batch_of(step):
        x = rows(step, 8, 4, 5)
        x[:, :num] = 0.5 if step == BAD else x[:, :num]
        return x, rows(step, 8, 4)

    def loss_of(model, x, y):
        deviation = x.sub(x.mean((0, 2), keepdim=True)).square().mean((0, 2)).sqrt()
        return (model(y) / deviation).mean()

    alone = "`batch[0][:, 0]` is 0.5 throughout, alone of 4"
    assert news_of(batch_of, loss_of) == (alone if num == 1 else "")


def test_labels_of_one_sample_that_are_constant():
    def batch_of(step):
        labels = torch.randint(0, 4, (4, 9), generator=numbers(step))
        labels[2] = -100 if step == BAD else labels[2]
        return rows(step, 4, 4), labels

    def loss_of(model, x, labels):
        counts = labels != -100
        return ((model(x) * counts).sum(1) / counts.sum(1)).square().mean()

    assert news_of(batch_of, loss_of).startswith(
        "sample 2 of `batch[1]` is -100 throughout; no sample was of one value"
    )


def test_a_sample_that_is_constant():
    def batch_of(step):
        y = rows(step, 8, 4)
        y[3] = 1 if step == BAD else y[3]
        return rows(step, 8, 4), y

    def loss_of(model, x, y):
        return ((model(x) - 1) / y.std(1, keepdim=True)).square().mean()

    text = news_of(batch_of, loss_of)
    assert text.startswith("sample 3 of `batch[1]` is 1 throughout; no sample was")


@pytest.mark.parametrize("of_ids", [False, True])
def test_a_sample_whose_rows_are_equal(of_ids):
    """Frames of a still picture, or a group of one candidate; its labels follow."""

    def batch_of(step):
        y = rows(step, 6, 3, 4)
        y = (y * 1e4).long() if of_ids else y
        y[4] = y[4, :1] if step == BAD else y[4]
        return y, y.double().mean(-1)

    def loss_of(model, y, labels):
        scores = model(y.float() / y.float().max())[..., 0]
        return (scores / labels.std(1, keepdim=True)).square().mean()

    text = news_of(batch_of, loss_of)
    assert text.startswith("sample 4 of `batch[0]` is one row 3 times; no sample was")


def of_objects(model, x, objects):
    """The mean over objects of which images may have none."""
    scores = [model(each).sum() * 0.1 for boxes, _ in objects for each in boxes]
    return (model(x).sum() + sum(scores)) / torch.tensor(float(len(scores)))


def images_with_objects(step, nums):
    boxes = [rows(step, n if step != BAD else 0, 4) for n in nums]
    return rows(step, 2, 4), [(each, torch.ones(len(each)).long()) for each in boxes]


def test_lists_that_are_empty():
    """One image has no object in clean steps either."""
    text = news_of(lambda step: images_with_objects(step, (2, 0)), of_objects)
    assert text == (
        "`batch[1]` is empty in this batch, and had 10 values in the last clean step"
    )


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_labels_that_are_constant(dtype):
    labels = torch.tensor([0, 1, 0, 2], dtype=dtype)
    text = news_of(
        lambda step: (rows(step, 4, 4), labels * (step != BAD)),
        lambda model, x, labels: (model(x)[:, 0] * (labels > 0)).sum() / labels.sum(),
    )
    assert text == "`batch[1]` is 0 throughout; it was not in the last clean step"


def test_labels_that_are_constant_are_told_only_where_they_were_given():
    labels = torch.tensor([0, 1, 0, 2])
    text = news_of(
        lambda step: (rows(step, 4, 4), labels * (step != BAD), step),
        lambda model, x, labels, step: (
            model(x) * 1e38 * 1e3 if step == BAD else model(x)
        ).mean(),
    )
    assert text == ""


def test_a_batch_of_one():
    def batch_of(step):
        return (rows(step, 1 if step == BAD else 8, 4),)

    text = news_of(batch_of, lambda m, x: m(x).squeeze(-1).std() * 1.0)
    assert text == "`batch[0]` is [1, 4] in this batch, [8, 4] in the last one"


def test_a_weight_that_something_else_has_written():
    def before(model, step):
        if step == BAD:
            with torch.no_grad():
                model[1].weight.zero_()

    def loss_of(model, x):
        return (model(x) / model[1].weight.norm()).mean()

    text = news_of(lambda s: (rows(s, 8, 4),), loss_of, before=before)
    assert text.startswith("the weight `1.weight` is 0 throughout, up to 0.")


def test_weights_that_diverge_are_no_news():
    """Their cause says it, with the step in which they began to grow."""

    def before(model, step):
        if step == BAD:
            with torch.no_grad():
                model[1].weight.fill_(1e30)

    def loss_of(model, x):
        return (model(x) ** 2).mean()

    assert news_of(lambda s: (rows(s, 8, 4),), loss_of, before=before) == ""


class Scaled(nn.Module):
    """A layer beside a small weight, which it has nothing to do with."""

    def __init__(self, first, name):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.tensor(first)))
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x).sum()


# How a weight is when the guard begins, what is added to it then, and a loss.
DRIFTS = {
    "through 0": (2.5, -3.0, lambda m, x: m.scale.log() + m(x)),
    "through 0, and the loss does not read it": (2.5, -3.0, lambda m, x: m(x) / 0),
    "to 0 from below": (-3.0, 3.0, lambda m, x: m(x) / m.scale),
    "to a large number": (0.5, 99.0, lambda m, x: m(x) * m.scale.exp()),
    "to a small one": (3.0, -2.99997, lambda m, x: m(x) * (1 / m.scale) ** 8),
    "several": ([0.5, 1.0], 99.0, lambda m, x: m(x) * m.scale.exp().sum()),
    "a large number that is not read": (0.5, 99.0, lambda m, x: m(x) / 0),
    "a gain as many have it": (1.0, 3.0, lambda m, x: m(x) / 0 * m.scale),
    "a weight of one column": ([[2.5]], -3.0, lambda m, x: m(x) / 0),
    "a bias": (2.5, -3.0, lambda m, x: m.bias.log() + m(x)),
    "to 0, one of several": ([3.0, 5.0], -3.0, lambda m, x: m(x) / m.scale.abs().min()),
    "below 0": ([2.0, 3.0], -4.0, lambda m, x: (m(x) * m.scale.sqrt()).sum()),
    "below 0, and it is not named": (
        [2.0, 3.0],
        -4.0,
        lambda m, x: m(x * m.scale[0]) / 0,
    ),
}
TOLD = {
    "through 0": "`scale` is -0.5; it was 2.5 when the guard began",
    "through 0, and the loss does not read it": "`scale` is -0.5; it was 2.5 when",
    "to 0 from below": "`scale` is 0; it was -3 when the guard began",
    "to a large number": "`scale` is 99.5; it was 0.5 when the guard began",
    "to a small one": "`scale` is 3e-05; it was 3 when the guard began",
    "several": "`scale` is up to 100; it was up to 1 when the guard began",
    "to 0, one of several": "1 of 2 values of `scale` is 0, none when the guard began",
    "below 0": "2 of 2 values of `scale` are below 0, none when the guard began",
}


@pytest.mark.parametrize("case", DRIFTS)
def test_a_small_weight_that_is_another_one_since_the_guard_began(case):
    first, change, loss_of = DRIFTS[case]
    model = Scaled(first, "bias" if case == "a bias" else "scale")
    (_, weight), *_ = model.named_parameters()

    def before(model, step):
        weight.data.copy_(torch.tensor(first) + change)

    told = news_of(
        lambda s: (rows(0, 8, 4), s),
        lambda m, x, s: loss_of(m, x) if s == BAD else m(x),
        model=model,
        before=before,
    )
    assert told.startswith(TOLD[case]) if case in TOLD else not told, told


def test_where_nothing_is_new_nothing_is_told():
    def loss_of(model, x, divisor):
        return model(x).mean() / divisor

    assert news_of(lambda s: (rows(s, 8, 4), float(s != BAD)), loss_of) == ""


def test_zeros_and_small_batches_are_told_only_where_they_were_given():
    """An overflow of a weight: a 0 in the batch is no news."""

    def batch_of(step):
        x = rows(step, 8, 4)
        x[0, 0] = 0.0 if step == BAD else x[0, 0]
        return x, 1e38 if step == BAD else 1.0

    assert "zero" not in news_of(batch_of, lambda m, x, s: (m(x) * s).pow(4).mean())


def test_a_batch_that_was_written_to_is_not_compared():
    def loss_of(model, x):
        loss = (model(x.clone()) ** 2).mean()
        x.mul_(1e7)  # it is not what the step was given
        return loss

    kept = rows(0, 8, 4)
    assert "in this batch" not in news_of(lambda step: (kept,), loss_of, lr=0.0)


def test_samples_of_eight_clean_steps_are_kept_and_none_of_a_bad_one():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = OverflowGuard(model, optimizer, on_overflow="skip")
    for step in range(12):
        x = rows(step, 8, 4) * (NAN if step == 11 else 1)
        guard.run(lambda x=x: model(x).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    recent = guard._parts.keeper.recent
    assert len(recent) == 8
    of_function, of_forward = recent[-1]
    assert len(of_function) == len(of_forward) == 1
    last = torch.frombuffer(bytearray(of_function[0]), dtype=torch.float32)
    assert last.isfinite().all() and last.numel() == 32


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
@pytest.mark.parametrize("usual", [True, False])
def test_a_mask_that_chooses_for_the_first_time(dtype, usual):
    def batch_of(step):
        mask = torch.full((8, 4), usual)
        mask[2, 1:] = usual != (step == BAD)
        return rows(step, 8, 4), mask.to(dtype)

    def loss_of(model, x, mask):
        return (model(x) + (mask != usual) * 3e38 * 2).mean()

    what = "3 zeros" if usual else "3 ones"
    text = f"`batch[1]` has {what} among 32 values, none in the last clean step"
    assert news_of(batch_of, loss_of) == text
