"""No checkpoint holds a nan or an inf, and the last good one stays."""

import copy

import pytest
import torch
from assembled import Assembled
from guarding import INF, NAN, batches, make, train
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard, assert_finite_state
from overflow_fast.guard import saved_state, state_check
from overflow_fast.guard.optimizers.held_optimizers import optimizers_in
from overflow_fast.guard.optimizers.wrapped import innermost


def trained():
    model, optimizer = make()
    train(model, optimizer, batches(2))
    return model, optimizer


def spoil_weight(model, optimizer):
    model.blocks[1].fc1.weight.data[2, 3] = NAN


def spoil_buffer(model, optimizer):
    model.norm.running_mean[0] = INF


def spoil_state(model, optimizer):
    innermost(optimizer).state[model.head.bias]["exp_avg"][0] = -INF


SPOILED = {
    "weight `blocks.1.fc1.weight` holds 1 nan": spoil_weight,
    "buffer `norm.running_mean` holds 1 inf": spoil_buffer,
    "optimizer state `head.bias.exp_avg` is -inf": spoil_state,
}


@pytest.mark.parametrize("message, spoil", SPOILED.items(), ids=SPOILED)
@pytest.mark.parametrize("by_guard", [False, True])
def test_what_is_not_finite_is_named(message, spoil, by_guard, as_kept):
    model, optimizer = trained()
    guard = OverflowGuard(model, optimizer, watch=["gradients"])
    arguments = () if by_guard else (model, optimizer)
    check = guard.assert_finite_state if by_guard else assert_finite_state
    check(*arguments)
    spoil(model, optimizer)
    with pytest.raises(NonFiniteError, match=message) as caught:
        check(*arguments)
    assert caught.value.report.step == 0
    as_kept(caught.value)
    assert not guard.coverage().steps_watched


def test_all_that_is_not_finite_is_named(as_kept):
    model, optimizer = trained()
    for spoil in SPOILED.values():
        spoil(model, optimizer)
    with pytest.raises(NonFiniteError) as caught:
        assert_finite_state(model, optimizer)
    as_kept(caught.value.report.sentences())


def test_several_models_and_optimizers_are_looked_at():
    pairs = [trained(), trained()]
    models = {"a": pairs[0][0], "b": pairs[1][0]}
    optimizers = [optimizer for _, optimizer in pairs]
    assert_finite_state(models, optimizers)
    spoil_state(*pairs[1])
    with pytest.raises(NonFiniteError, match=r"b\.head\.bias\.exp_avg"):
        assert_finite_state(models, optimizers)


def test_other_models_than_the_guards_can_be_asked_for():
    model, optimizer = trained()
    average = copy.deepcopy(model)
    guard = OverflowGuard(model, optimizer)
    average.head.weight.data[0] = NAN
    guard.assert_finite_state()
    with pytest.raises(NonFiniteError, match=r"weight `head\.weight`"):
        guard.assert_finite_state(average)


def test_masks_and_what_is_allowed_are_fine(as_kept):
    model, optimizer = trained()
    model.register_buffer("mask", torch.tensor([-INF, 0.0]))
    assert_finite_state(model, optimizer)
    spoil_buffer(model, optimizer)
    allow = {"norm:buffer.running_mean": "inf"}
    assert_finite_state(model, optimizer, allow=allow)
    OverflowGuard(model, optimizer, allow=allow).assert_finite_state()
    as_kept.error(ValueError, assert_finite_state, model, allow={"norm": "inf"})


def test_asking_changes_nothing():
    model, optimizer = trained()
    with OverflowGuard(model, optimizer) as guard:
        model(torch.randn(4, 8), y=torch.randn(4, 1))["loss"].backward()
        listed = guard.coverage().tensors_listed
        guard.assert_finite_state()
        assert guard.coverage().tensors_listed == listed
        optimizer.step()
        assert guard.step == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3,), "model must be a torch.nn.Module"),
        ((nn.Linear(1, 1), 3), "optimizer must be a torch.optim.Optimizer"),
    ],
)
def test_wrong_arguments_are_told(arguments, message):
    with pytest.raises(TypeError, match=message):
        assert_finite_state(*arguments)
    with pytest.raises(TypeError, match=message):
        OverflowGuard(nn.Linear(1, 1)).assert_finite_state(*arguments)


def test_a_state_in_lists_is_looked_at(as_kept):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert_finite_state(model, optimizer)
    next(iter(optimizer.state.values()))["old_dirs"][0][1] = NAN
    as_kept.error(NonFiniteError, assert_finite_state, model, optimizer)


def test_a_quantized_state_is_looked_at(as_kept):
    optim = pytest.importorskip("torchao.optim")
    model = nn.Linear(128, 64)
    optimizer = optim.AdamW8bit(model.parameters())
    model(torch.ones(1, 128)).sum().backward()
    with torch.compiler.set_stance("force_eager"):  # its step would be compiled
        optimizer.step()
    assert_finite_state(model, optimizer)
    optimizer.state[model.weight]["exp_avg"].scale[0] = NAN
    as_kept.error(NonFiniteError, assert_finite_state, model, optimizer)


def test_what_is_not_looked_at_is_logged_once(caplog, as_kept):
    state_check._warned.clear()
    model = nn.Linear(2, 2)
    model.register_buffer("ghost", torch.zeros(2, device="meta"))
    for _ in range(2):
        assert_finite_state(model)
    as_kept(caplog.messages)


def test_a_state_dict_is_no_model(as_kept):
    as_kept.error(TypeError, OverflowGuard, nn.Linear(1, 1).state_dict())


def test_a_sparse_state_is_looked_at():
    model = nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert_finite_state(model, optimizer)


class Lookahead(torch.optim.Optimizer):
    """An optimizer that steps another, and has a state of its own."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    def step(self, closure=None):
        return self.inner.step(closure)


class Wrapper:
    """What is no optimizer, and has one under any name."""

    def __init__(self, **attributes):
        vars(self).update(attributes)
        self.itself = self

    def step(self):
        next(iter(optimizers_in(self)))[1].step()

    @property
    def param_groups(self):
        return []


class Stateless(Wrapper):
    """Shows the state of what it holds, and a property that raises."""

    @property
    def state(self):
        return self._held.state

    @property
    def optim(self):
        raise RuntimeError("not ready")


WRAPPED = {
    "Lookahead": Lookahead,
    "optimizer": lambda inner: Wrapper(optimizer=inner),
    "optim": lambda inner: Wrapper(optim=inner),
    "inner": lambda inner: Wrapper(inner=inner),
    "a list": lambda inner: Wrapper(chained=[inner]),
    "a dict": lambda inner: Wrapper(by_name={"all": inner}),
    "two deep": lambda inner: Wrapper(optim=Wrapper(base=Lookahead(inner))),
    "its state": lambda inner: Stateless(_held=inner),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_the_state_of_an_optimizer_within_another_is_looked_at(wrap):
    model, inner = make()
    optimizer = wrap(inner)
    guard = OverflowGuard(model, optimizer, "warn", watch=["optimizer_state"])
    train(model, inner, batches(1))
    assert_finite_state(model, optimizer)
    guard.assert_finite_state()
    inner.state[model.head.bias]["exp_avg"][0] = INF
    with pytest.raises(NonFiniteError, match=r"`head\.bias\.exp_avg` is inf"):
        assert_finite_state(model, optimizer)


def test_a_state_that_a_wrapper_shows_too_is_looked_at_once():
    listed = []
    for wrap in (lambda inner: inner, WRAPPED["its state"]):
        model, inner = make()
        train(model, inner, batches(1))
        with OverflowGuard(model, wrap(inner), watch=["optimizer_state"]) as guard:
            train(model, inner, batches(1))
            listed.append(guard.coverage().tensors_listed)
    assert listed[0] == listed[1] > 0


def test_a_guard_looks_at_the_state_within_what_steps():
    model, inner = make()
    optimizer = Lookahead(inner)
    guard = OverflowGuard(model, optimizer, watch=["optimizer_state"])
    train(model, optimizer, batches(1))
    inner.state[model.head.bias]["exp_avg"][0] = INF
    with pytest.raises(NonFiniteError, match=r"`head\.bias\.exp_avg` is inf"):
        train(model, optimizer, batches(1))
    guard.remove()
    optimizer.state[model.head.bias]["slow"][0] = NAN
    inner.state[model.head.bias]["exp_avg"][0] = 0
    with pytest.raises(NonFiniteError, match=r"`head\.bias\.slow` is nan"):
        assert_finite_state(model, optimizer)


def test_an_optimizer_that_holds_itself_is_found_once():
    _, inner = make()
    outer = Wrapper(optim=inner, again=[inner])
    inner.owner = outer
    assert [path for path, _ in optimizers_in(outer)] == ["", "optim."]


@pytest.mark.explains
def test_a_replay_does_not_log_again_what_is_not_scanned(caplog):
    class Net(Assembled):
        def forward(self, x):
            return torch.log(torch.func.vmap(self.layer)(x) * 0).sum()

    model = Net(layer=nn.Linear(2, 2), scripted=torch.jit.script(nn.ReLU()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        model(torch.ones(1, 2)).backward()
        optimizer.step()
    assert guard.last_report.explanation.cause.startswith("undefined")
    for what in ("were not scanned", "1 scripted modules are not checked"):
        assert len([each for each in caplog.messages if what in each]) == 1


def test_a_bad_tensor_is_looked_at_once_for_its_kinds(monkeypatch):
    looked, kinds_in = [], saved_state.kinds_in
    monkeypatch.setattr(
        saved_state, "kinds_in", lambda each: looked.append(1) or kinds_in(each)
    )
    model, _ = trained()
    model.head.bias.data[0] = NAN
    for state in (model, model.state_dict()):
        looked.clear()
        with pytest.raises(NonFiniteError):
            assert_finite_state(state)
        assert len(looked) == 1
