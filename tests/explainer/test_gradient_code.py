"""Code between backward and the optimizer's step that makes gradients non-finite."""

import pytest
import torch
from remedied_files import edited, module_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.options import Explain

pytestmark = pytest.mark.usefixtures("untried")

CLIP = """
def clip(parameters):
    parameters = list(parameters)
    total = sum(p.grad.square().sum() for p in parameters).sqrt()
    factor = 1.0 / total
    for p in parameters:
        p.grad.mul_(factor)
    return total
"""
HEAD = "import torch\nfrom torch import nn\n"


def loop(lines, with_run=True):
    """A training loop whose gradients are all 0 in step 1, with lines of its own."""
    loss = "weight * model(x).pow(2).mean()"
    loss = f"guard.run(lambda: {loss})" if with_run else loss
    body = "\n".join(f"        {line}" for line in lines.splitlines())
    return f"""{HEAD}{CLIP}
def fit(model, optimizer, guard, norms):
    for step in range(3):
        x, weight = torch.ones(4, 3), 0.0 if step == 1 else 1.0
        optimizer.zero_grad()
        loss = {loss}
        loss.backward()
{body}
        optimizer.step()
"""


def report_of(text, tmp_path, **options):
    module, path = module_of(tmp_path, text)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    norms = []
    with (
        OverflowGuard(model, optimizer, **options) as guard,
        pytest.raises(NonFiniteError) as caught,
    ):
        module.fit(model, optimizer, guard, norms)
    return caught.value.report, path, norms, model


def line_of(path, code):
    lines = path.read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if code in line)


@pytest.mark.tries_remedies
@pytest.mark.parametrize(
    "lines, with_run",
    [
        ("clip(model.parameters())", True),
        ("clip(model.parameters())", False),
        ("norms.append(float(clip(model.parameters())))", True),
        ("norms.append(float(clip(model.parameters())))", False),
        ("if step >= 0:\n    own = list(model.parameters())\n    clip(own)", True),
        ("short = lambda run: clip(run.parameters())\nshort(model)", True),
        ("short = lambda run: clip(run.parameters())\nshort(model)", False),
    ],
)
def test_the_operation_is_named_and_a_remedy_found(lines, with_run, tmp_path):
    report, path, norms, _ = report_of(loop(lines, with_run), tmp_path)
    found = report.explanation
    assert (found.phase, found.op.line) == ("optimizer", line_of(path, "1.0 / total"))
    assert found.cause == "undefined" and "were run again" in str(found)
    assert len(norms) == (2 if "append" in lines else 0)
    assert "not put back" not in str(found)
    remedy = next(each for each in found.remedies if each.is_recommended)
    module, _ = module_of(tmp_path, edited(path, remedy))
    model = nn.Linear(3, 2)
    model(torch.zeros(1, 3)).sum().mul(0).backward()
    module.clip(model.parameters())
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.tries_remedies
def test_lines_of_the_loop_itself_are_named(tmp_path):
    lines = (
        "own = [p.grad for p in model.parameters()]\n"
        "total = torch.stack([g.norm() for g in own]).norm()\n"
        "for g in own:\n"
        "    g.div_(total)"
    )
    report, path, _, _ = report_of(loop(lines), tmp_path)
    found = report.explanation
    assert (found.phase, found.op.line) == ("optimizer", line_of(path, "g.div_(total)"))
    codes = [each.code for each in found.remedies if each.is_recommended]
    assert codes[0] == "g.div_(total.clamp(min=1e-8))"


SHOWN = "print('norm', clip(model.parameters()))"


def test_what_is_printed_is_not_printed_again(tmp_path, capsys):
    report, _, _, _ = report_of(loop(SHOWN), tmp_path)
    assert report.step == 1 and report.explanation.cause == "undefined"
    assert capsys.readouterr().out.count("norm tensor") == 2


OUTWARD = """
import contextlib, functools, pathlib
FILE = pathlib.Path(__file__).with_suffix(".seen")

def note(model):
    with open(FILE, "a") as file:
        file.write(f"{len(list(model.parameters()))}")

def within(model):
    def inner():
        note(model)
    inner()

@torch.no_grad()
def decorated(model):
    note(model)

def wrapped(function):
    @functools.wraps(function)
    def call(model):
        note(model)
        return function(model)
    return call

@wrapped
def harmless(model):
    return [p.grad.norm() for p in model.parameters()]

def touched(model):
    import os
    os.system(f"printf 1 >> {FILE}")

class Trainer:
    def __init__(self):
        self.after = [note]
    def finish(self, model):
        self.look(model)
    def look(self, model):
        note(model)
    @staticmethod
    def plain(model):
        note(model)
    @classmethod
    def of_class(cls, model):
        note(model)
    def stored(self, model):
        for each in self.after:
            each(model)

class Note:
    def __init__(self, model):
        note(model)

class Called:
    def __call__(self, model):
        note(model)

trainer, called, bound, partial = Trainer(), Called(), Trainer().look, None
partial = functools.partial(note)

class Schedule:
    def step(self, model):
        note(model)

schedule, turns = Schedule(), iter("abcdef")

def steps(model):
    schedule.step(model)

def turn(model):
    return next(turns)

short = lambda model: note(model)
"""


@pytest.mark.parametrize(
    "call",
    [
        "note(model)",
        "within(model)",
        "decorated(model)",
        "harmless(model)",
        "touched(model)",
        "trainer.finish(model)",
        "trainer.stored(model)",
        "Trainer.plain(model)",
        "trainer.of_class(model)",
        "Note(model)",
        "called(model)",
        "bound(model)",
        "partial(model)",
        "short(model)",
        "steps(model)",
        "(lambda: note(model))()",
        "[note][0](model)",
        "size = len(str(note(model)))",
        "FILE.open('a').write(str(model)[:1])",
        "torch.save(model.state_dict(), FILE) or norms.append(FILE.stat().st_mtime_ns)",
    ],
)
def test_what_reaches_beyond_variables_does_not_run_again(call, tmp_path):
    """Only the lines that clip do; they are the answer all the same."""
    text = loop(f"{call}\nclip(model.parameters())").replace(CLIP, CLIP + OUTWARD)
    report, path, norms, _ = report_of(text, tmp_path)
    found = report.explanation
    assert (found.phase, found.op.line) == ("optimizer", line_of(path, "1.0 / total"))
    written = path.with_suffix(".seen")
    if norms:
        assert norms[-1] == written.stat().st_mtime_ns
    else:
        assert len(written.read_text()) == 2


def test_an_iterator_of_the_program_is_not_drawn_from_again(tmp_path):
    lines = "norms.append(turns)\nturn(model)\nclip(model.parameters())"
    text = loop(lines).replace(CLIP, CLIP + OUTWARD)
    report, _, norms, _ = report_of(text, tmp_path)
    assert report.explanation.phase == "optimizer"
    assert next(norms[0]) == "c"


def test_a_function_may_begin_an_iterator_of_its_own(tmp_path):
    own = CLIP.replace("return total", "return total.to(next(iter(parameters)).device)")
    text = loop("clip(model.parameters())").replace(CLIP, own)
    report, path, _, _ = report_of(text, tmp_path)
    found = report.explanation
    assert (found.phase, found.op.line) == ("optimizer", line_of(path, "1.0 / total"))


def test_a_method_that_clips_is_run_again(tmp_path):
    trainer = """
class Trainer:
    def __init__(self):
        self.norms = []
    def clip(self, model):
        self.norms.append(self._scale(model, clip))
    def _scale(self, model, clip):
        total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad.div_(total)
        return total.item()

trainer = Trainer()
"""
    text = loop("trainer.clip(model)").replace(CLIP, CLIP + trainer)
    report, path, _, _ = report_of(text, tmp_path)
    found = report.explanation
    place = line_of(path, "p.grad.div_(total)")
    assert (found.phase, found.op.line) == ("optimizer", place)


def test_other_gradients_than_the_steps_are_no_explanation(tmp_path, as_kept):
    """The first time all gradients become nan, and from then on one of them."""
    lines = "spoil(model, norms)"
    spoil = """
def spoil(model, norms, left=[2]):
    left[0] -= 1
    for p in list(model.parameters())[: None if left[0] == 1 else 1]:
        p.grad.fill_(float("nan"))
"""
    text = loop(lines).replace(CLIP, spoil)
    report, _, _, _ = report_of(text, tmp_path)
    found = report.explanation
    assert found.cause == "unknown" and found.op is None
    as_kept(found.notes)


def test_lines_that_do_not_explain_it_are_not_said_to_be_left_out(tmp_path, as_kept):
    """A gradient is struck once in backward; the lines behind that are finite."""
    strike = """
def strike(gradient, left=[2]):
    left[0] -= 1
    return gradient * float("nan") if left[0] == 0 else gradient

def clip(parameters):
    nn.utils.clip_grad_value_(parameters, 1.0)
"""
    text = loop("clip(model.parameters())").replace(CLIP, strike)
    text = text.replace(
        "    for step", "    model[0].bias.register_hook(strike)\n    for step"
    )
    report, _, _, _ = report_of(text, tmp_path)
    found = report.explanation
    assert found.cause == "not reproducible" and not found.is_transient
    as_kept(found.notes[0])


def test_gradients_are_as_they_were(tmp_path):
    report, _, _, model = report_of(loop("clip(model.parameters())"), tmp_path)
    assert report.explanation.phase == "optimizer"
    assert all(p.grad.isnan().all() for p in model.parameters())


def test_nothing_is_run_again_where_that_is_not_wanted(tmp_path):
    text = loop("norms.append(clip(model.parameters()))")
    options = {"explain": Explain(replay_safe=False)}
    report, _, norms, _ = report_of(text, tmp_path, **options)
    assert len(norms) == 2 and report.explanation.op is None


def test_lines_behind_a_backward_of_another_function_are_none(tmp_path):
    text = f"""{HEAD}
num = 0
def prepared(model):
    global num
    num += 1
    return model
def fit(model, optimizer, guard, norms):
    def backward(loss):
        loss.backward()
        for p in model.parameters():
            p.grad.div_(p.grad.norm() * 0 + weight)
    model = prepared(model)
    for step in range(3):
        weight = 0.0 if step == 1 else 1.0
        optimizer.zero_grad()
        backward(guard.run(lambda: model(torch.ones(4, 3)).pow(2).mean()))
        try:
            optimizer.step()
        finally:
            norms.append(num)
"""
    report, _, norms, _ = report_of(text, tmp_path)
    assert "Within the function of `guard.run()` it is run again" in str(report)
    assert "Lines of it were run again" not in str(report)
    assert norms == [1, 1]
