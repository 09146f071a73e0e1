"""What is said to have made a difference, and what is not."""

import pytest
import torch
from compared_models import batch, tower

import overflow_fast
from overflow_fast.torch_internals.tensor_internals import gradient_hooks


@pytest.fixture
def compared(tmp_path):
    """Records a step of two functions of a model, and compares them."""

    def compare(mine, its, *models):
        models = models or (small(), small())
        for name, function, model in zip("ab", (mine, its), models, strict=True):
            with overflow_fast.recording(tmp_path / name, model):
                function(model)
        return overflow_fast.compare(tmp_path / "a", tmp_path / "b")

    return compare


def small(p=0.0):
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 8), torch.nn.Dropout(p), torch.nn.Linear(8, 4)
    return torch.nn.Sequential(*layers)


def loss_of(model, labels=0.0, scale=1.0, x=None):
    output = model(batch() if x is None else x)
    return (output - labels).square().mean() * scale


@pytest.mark.parametrize("options", [{"labels": 1.0}, {"scale": 1024.0}])
def test_another_loss_is_said_and_no_module_is_blamed(compared, options, as_kept):
    diff = compared(
        lambda model: loss_of(model).backward(),
        lambda model: loss_of(model, **options).backward(),
    )
    assert (diff.first.module, diff.first.kind) == ("", "loss"), diff
    as_kept(diff.first)
    assert "Backward" not in str(diff)


def test_another_scale_of_a_loss_in_the_model(compared):
    diff = compared(
        lambda model: model(batch()).backward(),
        lambda model: (model(batch()) * 1024).backward(),
        *(tower(), tower()),
    )
    assert diff.first.kind == "loss", diff


def test_another_loss_of_models_side_by_side():
    def loss(model, x):
        return loss_of(model, labels=float(model[1].p > 0))

    models = small(), small(0.5).eval()
    diff = overflow_fast.compare_live(*models, batch(), loss=loss, backward=True)
    assert diff.first.kind == "loss", diff


class TwoOutputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.stem(x)
        return self.head(hidden), hidden


def test_a_hidden_output_may_have_its_gradient_from_either(compared, as_kept):
    def step(factor):
        def run(model):
            output, hidden = model(batch())
            (output.square().mean() + factor * hidden.square().mean()).backward()

        return run

    diff = compared(step(0.0), step(1.0), TwoOutputs(), TwoOutputs())
    assert "Backward of head" not in str(diff)
    as_kept(diff.first)


@pytest.mark.parametrize("both", [False, True])
def test_gradients_from_before_the_step_leave_it_open(compared, both, as_kept):
    models = small(), small()
    for seed, model in enumerate(models[: 1 + both]):
        loss_of(model, x=batch(7 + seed)).backward()
    step = lambda model: loss_of(model).backward()  # noqa: E731
    diff = compared(step, step, *models)
    assert diff.first.kind == "backward", diff
    as_kept(diff.first)


def test_a_model_that_is_called_twice_leaves_it_open(compared, as_kept):
    def twice(model):
        (loss_of(model) + loss_of(model, x=batch(7))).backward()

    diff = compared(twice, lambda model: loss_of(model).backward())
    assert diff.first.unknown, diff
    as_kept(diff.first)


def test_batches_of_other_sizes_blame_no_module(compared, as_kept):
    diff = compared(
        lambda model: loss_of(model).backward(),
        lambda model: loss_of(model, x=batch(rows=3)).backward(),
    )
    assert diff.first.kind == "batch", diff
    as_kept(diff.first)
    assert "the model: input[0]" in str(diff)


def test_batches_of_other_sizes_blame_no_forward(compared):
    diff = compared(
        lambda model: model(batch()),
        lambda model: model(batch(rows=3)),
        *(tower(), tower()),
    )
    assert diff.first.kind == "batch", diff


def test_dropout_of_one_run_alone_is_no_random_state(compared, as_kept):
    models = small(0.5), small(0.5).eval()
    diff = compared(loss_of, loss_of, *models)
    assert diff.first.module == "1"
    as_kept(diff.first)


class Repeat(torch.nn.Module):
    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        return (x * self.times).repeat(1, self.times, 1)


def pooled(times, last=torch.nn.Identity):
    layers = Repeat(times), torch.nn.AdaptiveAvgPool2d((6, 8)), last()
    return torch.nn.Sequential(*layers)


def forward(model):
    with torch.no_grad():
        model(batch())


@pytest.mark.parametrize("is_first", [True, False])
def test_another_shape_is_a_difference_where_it_begins(compared, is_first, as_kept):
    models = pooled(1), pooled(2)
    diff = compared(forward, forward, *(models if is_first else models[::-1]))
    assert (diff.first.module, diff.first.kind) == ("0", "forward"), diff
    as_kept(diff.first)
    assert diff.differs and diff.first.unknown == ()


QINT = torch.qint8


class Unreadable(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return torch.quantize_per_tensor(x * self.factor, 0.1, 0, QINT)


class Readable(torch.nn.Module):
    def forward(self, x):
        return x.dequantize()


def unreadable(factor):
    return torch.nn.Sequential(Unreadable(factor), Readable())


def test_weights_that_were_not_compared_are_in_the_caveat(compared):
    def model(factor):
        layer = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
        layer[0].register_buffer(
            "scale", torch.quantize_per_tensor(torch.tensor([factor]), 0.5, 0, QINT)
        )
        hook = lambda m, args, out: out * m.scale.dequantize()  # noqa: E731
        layer[0].register_forward_hook(hook)
        return layer

    torch.manual_seed(0)
    mine, its = model(1.0), model(2.0)
    mine.load_state_dict(its.state_dict())
    mine[0].scale = model(1.0)[0].scale
    diff = compared(forward, forward, mine, its)
    assert diff.first.unknown == ("0.scale: buffer",), diff
    assert "gives another result" in str(diff.first)


class Tied(torch.nn.Module):
    def __init__(self, is_tied):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (torch.nn.Linear(8, 8, bias=False) for _ in "ab")
        if is_tied:
            self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x))


def test_a_tie_that_was_lost_is_said_and_the_weight_named(compared, as_kept):
    diff = compared(loss_of, loss_of, Tied(False), Tied(True))
    assert (diff.first.module, diff.first.kind) == ("last", "weights"), diff
    as_kept("\n".join(diff.said))


def test_a_tie_that_both_have_is_not_said(compared):
    assert compared(loss_of, loss_of, Tied(True), Tied(True)).said == []


def test_the_gradient_of_a_tied_weight_leaves_it_open(compared, as_kept):
    diff = compared(backward_of, backward_of, Tied(True), untied())
    assert "a module that shares it" in str(diff.first)
    as_kept(str(diff.first))


def test_of_a_weight_that_both_have_tied_either_layer_may_be_wrong(compared, as_kept):
    model = Tied(True)
    model.first.weight.register_hook(lambda gradient: gradient * 2)
    diff = compared(backward_of, backward_of, model, Tied(True))
    assert "a module that shares it" in str(diff.first)
    as_kept(str(diff.first))


def backward_of(model):
    loss_of(model).backward()


def untied():
    model = Tied(True)
    model.last.weight = torch.nn.Parameter(model.first.weight.detach().clone())
    return model


def test_what_was_not_compared_is_one_sentence_and_in_the_verdict(compared, as_kept):
    models = [torch.nn.Sequential(*(Repeat(1) for _ in range(40))) for _ in "ab"]
    diff = compared(
        lambda model: model(batch()), lambda model: model(batch(rows=2)), *models
    )
    assert (diff.first.kind, len(diff.said)) == ("batch", 1), diff
    as_kept(diff.said, diff.verdict())


def test_a_verdict_says_what_was_not_compared(compared, as_kept):
    quiet = compared(forward, forward, unreadable(1.0)[:1], unreadable(2.0)[:1])
    assert quiet.first is None
    as_kept(quiet.verdict())


def test_another_length_of_a_model_that_is_called_by_its_parts(compared):
    def parts(rows):
        return lambda model: model[0](batch(rows=rows))

    diff = compared(parts(4), parts(3))
    assert (diff.first.kind, diff.differs) == ("batch", True), diff


def test_a_module_whose_inputs_were_not_compared_is_not_blamed_alone(compared, as_kept):
    diff = compared(forward, forward, unreadable(1.0), unreadable(2.0))
    assert (diff.first.module, diff.first.kind) == ("1", "forward"), diff
    assert diff.first.unknown == ("1: input[0]",)
    as_kept(str(diff.first))
    assert diff.to_dict()["first"]["unknown"] == ["1: input[0]"]


def test_models_side_by_side_have_the_same_caveat():
    diff = overflow_fast.compare_live(unreadable(1.0), unreadable(2.0), batch())
    assert diff.first.unknown == ("1: input[0]",)


def test_a_module_whose_inputs_were_compared_has_no_caveat(compared):
    torch.manual_seed(0)
    other = lambda: torch.nn.Hardtanh(-0.1, 0.1)  # noqa: E731
    models = pooled(1), pooled(1, other)
    diff = compared(forward, forward, *models)
    assert diff.first.module == "2" and diff.first.unknown == ()
    assert "computes differently" in str(diff.first)


def trained(change, steps=1, model=None):
    """A function that runs steps, with a change between backward and step."""

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss_of(model).backward()
        change(list(model.parameters()))
        optimizer.step()

    return run


def clip_norm(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 1e-3)


def clip_value(parameters):
    torch.nn.utils.clip_grad_value_(parameters, 1e-3)


def times(factor):
    def scale(parameters):
        for each in parameters:
            each.grad.mul_(factor)

    return scale


def as_new_tensors(parameters):
    for each in parameters:
        each.grad = each.grad / 3


def add_noise(parameters):
    generator = torch.Generator().manual_seed(0)
    for each in parameters:
        each.grad += torch.randn(each.shape, generator=generator) * 0.01


BETWEEN = {
    clip_norm: "times the reference",
    clip_value: "",
    add_noise: "",
    as_new_tensors: "it is 0.333333 times the reference",
    times(2.0): "it is 2 times the reference",
    times(0.25): "it is 0.25 times the reference",
    times(0.0): "it is 0 times the reference",
    times(-1.0): "it is -1 times the reference",
}


@pytest.mark.parametrize("change", BETWEEN, ids=lambda change: change.__name__)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_done_between_backward_and_step_blames_no_module(
    compared, change, is_first
):
    runs = trained(change), trained(lambda parameters: None)
    diff = compared(*(runs if is_first else runs[::-1]))
    assert (diff.first.module, diff.first.kind) == ("", "gradients"), diff
    said = str(diff.first)
    assert "Made between backward and step: clipping, unscaling, " in said
    assert "Backward of" not in str(diff)
    assert not is_first or BETWEEN[change] in said
    assert not is_first or ("times the" in said) == bool(BETWEEN[change])


def test_one_parameter_that_is_changed_between_backward_and_step(compared):
    diff = compared(
        trained(lambda parameters: parameters[2].grad.mul_(3)), trained(len)
    )
    assert (diff.first.module, diff.first.kind) == ("", "gradients"), diff
    assert diff.first.row.place.module == "2"


def test_a_gradient_that_a_hook_changes_within_backward_is_a_modules(compared):
    model = small()
    model[2].weight.register_hook(lambda gradient: gradient * 1.5)
    diff = compared(trained(len), trained(len), model, small())
    assert (diff.first.module, diff.first.kind) == ("2", "backward"), diff
    assert diff.first.row.place.role == "accumulated_gradient"


def test_what_was_not_compared_elsewhere_did_not_make_a_gradient(compared):
    def call_aside(model, args):
        model[0].aside(*args)

    one, other = small(), small()
    for model in (one, other):
        model[0].aside = Unreadable(1.0)
        model.register_forward_pre_hook(call_aside)
    one[2].weight.register_hook(lambda gradient: gradient * 1.5)
    diff = compared(trained(len), trained(len), one, other)
    assert (diff.first.module, diff.first.kind) == ("2", "backward"), diff


def without_accumulation(factor, modules=(0, 2)):
    """A step whose gradients autograd returns: none is accumulated in backward."""

    def run(model):
        own = list(model.parameters())
        found = torch.autograd.grad(loss_of(model), own)
        wrong = [p for i in modules for p in model[i].parameters()]
        for each, gradient in zip(own, found, strict=True):
            is_wrong = any(each is other for other in wrong)
            each.grad = gradient * factor if is_wrong else gradient

    return run


def test_gradients_that_were_recorded_before_the_step_alone(compared, as_kept):
    diff = compared(without_accumulation(2.0), without_accumulation(1.0))
    assert (diff.first.module, diff.first.kind) == ("", "gradients"), diff
    as_kept(diff.first)


def test_one_layer_that_was_recorded_before_the_step_alone(compared):
    diff = compared(without_accumulation(2.0, [2]), without_accumulation(1.0))
    assert (diff.first.module, diff.first.kind) == ("2", "backward"), diff


def test_micro_batches_are_compared_as_they_accumulate(compared):
    def accumulate(second):
        def run(model):
            loss_of(model).backward()
            (loss_of(model, x=batch(7)) * second).backward()

        return run

    diff = compared(accumulate(2.0), accumulate(1.0))
    assert diff.first.kind == "loss", diff
    rows = {str(row.place): row for row in diff.rows}
    assert rows["0.weight: accumulated gradient"].verdict == "equal"
    assert rows["0.weight #1: accumulated gradient"].relative > 0.1


def test_a_hook_on_accumulated_gradients_is_removed(tmp_path):
    model = small()
    with overflow_fast.recording(tmp_path / "a", model):
        pass
    assert not any(map(gradient_hooks, model.parameters()))
