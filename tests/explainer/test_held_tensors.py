"""Bad values that a step reads from objects, modules and variables around it."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from assembled import Assembled
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

pytestmark = pytest.mark.usefixtures("untried")

INF, NAN = float("inf"), float("nan")


def x(rows=3):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))


def target():
    return torch.tensor([[0.0], [INF], [1.0]])


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def explained(models, loss, runs=True):
    watched = models if isinstance(models, list) else [models]
    parameters = [p for each in watched for p in each.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    with OverflowGuard(models, optimizer) as guard:
        with pytest.raises(NonFiniteError) as error:
            made = [guard.run(loss) if runs else loss()]
            made.pop().backward()  # no line makes it again
            optimizer.step()
    return error.value.report.explanation


def place(found):
    return found.phase, found.cause, found.module, found.tensor


class Trainer:
    def __init__(self):
        self.model, self.x, self.target = model(), x(), target()

    def loss(self):
        return F.mse_loss(self.model(self.x), self.target)

    def loss_of(self, batch):
        return F.mse_loss(self.model(batch[0]), batch[1])


class Slotted:
    __slots__ = ("target",)


def test_a_target_that_an_object_holds(as_kept):
    net, batch = model(), SimpleNamespace(x=x(), target=target())
    found = explained(net, lambda: F.mse_loss(net(batch.x), batch.target))
    assert place(found) == ("data", "bad data", "", "batch.target")
    assert found.sample == 1
    as_kept(found.evidence[0])


def test_a_target_in_a_slot():
    net, batch, features = model(), Slotted(), x()
    batch.target = target()
    found = explained(net, lambda: F.mse_loss(net(features), batch.target))
    assert found.tensor == "batch.target"


def test_a_target_of_a_bound_method_s_object():
    trainer = Trainer()
    found = explained(trainer.model, trainer.loss)
    assert place(found) == ("data", "bad data", "", "self.target")


@pytest.mark.tries_remedies
def test_arguments_of_a_partial_have_the_names_of_the_parameters():
    trainer = Trainer()
    step = functools.partial(trainer.loss_of, (x(), target()))
    found = explained(trainer.model, step)
    assert place(found) == ("data", "bad data", "", "batch[1]")
    assert found.sample == 1
    assert found.remedies[0].is_recommended


def test_a_weight_of_a_module_that_is_not_watched():
    net, teacher, features = model(), model(), x()
    teacher.weight.data[0, 1] = NAN
    found = explained(net, lambda: F.mse_loss(net(features), teacher(features)))
    assert place(found) == ("weights", "bad weights", "teacher", "teacher.weight")


@pytest.mark.tries_remedies
def test_the_weights_of_a_loss_are_no_samples():
    net, features = nn.Linear(4, 3), x()
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, INF, 1.0]))
    found = explained(net, lambda: criterion(net(features), torch.tensor([0, 1, 2])))
    assert found.tensor == "criterion.weight"
    assert not found.remedies


class Keeps(nn.Module):
    """Keeps a tensor as an attribute, which it reads."""

    def __init__(self, kept, keeps=False):
        super().__init__()
        self.kept, self.keeps = kept, keeps
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        hidden = x + self.kept
        if self.keeps:
            self.kept = hidden.detach()[0]
        return self.head(hidden).mean()


def test_an_attribute_that_is_no_buffer():
    net, features = nn.Sequential(Keeps(torch.full((4,), NAN))), x()
    found = explained(net, lambda: net(features))
    assert place(found) == ("weights", "bad weights", "0", "0.kept")


@pytest.mark.tries_remedies
def test_state_that_the_step_itself_may_have_left_is_no_bad_weight(as_kept):
    many = torch.full((2**13, 1, 4), NAN)  # is not copied
    net, features = nn.Sequential(Keeps(many, keeps=True)), x()
    found = explained(net, lambda: net(features).mean())
    assert place(found) == ("", "unknown", "", "0.kept")
    as_kept(found.notes[0])


def test_state_that_was_bad_when_the_step_began_is_named_though_it_is_written():
    net, features = nn.Sequential(Keeps(torch.full((4,), NAN), keeps=True)), x()
    found = explained(net, lambda: net(features))
    assert place(found) == ("weights", "bad weights", "0", "0.kept")
    assert "held 4 nan of 4 values when the step began" in found.evidence[0]


class MakesOnce(Assembled):
    """Makes an attribute that is not finite, where it is to and has none.

    Its code does not show that: what it does is kept in each step.
    """

    def forward(self, x, makes):
        if makes and not hasattr(self, "codebook"):
            vars(self)["codebook"] = torch.log(-x.detach()[0].abs())
        return self.head(x + getattr(self, "codebook", 0.0)).mean()


def test_an_attribute_that_the_step_may_have_made_is_no_bad_weight(as_kept):
    net, features = MakesOnce(head=nn.Linear(4, 1)), x()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with OverflowGuard(net, optimizer) as guard:
        with pytest.raises(NonFiniteError) as error:
            for step in range(6):  # attributes are kept in few steps
                guard.run(lambda step=step: net(features, step == 5)).backward()
                optimizer.step()
    found = error.value.report.explanation
    assert place(found) == ("", "unknown", "", "codebook")
    as_kept("\n".join([*found.evidence, *found.notes]))


class Recurs(Assembled):
    """Makes a bad value, and keeps it for the next forward."""

    def forward(self, x):
        self.kept = self.kept + torch.log(0 * x[0])
        return self.head(x + self.kept).mean()


@pytest.mark.tries_remedies
def test_an_operation_is_named_before_the_state_that_it_has_spoiled():
    net, features = Recurs(head=nn.Linear(4, 1), kept=torch.zeros(4)), x()
    found = explained(net, lambda: net(features))
    assert (found.phase, found.cause, found.op.name) == (
        *("forward", "undefined"),
        "aten.log",
    )
    assert found.remedies[0].is_finite  # the state is put back for each replay


@pytest.mark.tries_remedies
def test_what_the_loop_has_computed_is_no_data():
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    found = explained(
        [maker, judge], lambda: judge((maker(x()).abs() * 1e3).exp()).mean(), runs=False
    )
    assert (found.phase, found.cause, found.tensor) == ("", "unknown", "input")
    assert "Exp" in found.evidence[0]
    assert not found.remedies


def test_what_follows_another_forward_may_be_of_its_output():
    net = nn.Linear(4, 4)

    def loss():
        first = net(x())
        return net((first.detach().abs() * 1e3).exp()).mean() + first.mean()

    found = explained(net, loss, runs=False)
    assert (found.phase, found.cause, found.tensor) == ("", "unknown", "input")


def test_the_batch_behind_a_backward_is_data(as_kept):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    bad = x()
    bad[2] = NAN
    with OverflowGuard(net, optimizer):
        with pytest.raises(NonFiniteError) as error:
            for features in (x(), bad):
                net(features).mean().backward()
            optimizer.step()
    found = error.value.report.explanation
    assert place(found) == ("data", "bad data", "", "input")
    as_kept(found.evidence[0])
    assert found.sample == 2


class Reads(Assembled):
    """Takes an object for its batch."""

    def forward(self, data):
        return self.head(data.x).mean()


def test_a_tensor_in_an_object_that_the_model_is_given():
    data = SimpleNamespace(x=torch.full((3, 4), NAN))
    net = Reads(head=nn.Linear(4, 1))
    found = explained(net, lambda: net(data), runs=False)
    assert place(found) == ("data", "bad data", "", "data.x")


def test_objects_are_looked_through_without_their_code():
    class Hostile(dict):
        def __getitem__(self, key):
            raise RuntimeError("must not be called")

    net, batch = model(), Hostile(target=target(), x=x())
    held = SimpleNamespace(batch=batch)
    loss = functools.partial(
        lambda held: F.mse_loss(
            net(dict.get(held.batch, "x")), dict.get(held.batch, "target")
        ),
        held,
    )
    assert explained(net, loss).tensor == "held.batch['target']"


@pytest.mark.tries_remedies
def test_a_batch_that_the_step_has_written_to_is_no_bad_data():
    net, features = model(), torch.ones(3, 4)
    features[0] = torch.arange(4.0)

    def loss():
        features.sub_(features.mean(1, keepdim=True))
        return net(features.div_(features.std(1, keepdim=True))).mean()

    found = explained(net, loss)
    assert (found.phase, found.cause, found.tensor) == ("", "unknown", "features")
    assert "written to since" in found.evidence[0]
    assert not found.remedies


@pytest.mark.tries_remedies
def test_a_weight_that_stood_in_for_the_model_s_is_no_fault(as_kept):
    net = model()

    def loss():
        own = {name: p * NAN for name, p in net.named_parameters()}
        return torch.func.functional_call(net, own, (x(),)).mean()

    found = explained(net, loss, runs=False)
    assert (found.phase, found.cause) == ("", "unknown")
    as_kept(found.notes[0])


class Spoils(Assembled):
    """Writes to its own weight, which its code does not show."""

    def forward(self, x):
        self.head.weight.detach().mul_(NAN)
        return self.head(x)


def test_a_weight_may_have_been_written_to_by_the_step_itself():
    net = Spoils(head=model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with OverflowGuard(net, optimizer) as guard:
        net.head(x()).mean().backward()
        optimizer.step()
        with pytest.raises(NonFiniteError) as error:
            guard.run(lambda: net(x()).mean()).backward()
            optimizer.step()
    found = error.value.report.explanation
    assert found.cause in ("unknown", "bad weights")
    assert "before the step" not in " ".join(found.evidence)


class Weighted(nn.Module):
    """A loss relative to its running mean, which a batch of zeros makes nan."""

    def __init__(self, *others, size=1, is_buffer=False):
        super().__init__()
        mean = torch.ones(size)
        self.register_buffer("mean", mean) if is_buffer else vars(self).update(
            mean=mean
        )
        self.others = nn.ModuleList(others)

    def forward(self, loss, poison=False):
        share = loss / self.mean.mean()
        drop = 0 * self.mean / 0 if poison else 0.1 * loss.detach()
        if "mean" in self._buffers:
            self.mean.mul_(0.9).add_(drop)
        else:
            self.mean = 0.9 * self.mean + drop
        return share


def run_around(
    criterion, bad_step, loss_of=None, on_overflow="raise", goes_on=False, between=None
):
    """The guard after steps of a loss by a criterion, up to the bad one or beyond."""
    net, step = model(), [0]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loss():
        made = net(x()).square().mean()
        return (
            criterion(made, bad_step == step[0]) if loss_of is None else loss_of(made)
        )

    with OverflowGuard(net, optimizer, on_overflow=on_overflow) as guard:
        for i in range(8):
            step[0] = i
            guard.run(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            if between is not None and i == bad_step:
                between()
            if guard.last_report is not None and not goes_on:
                break
    return guard


@pytest.mark.parametrize("is_buffer", [False, True])
def test_the_mean_of_a_loss_is_judged_with_the_step_that_spoils_it(is_buffer):
    criterion = Weighted(is_buffer=is_buffer)
    with pytest.raises(NonFiniteError) as error:
        run_around(criterion, 2)
    assert str(error.value).startswith("Step 2: the state `criterion.mean` is nan. ")
    found = error.value.report.explanation
    assert (found.phase, found.op.name) == ("forward", "aten.div.Tensor")
    assert found.op.file == __file__ and "criterion.mean" not in found.tensor
    assert criterion.mean.isfinite().all()


@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_loss_that_keeps_a_mean_is_run_again_with_the_one_of_the_step(is_buffer):
    criterion = Weighted(is_buffer=is_buffer)

    def loss_of(made):
        return criterion(made)

    with pytest.raises(NonFiniteError) as error:
        run_around(criterion, 2, loss_of, between=lambda: criterion.mean.fill_(NAN))
    found = error.value.report.explanation
    assert found.tensor == "criterion.mean" and found.phase == "weights"
    assert "when the step began" in str(error.value) + str(found)


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_a_mean_that_stays_nan_is_no_second_alarm_and_a_skipped_one_does_not(policy):
    class Unused(Weighted):
        def forward(self, loss, poison=False):
            super().forward(loss, poison)
            return loss

    criterion = Unused()
    guard = run_around(criterion, 2, on_overflow=policy, goes_on=True)
    assert guard.last_report.step == 2 and guard.metrics()["bad_steps_total"] == 1
    assert criterion.mean.isnan().all() == (policy == "warn")


class Harmless(nn.Module):
    """Keeps what is not finite on purpose, or only from the step itself."""

    def __init__(self, form):
        super().__init__()
        self.form, self.num, self.mask = form, 0, None
        self.least, self.last = torch.full((2,), INF), torch.zeros(2)
        if form == "late queue":
            self.queue = None
        else:
            self.register_buffer("queue", torch.full((8, 2), NAN))

    def forward(self, loss):
        value, self.num = loss.detach().expand(2), self.num + 1
        if self.form == "late queue" and self.queue is None:
            self.queue = torch.full((8, 2), NAN)
        elif self.form == "queue":  # is filled one by one
            self.queue[self.num % 8] = value
        elif self.form == "extreme":
            self.least = torch.minimum(self.least, value)
        elif self.form == "restarted extreme":
            is_over = self.num == 3
            self.least = torch.full((2,), INF) if is_over else self.least * 1
        elif self.form == "mask" and self.mask is None:
            self.mask = torch.full((2, 2), -INF).triu(1)
        elif self.form == "number for the log":
            self.last = value / (self.num != 3) - value / (self.num != 3)
            return loss + 0 * self.last.nan_to_num(0, 0, 0).sum()
        return loss if self.mask is None else loss + 0 * self.mask[0, 0]


@pytest.mark.parametrize(
    "form",
    [
        "queue",
        "late queue",
        "extreme",
        "restarted extreme",
        "mask",
        "number for the log",
    ],
)
def test_what_a_loss_keeps_on_purpose_is_no_alarm(form):
    criterion = Harmless(form)
    assert run_around(criterion, -1, lambda made: criterion(made)).last_report is None


class Undefined(Weighted):
    def forward(self, loss, poison=False):
        self.mean = self.mean / (0 if poison else 1) * (0 if poison else 1)
        return loss * self.mean.mean()


def test_an_operation_that_spoils_the_state_of_a_loss_is_found():
    with pytest.raises(NonFiniteError) as error:
        run_around(Undefined(), 2)
    assert error.value.report.explanation.op.name.startswith("aten.div")


def test_a_skipped_step_leaves_the_buffers_of_a_loss_as_they_were():
    class Late(Weighted):
        def forward(self, loss, poison=False):
            super().forward(loss, poison)
            return loss * self.mean.mean()

    criterion = Late(is_buffer=True)
    guard = run_around(criterion, 2, on_overflow="skip")
    assert guard.last_report is not None and criterion.mean.isfinite().all()


@pytest.mark.parametrize("kind", ["large", "of the model"])
def test_what_is_large_or_holds_the_model_is_not_kept_beside_it(kind):
    net = model()
    criterion = Weighted(nn.Linear(512, 1024) if kind == "large" else net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with OverflowGuard(net, optimizer) as guard:
        guard.run(lambda: criterion(net(x()).square().mean()))
        starts = guard._parts._start.starts
        assert [each.model for each in starts] == [net]


def test_of_what_was_recorded_a_finite_replay_does_not_tell():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with OverflowGuard(net, optimizer) as guard:
        guard.run(lambda: net(x()).mean()).backward()
        guard.record(reward=torch.full((2,), NAN))
        with pytest.raises(NonFiniteError) as error:
            optimizer.step()
    assert str(error.value).startswith(
        "Step 0: the recorded `reward` holds 2 nan; unknown why: what `guard.record()` "
        "was given is not looked at in a replay, whose loss and gradients are finite."
    )


def test_a_finite_loss_that_backward_came_to_with_an_inf():
    net, scale = model(), torch.tensor(INF)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with OverflowGuard(net, optimizer) as guard:
        loss = guard.run(lambda: net(x()).square().mean())
        (loss * scale).backward()
        with pytest.raises(NonFiniteError) as error:
            guard.check()
    first = str(error.value).splitlines()[0]
    why = (
        "the loss is finite, and code between it and `backward()`, such as a loss scale"
    )
    assert first.endswith(f"unknown why: {why}, made its gradient inf.")
    assert "was not replayed" not in str(error.value.report)
