"""Each part that looks into values finds a tensor in each kind of container."""

import datetime

import pytest
import torch
from containers import CONTAINERS
from torch import nn

import overflow_fast
from overflow_fast import OverflowGuard, advise_precision, compare_live, keep_in_fp32
from overflow_fast.guard.watching.inputs import Given, LoopBatch

pytestmark = pytest.mark.usefixtures("untried")
KINDS = pytest.mark.parametrize("kind", CONTAINERS)
# One for each way to rebuild a value, where a test takes a second.
FEW = pytest.mark.parametrize(
    "kind",
    [
        *("tuple", "namedtuple", "OrderedDict", "defaultdict", "deque", "UserDict"),
        *("Mapping", "mappingproxy", "frozen dataclass", "frozen slots dataclass"),
        *("ModelOutput", "BatchEncoding", "frozen slots attrs", "only registered"),
        *("object", "graph", "nested 15", "cyclic"),
    ],
)
NAN = float("nan")


class Block(nn.Module):
    """Takes and returns a container."""

    def __init__(self, kind, scale=1.0):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.container = CONTAINERS[kind]
        self.scale = scale

    def forward(self, given):
        self.seen = self.container.get(given).dtype
        made = self.lin(self.container.get(given)) * self.scale
        return self.container.make(made)


class Model(nn.Module):
    """Hands a container on to its block, and takes one back."""

    def __init__(self, kind, scale=1.0):
        super().__init__()
        self.block = Block(kind, scale)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        container = self.block.container
        return self.head(container.get(self.block(container.make(x)))).sum()


class Taking(nn.Module):
    """Takes a batch."""

    def __init__(self, kind):
        super().__init__()
        self.lin = nn.Linear(4, 1)
        self.container = CONTAINERS[kind]

    def forward(self, batch):
        return self.lin(self.container.get(batch)).sum()


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x * 0 - 1)


class Undefined(nn.Module):
    """Returns a nan in a container, and nothing else."""

    def __init__(self, kind):
        super().__init__()
        self.lin, self.log = nn.Linear(4, 4), Log()
        self.container = CONTAINERS[kind]

    def forward(self, x):
        return self.container.make(self.log(self.lin(x)))


def guarded(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, OverflowGuard(model, optimizer, **options)


def stopped(optimizer, step):
    """The report of a step that the guard stops."""
    with pytest.raises(overflow_fast.NonFiniteError) as caught:
        step().backward()
        optimizer.step()
    return caught.value.report


def bad_batch(kind):
    x = torch.randn(8, 4)
    x[5, 2] = NAN
    return CONTAINERS[kind].make(x), x


@KINDS
def test_a_bad_output_is_explained(kind):
    model = Undefined(kind)
    optimizer, _ = guarded(model)
    x = torch.randn(3, 4)
    report = stopped(optimizer, lambda: CONTAINERS[kind].get(model(x)).sum())
    found = report.explanation
    assert (found.cause, found.op.name) == ("undefined", "aten.log")
    assert "torch.log" in found.op.code


@KINDS
def test_a_bad_sample_of_a_batch_is_named(kind):
    batch, _ = bad_batch(kind)
    model = Taking(kind)
    optimizer, _ = guarded(model)
    found = stopped(optimizer, lambda: model(batch)).explanation
    assert (found.cause, found.tensor) == ("bad data", f"batch{CONTAINERS[kind].path}")
    assert found.sample == 5


@FEW
def test_a_bad_sample_that_a_function_reads_is_named(kind):
    batch, _ = bad_batch(kind)
    model = Taking(kind)
    optimizer, guard = guarded(model)
    found = stopped(optimizer, lambda: guard.run(lambda: model(batch))).explanation
    assert (found.cause, found.tensor) == ("bad data", f"batch{CONTAINERS[kind].path}")
    assert found.sample == 5


@FEW
def test_a_sample_that_fails_in_the_model_is_found_by_cutting(kind):
    class Dividing(Taking):
        def forward(self, batch):
            x = self.container.get(batch)
            return (self.lin(x) / x[:, :1]).sum()

    x = torch.rand(8, 4) + 1
    x[6, 0] = 0
    batch, model = CONTAINERS[kind].make(x), Dividing(kind)
    optimizer, _ = guarded(model)
    found = stopped(optimizer, lambda: model(batch)).explanation
    assert found.op.name == "aten.div.Tensor"
    assert found.sample == 6
    assert CONTAINERS[kind].get(batch) is x  # the batch is as it was


@KINDS
def test_the_batch_is_kept_as_evidence(kind, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    batch, x = bad_batch(kind)
    model = Taking(kind)
    optimizer, _ = guarded(model, evidence=tmp_path, explain=False)
    stopped(optimizer, lambda: model(batch))
    [path] = tmp_path.rglob("batch.safetensors")
    kept = safetensors.load_file(path)
    name = f"[0][0]{CONTAINERS[kind].path}"
    assert list(kept) == [name]
    torch.testing.assert_close(kept[name], x, equal_nan=True)


@FEW
def test_advice_on_precision_judges_the_output(kind):
    class Large(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.container = CONTAINERS[kind]
            nn.init.constant_(self.lin.weight, 300.0)

        def forward(self, x):
            return self.container.make(self.lin(x))

    x = torch.full((2, 4), 300.0)  # 360000: inf in float16
    torch.manual_seed(0)
    expected = str(advise_precision(Large("tuple"), [x]))
    torch.manual_seed(0)
    assert str(advise_precision(Large(kind), [x])) == expected


@KINDS
def test_models_are_compared_in_the_module_that_differs(kind):
    model, reference = Model(kind), Model(kind, scale=2.0)
    reference.load_state_dict(model.state_dict())
    found = compare_live(model, reference, torch.randn(3, 4))
    assert (found.first.module, found.first.kind) == ("block", "forward")
    assert "aten.mul" in found.first.op
    names = [row.name for row in found.rows]
    assert f"block: output{CONTAINERS[kind].path}" in names
    assert f"block: input[0]{CONTAINERS[kind].path}" in names


@pytest.mark.parametrize("kind", ["tuple", "dataclass", "frozen dataclass", "nested 6"])
def test_faults_are_planted_in_each_module(kind):
    model = Model(kind)
    _, guard = guarded(model)
    result = guard.self_test(torch.randn(3, 4))
    assert result.has_passed
    assert "block (Block)" in str(result)


@KINDS
def test_modules_in_float32_get_and_return_what_they_should(kind):
    model = Model(kind).half()
    keep_in_fp32(model, ["block"])
    x = torch.randn(2, 4).half()
    assert model(x).dtype == torch.float16
    assert model.block.seen == torch.float32
    given = CONTAINERS[kind].make(x)
    made = model.block(given)
    assert CONTAINERS[kind].get(made).dtype == torch.float16
    assert CONTAINERS[kind].get(given) is x


@KINDS
def test_inputs_are_held_weakly_by_their_labels(kind):
    x = torch.randn(2, 4)
    given = Given((CONTAINERS[kind].make(x),), {"more": CONTAINERS[kind].make(x)})
    path = CONTAINERS[kind].path
    assert list(given.tensors) == [f"input[0]{path}", f"input.more{path}"]
    assert given.unseen == []
    assert given.find(f"input[0]{path}").tensor() is x


@KINDS
def test_the_place_in_a_trainer_s_batch_is_named(kind, as_kept):
    batch, x = bad_batch(kind)
    path = CONTAINERS[kind].path
    noted = LoopBatch(batch)
    place = noted.place_of(x)
    assert place.startswith(f"`batch{path}`") and noted.bad_places() == [place]
    as_kept(place.replace(path, ""))


class Cache:
    """Is updated by the modules that it is given to."""

    def __init__(self):
        self.keys = torch.zeros(2, 0, dtype=torch.float16)
        self.fixed = torch.zeros(2, 3, dtype=torch.float16)
        self.untouched = torch.ones(1, dtype=torch.float16)
        self.history = [torch.ones(1, dtype=torch.float16)]
        self.num_calls = 0


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, cache):
        cache.keys = torch.cat([cache.keys, self.lin(x)], 1)
        cache.fixed[:, 1] = 2
        cache.history.append(cache.keys)
        cache.num_calls += 1
        return self.lin(x), cache


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_cache_is_updated_by_a_module_in_float32(is_inference):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Caching()

        def forward(self, x, cache):
            return self.inner(x, cache)

    model = Outer().half()
    keep_in_fp32(model, ["inner"])
    with torch.inference_mode(is_inference):
        cache = Cache()
        untouched, history = cache.untouched, cache.history
        for _ in range(2):
            output, returned = model(torch.randn(2, 4).half(), cache)
    assert output.dtype == torch.float16
    assert cache.num_calls == returned.num_calls == 2
    assert cache.keys.shape == (2, 8)
    assert cache.fixed.dtype == torch.float16
    assert cache.fixed[:, 1].tolist() == [2, 2]
    assert cache.untouched is untouched
    assert cache.history is history
    assert len(history) == 3


def test_a_forward_that_writes_to_its_batch_is_replayed_with_what_it_got():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 1)

        def forward(self, batch):
            batch.x = batch.x - 1
            batch.extra.pop()
            return torch.log(self.lin(batch.x).abs() * 0 + batch.x.min()).sum()

    batch = CONTAINERS["namespace"].make(torch.full((3, 4), 1.0))
    batch.extra = [torch.ones(1)]
    model = Writing()
    optimizer, _ = guarded(model)
    found = stopped(optimizer, lambda: model(batch)).explanation
    assert (found.cause, found.op.name) == ("undefined", "aten.log")
    assert found.op.inputs[0].abs_max == 0


def test_a_batch_that_cannot_be_cut_is_said():
    class Day(datetime.date):
        pass

    class Dividing(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 1)

        def forward(self, batch):
            return (self.lin(batch.x) / batch.x[:, :1]).sum()

    batch = Day(2024, 1, 1)
    batch.x = torch.rand(8, 4) + 1
    batch.x[6, 0] = 0
    model = Dividing()
    optimizer, _ = guarded(model)
    found = stopped(optimizer, lambda: model(batch)).explanation
    assert found.op.name == "aten.div.Tensor"
    assert found.sample is None
    assert any("cannot rebuild" in note and "Day" in note for note in found.notes)


def test_an_object_that_leads_to_a_model_is_no_batch():
    class Trainer:
        def __init__(self, model):
            self.model = model
            self.x = torch.randn(8, 4)

    model = nn.Linear(4, 1)
    trainer, target = Trainer(model), torch.randn(8, 1)
    target[3] = NAN
    optimizer, guard = guarded(model)
    step = lambda: (trainer.model(trainer.x) - target).sum()  # noqa: E731
    found = stopped(optimizer, lambda: guard.run(step)).explanation
    assert (found.cause, found.tensor, found.sample) == ("bad data", "target", 3)
