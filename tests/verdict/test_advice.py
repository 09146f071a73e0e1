"""What a report tells to try helps when it is followed to the letter."""

import re
from unittest import mock

import pytest
import torch
from guarding import INF, NAN, Net, batches, make, plant, train_step, warned
from torch import nn

import overflow_fast
from overflow_fast import Explain, Explanation, OverflowGuard
from overflow_fast.demo import DemoSettings, build, push_to_the_limit, read_batch
from overflow_fast.report.report import answers

WIDTH = 8
CODE = re.compile(r"`(overflow_fast\.keep_in_fp32\(.*?\))`")


def advice_of(report):
    """The lines of a report that say what to try."""
    return [text for text in report.sentences() if "What to try" in text]


def code_of(report):
    found = CODE.findall("\n".join(advice_of(report)))
    return found[0] if found else None


class Norm(nn.Module):
    """An RMSNorm of a user's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class MyRMSNorm(Norm):
    pass


class FeedForward(nn.Module):
    """Its norm runs first and is registered last, as in transformers' T5."""

    def __init__(self):
        super().__init__()
        self.wi, self.wo = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.wo(torch.relu(self.wi(self.norm(x))))


class Attention(nn.Module):
    """Its code casts to the dtype of the residual stream."""

    def __init__(self):
        super().__init__()
        self.norm = MyRMSNorm()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        scores = self.q(y) @ self.k(y).transpose(1, 2)
        return x + self.o(
            scores.float().softmax(-1).to(x.dtype) @ self.v(y).to(x.dtype)
        )


class PreNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(
            [Attention(), FeedForward(), Attention(), FeedForward()]
        )
        self.final_norm, self.drop = MyRMSNorm(), nn.Dropout(0.0)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.final_norm(x))


class PostNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi, self.out = nn.Linear(WIDTH, WIDTH), Out()

    def forward(self, x):
        return self.out(torch.relu(self.wi(x)), x)


class Out(nn.Module):
    def __init__(self):
        super().__init__()
        self.wo, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, y, x):
        return self.norm(self.drop(self.wo(y)) + x)


class Decoder(nn.Module):
    """It ends with a linear layer behind its last norm."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.out(torch.nn.functional.silu(self.norm(x)))


class Model(nn.Module):
    def __init__(self, *modules):
        super().__init__()
        self.embed, self.body = nn.Embedding(5, WIDTH), nn.ModuleList(modules)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids):
        x = ids if isinstance(self.body[0], PreNorm) else self.embed(ids)
        for module in self.body:
            x = module(x)
        return self.head(x) if x.shape[-1] == WIDTH else x


def sequence():
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.0), nn.LayerNorm(WIDTH)),
        nn.Linear(WIDTH, WIDTH),
    )


# The model, the layer that overflows, and the arguments that are advised.
OVERFLOWS = {
    "pre": (lambda: Model(PreNorm()), "body.0.layers.1.wo", ["body.0"], None),
    "pre, v": (lambda: Model(PreNorm()), "body.0.layers.0.v", ["body.0"], None),
    "post": (lambda: Model(PostNorm()), "body.0.out.wo", ["body.0.out"], None),
    "post, wi": (lambda: Model(PostNorm()), "body.0.wi", ["body.0"], None),
    "sequence": (lambda: Model(sequence()), "body.0.0", ["body.0.0"], ["body.0.3"]),
    "torch": (
        lambda: Model(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)),
        *("body.0.linear2", ["body.0"], None),
    ),
    "decoder": (lambda: Model(Decoder()), "body.0.blocks.0", ["body.0"], None),
}


def overflowing(make_model, layer, dtype=torch.float16, scale=6e4):
    torch.manual_seed(0)
    model = make_model()
    model.to(dtype)
    return model, model.get_submodule(layer).weight, scale


def run(model, weight, scale, is_autocast, advice=None, clean_steps=1):
    """Steps, in the last of which the weight is large; the report, or None."""
    if advice is not None:
        eval(advice, {"overflow_fast": overflow_fast, "model": model})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = torch.arange(10).view(2, 5) % 5
    with OverflowGuard(model, optimizer, "warn") as guard:
        for step in range(clean_steps + 1):
            if step == clean_steps:
                with torch.no_grad():
                    weight.div_(weight.abs().max()).mul_(scale)
            with torch.autocast("cpu", torch.float16, enabled=is_autocast):
                loss = model(ids).float().logsumexp(-1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return guard.last_report


@pytest.mark.parametrize("is_autocast", [False, True], ids=["half", "autocast"])
@pytest.mark.parametrize("case", list(OVERFLOWS))
def test_the_advice_makes_the_same_batch_finite(case, is_autocast):
    make_model, layer, names, until = OVERFLOWS[case]
    dtype = torch.float32 if is_autocast else torch.float16
    report = run(*overflowing(make_model, layer, dtype), is_autocast)
    assert report.verdict.first.fqn == layer
    advice = code_of(report)
    end = f", until={until}" if until else ""
    assert advice == f"overflow_fast.keep_in_fp32(model, {names}{end})"
    assert "not tried" in advice_of(report)[0]
    again = overflowing(make_model, layer, dtype)
    assert run(*again, is_autocast, advice) is None
    assert again[0].get_submodule(layer).weight.abs().max() > 5e4  # it was as large


def test_a_dropout_that_overflows_is_helped():
    """It makes an inf of what nearly fills float16: casting it back would not do."""
    settings = DemoSettings(tiny=True, batch_size=2, length=32)
    batch = read_batch(settings)

    def step(advice=None):
        model = build(settings)
        push_to_the_limit(model, batch, settings)
        if advice is not None:
            eval(advice, {"overflow_fast": overflow_fast, "model": model})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
            torch.manual_seed(settings.seed)
            model(**batch).loss.backward()
            optimizer.step()
        return guard.last_report

    report = step()
    assert report.verdict.maker.endswith(".dropout")
    advice = code_of(report)
    assert advice == "overflow_fast.keep_in_fp32(model, ['encoder'])"
    assert step(advice) is None


class Divides(nn.Module):
    def forward(self, x):
        return x / (x - x)


class ReturnsAnother(PreNorm):
    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        self.small = self.final_norm(x)
        return x


class NeverCalled(Model):
    """It calls the layers of a stack, and not the stack."""

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.body[0].layers:
            x = layer(x)
        return self.head(self.body[0].final_norm(x))


UNKNOWN = {
    "no norm": (lambda: Model(nn.Linear(WIDTH, WIDTH)), "body.0"),
    "norm runs first": (lambda: Model(FeedForward()), "body.0.wo"),
    "never called": (lambda: NeverCalled(PreNorm()), "body.0.layers.1.wo"),
    "returns another value": (lambda: Model(ReturnsAnother()), "body.0.layers.3.wo"),
}


@pytest.mark.parametrize("case", list(UNKNOWN))
def test_nothing_is_advised_where_no_end_is_known(case):
    make_model, layer = UNKNOWN[case]
    report = run(*overflowing(make_model, layer), is_autocast=False)
    assert report.verdict.first.fqn == layer
    assert advice_of(report) == []


class Plain(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.wo, self.n = nn.Linear(WIDTH, WIDTH), norm(WIDTH)

    def forward(self, x):
        return self.n(self.wo(x))


class Highway(Plain):
    def forward(self, x):
        y = self.wo(x)
        return y + self.n(y)


class Rescales(Plain):
    def forward(self, x):
        y = self.wo(x)
        return self.n(y) * y.std(-1, keepdim=True)


class Casts(Plain):
    def forward(self, x):
        return self.n(to_half(self.wo(x)).to(self.n.weight.dtype))


class Exponential(Plain):
    def forward(self, x):
        return self.n(self.wo(x).exp())


class ComparesDtypes(Plain):
    def forward(self, x):
        y = self.wo(x)
        is_half = y.dtype == torch.float16 or y.dtype in (torch.float16, torch.half)
        return self.n(y * 1 if is_half else y)


def to_half(x):
    return x.to(torch.float16)


class AdaLayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) * x.std(-1, keepdim=True)


class GatedRMSNorm(Norm):
    def __init__(self, width):
        super().__init__()

    def forward(self, x, gate=None):
        return super().forward(x)


class Branches(nn.Module):
    """Both overflow, and one is named first."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Plain(), Plain()
        self.a.wo.weight = self.b.wo.weight

    def forward(self, x):
        return self.a(x) + self.b(x)


class IteratedSequence(Model):
    """It adds what its sequence never does."""

    def forward(self, ids):
        linear, norm = self.body[0]
        y = linear(self.embed(ids))
        return self.head(y + norm(y))


class TiedHead(Model):
    """Its head has little room, and shares its weight with the body."""

    def __init__(self):
        super().__init__(Plain())
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.body[0].wo.weight


NO_HELP = {
    "adds": lambda: Model(Highway()),
    "rescales": lambda: Model(Rescales()),
    "casts": lambda: Model(Casts()),
    "exponential": lambda: Model(Exponential()),
    "norm that rescales": lambda: Model(Plain(AdaLayerNorm)),
    "norm with a gate": lambda: Model(Plain(GatedRMSNorm)),
    "two branches": lambda: Model(Branches()),
    "tied head": TiedHead,
}


@pytest.mark.parametrize("case", list(NO_HELP))
def test_nothing_is_advised_that_would_not_help(case):
    layer = "body.0.a.wo" if case == "two branches" else "body.0.wo"
    report = run(*overflowing(NO_HELP[case], layer), is_autocast=False)
    assert report.verdict.first.dtype == "float16"
    assert advice_of(report) == []


def test_nothing_is_advised_for_a_sequence_that_was_not_called():
    def make_model():
        return IteratedSequence(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        )

    report = run(*overflowing(make_model, "body.0.0"), is_autocast=False)
    assert report.verdict.first.fqn == "body.0.0"
    assert advice_of(report) == []


def test_a_dtype_that_is_only_compared_is_no_cast():
    made = overflowing(lambda: Model(ComparesDtypes()), "body.0.wo")
    assert code_of(run(*made, is_autocast=False)) is not None


class Clamps(FeedForward):
    """It hides the inf from what follows, as transformers' T5 does."""

    def forward(self, x):
        return super().forward(x).clamp(-6e4, 6e4)


def test_without_frames_a_norm_that_ran_first_is_not_taken_for_the_last():
    for frames, seen in ((21, "norm"), (0, "")):
        model, weight, scale = overflowing(lambda: Model(Clamps()), "body.0.wo")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        weight.data.div_(weight.abs().max()).mul_(scale)
        with OverflowGuard(
            model, optimizer, "warn", explain=Explain(frames=frames)
        ) as guard:
            model(torch.arange(5)[None]).float().sum().backward()
            optimizer.step()
        assert guard.last_report.verdict.first.fqn == "body.0.wo"
        assert seen in "".join(guard.last_report.frames)
        assert advice_of(guard.last_report) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float32_is_not_advised_for_its_own_range(dtype):
    made = overflowing(OVERFLOWS["post"][0], "body.0.out.wo", dtype, scale=3e38)
    report = run(*made, is_autocast=False)
    assert report.verdict.first.num_inf
    assert advice_of(report) == []


def test_float32_is_not_advised_for_what_is_undefined():
    model = Model(nn.Sequential(Divides(), nn.LayerNorm(WIDTH))).half()
    report = run(model, model.head.weight, 1.0, is_autocast=False, clean_steps=0)
    assert report.verdict.first.fqn == "body.0.0"
    assert advice_of(report) == []


def test_a_layer_that_someone_has_changed_is_not_judged_by_its_class():
    model, weight, _ = overflowing(*OVERFLOWS["post"][:2])
    layer = model.body[0].out.wo
    layer.forward = lambda x, f=layer.forward: f(x) / 0
    report = run(model, weight, 1.0, is_autocast=False, clean_steps=0)
    assert report.verdict.first.fqn == "body.0.out.wo"
    assert advice_of(report) == []


# The other advice.


def of_weight(step):
    model, optimizer = make()
    with OverflowGuard(model, optimizer, "warn") as guard:
        for i, batch in enumerate(batches(step + 1)):
            if i == step:
                model.head.weight.data[0, 0] = NAN
            train_step(model, optimizer, batch)
    return guard.last_report


def test_weights_that_were_bad_from_the_start_are_not_for_a_checkpoint():
    (text,) = advice_of(of_weight(0))
    assert text == "What to try: initialize `head.weight` or load it again."
    (text,) = advice_of(of_weight(1))
    assert text.endswith("load a checkpoint in which `head.weight` is finite.")


def test_a_buffer_is_no_name_of_a_module():
    model, optimizer = make()
    model.eval()
    model.norm.running_mean[0] = INF
    report = warned(model, optimizer, batches(1)[0])
    assert report.verdict.source == "buffer"
    assert advice_of(report) == []  # it may have been initialized, and written since


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bad_batch(value):
    model, optimizer = make()
    x, y = batches(1)[0]
    x[2, 3] = value
    report = warned(model, optimizer, (x, y))
    assert report.verdict.batch_places == ["`input[0]`, sample 2 of 4 (from 0)"]
    assert "sample    2 of 4 (counted from 0)" in str(report)
    assert advice_of(report) == []  # a replay without the sample has answered


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_bad_batch_of_float8(dtype):
    """float8 has no `isfinite`: the sample is found all the same."""
    model = nn.Sequential(Widened(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, 4)
    x[2, 1] = NAN
    batch = x.to(dtype)
    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        model(batch).sum().backward()
        optimizer.step()
    assert guard.last_report.verdict.batch_places == [
        "`input[0]`, sample 2 of 4 (from 0)"
    ]


class Widened(nn.Module):
    def forward(self, x):
        return x.float()


class Tower(nn.Module):
    def __init__(self, is_batchnorm):
        super().__init__()
        self.batchnorm = nn.Linear(8, 8)
        self.is_batchnorm = is_batchnorm

    def forward(self, x, y):
        return ((self.batchnorm(x) * (NAN if self.is_batchnorm else 1)) - y).mean()


def test_a_module_with_batch_in_its_name_is_no_batch():
    model = Tower(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        model(*batches(1)[0]).backward()
        optimizer.step()
    assert advice_of(guard.last_report) == []


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("value", [NAN, INF])
def test_what_is_not_known_is_not_advised(value, backward):
    model, optimizer = make()
    with plant(model.blocks[1].fc2, value, backward=backward):
        report = warned(model, optimizer, batches(1)[0])
    text = str(report)
    assert advice_of(report) == []
    for word in ("learning rate", "clip", "logarithm", "division", "checkpoint"):
        assert word not in text


def test_a_gradient_in_float16_says_nothing_of_scaling():
    model = nn.Sequential(nn.Linear(2, 2)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn") as guard:
        (model(torch.ones(1, 2).half()).sum().float() * 1e9).backward()
        optimizer.step()
    assert guard.last_report.verdict.num_bad_frames
    assert advice_of(guard.last_report) == []


def test_a_buffer_that_a_skip_puts_back_needs_no_checkpoint():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for scale in (1.0, 1e30):
            model(torch.randn(8, 4) * scale).sum().backward()
            optimizer.step()
    assert guard.last_report.verdict.source == "buffer"
    assert model[1].running_var.isfinite().all()
    (text,) = advice_of(guard.last_report)
    assert "if `1.running_var` is still non-finite after this step, load a" in text


def test_a_learning_rate_is_made_finite_before_a_checkpoint_is_loaded():
    model, optimizer = make()
    with OverflowGuard(model, optimizer, "warn") as guard:
        for i, batch in enumerate(batches(3)):
            optimizer.param_groups[0]["lr"] = NAN if i else 0.1
            train_step(model, optimizer, batch)
    (text,) = advice_of(guard.last_report)
    assert "set lr of param_groups[0] of " in text
    assert "to a finite number first; load a checkpoint in which" in text


@pytest.mark.parametrize("has_bad_gradient", [False, True])
def test_eps_is_not_blamed_for_gradients_that_were_let_through(has_bad_gradient):
    model = nn.Sequential(nn.Linear(2, 2)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    x = torch.zeros(1, 2).half()
    with OverflowGuard(model, optimizer, "warn") as guard:
        for step in range(2):
            optimizer.zero_grad()
            loss = model(x).float().sum()
            (loss * NAN if has_bad_gradient and step == 0 else loss).backward()
            optimizer.step()
    report = guard.last_report
    assert report.verdict.source == "weight"
    assert ("eps=1e-08" in str(report)) == (not has_bad_gradient)


def test_a_remedy_that_fails_costs_no_alarm(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr("overflow_fast.guard.pipeline.remedy_for", fail)
    model = Net()
    with plant(model.blocks[0], INF), OverflowGuard(model, on_overflow="warn") as guard:
        model(*batches(1)[0])
        assert guard.check().verdict.first.fqn == "blocks.0"


def test_an_overflow_to_minus_inf_is_no_mask():
    first = mock.Mock(signs="-", num_nan=0)
    overflow, other = Explanation(cause="range overflow"), Explanation()
    assert [answers(each, first) for each in (None, other, overflow)] == [0, 0, 1]
    assert not answers(overflow, mock.Mock(signs="+-", num_nan=0))
