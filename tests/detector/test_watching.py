"""Watching changes nothing, misses no write and survives threads and interrupts."""

import threading

import pytest
import torch
from assembled import Assembled
from parity import small_model, spoil
from torch import nn

from overflow_fast import DebugUnderflowOverflow

DETECTED = "inf/nan detected"


def train(watch):
    """Losses, gradients, weights and generator state of a short training."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 16), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Linear(16, 2)
    )
    if watch is not None:
        DebugUnderflowOverflow(model, **watch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return [*seen, *(p.detach() for p in model.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize(
    "watch", [{}, {"memo": False}, {"_defer": True}, {"list_kwargs": True}], ids=str
)
def test_training_is_bit_identical(watch):
    for a, b in zip(train(None), train(watch), strict=True):
        assert torch.equal(a, b)


def counts(detector):
    coverage = detector.coverage
    return coverage.tensors_listed, coverage.tensors_scanned


def test_a_tensor_is_scanned_once_in_a_step():
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.Linear(64, 64))
    detector = DebugUnderflowOverflow(model)
    model(torch.randn(32, 64))
    # weight, the input (six times an entry), the output (twice), and the small bias.
    assert counts(detector) == (10, 4)
    model(torch.randn(32, 64))
    assert counts(detector) == (20, 8)


def test_a_small_tensor_is_scanned_sooner_than_it_is_remembered():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    detector = DebugUnderflowOverflow(model)
    model(torch.randn(2, 4))
    assert counts(detector) == (6, 6)
    model(torch.randn(32, 32))
    assert counts(detector) == (12, 7)


def test_without_memo_every_entry_is_scanned():
    model = nn.Sequential(nn.Identity(), nn.Linear(64, 64))
    detector = DebugUnderflowOverflow(model, memo=False)
    model(torch.randn(32, 64))
    assert counts(detector) == (8, 8)


class Writes(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.before, self.after = nn.Identity(), nn.Identity()
        self.write = write

    def forward(self, x):
        x = self.before(x)
        self.write(x)
        return self.after(x)


def write_with_out(x):
    torch.full((32, 64), torch.inf, out=x)


WRITES = {
    "in place": lambda x: x.mul_(torch.inf),
    "a view": lambda x: x[1:].fill_(torch.inf),
    "a reshaped view": lambda x: x.view(-1)[-1:].fill_(torch.nan),
    "out=": write_with_out,
    "copy_": lambda x: x.copy_(torch.full((32, 64), torch.nan)),
    "set data": lambda x: setattr(x, "data", torch.full((32, 64), torch.inf)),
    "swapped storage": lambda x: x.set_(torch.full((32, 64), torch.inf)),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("defer", [False, True])
def test_a_write_within_a_step_is_seen(name, defer):
    model = Writes(WRITES[name])
    DebugUnderflowOverflow(model, _defer=defer)
    with pytest.raises(ValueError, match=DETECTED), torch.no_grad():
        model(torch.ones(32, 64))


@pytest.mark.parametrize("memo", [True, False])
def test_a_write_behind_autograds_back_within_a_step_needs_memo_off(memo):
    model = Writes(lambda x: x.numpy().fill(float("inf")))
    DebugUnderflowOverflow(model, memo=memo)
    if memo:
        model(torch.ones(32, 64))
        return
    with pytest.raises(ValueError, match=DETECTED):
        model(torch.ones(32, 64))


def test_inference_tensors_are_seen_in_every_frame():
    model = Writes(lambda x: x.fill_(torch.inf))
    DebugUnderflowOverflow(model)
    with pytest.raises(ValueError, match=DETECTED), torch.inference_mode():
        model(torch.ones(32, 64))


def test_a_later_write_does_not_alter_an_earlier_frame():
    model = Writes(lambda x: x.mul_(3))
    detector = DebugUnderflowOverflow(model)
    with torch.no_grad():
        model(torch.ones(32, 64))
    assert "1.00e+00 1.00e+00 output" in detector.frames[0]
    assert "3.00e+00 3.00e+00 output" in detector.frames[1]


def in_thread(work):
    results = []

    def body():
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, results


def test_models_watched_in_threads_of_their_own():
    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 8))
        detector = DebugUnderflowOverflow(model)
        for _ in range(20):  # large enough that scans let go of the GIL
            model(torch.randn(600, 512, generator=generator))
        assert detector.batch_number == 20
        spoil(model)
        model(torch.randn(2, 512))

    threads = [in_thread(lambda seed=seed: work(seed)) for seed in range(3)]
    for thread, results in threads:
        thread.join(timeout=600)
        assert not thread.is_alive()
        assert isinstance(results[0], ValueError) and DETECTED in str(results[0])


def test_one_watched_model_called_from_many_threads():
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 8))
    detector = DebugUnderflowOverflow(model)

    def work():
        for _ in range(15):
            model(torch.randn(600, 512))

    threads = [in_thread(work) for _ in range(4)]
    for thread, results in threads:
        thread.join(timeout=600)
        assert not thread.is_alive() and results == [None]
    assert detector.total_calls == 4 * 15 * 4


class Interrupted(Assembled):
    def forward(self, x):
        x = self.child(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), RuntimeError()])
def test_the_step_after_an_interrupted_one_is_whole(error):
    model = Interrupted(child=nn.Linear(4, 4), error=None)
    detector = DebugUnderflowOverflow(model)
    model(torch.ones(1, 4))
    model.error = error
    with pytest.raises(type(error)):
        model(torch.ones(1, 4))
    model.error = None
    model(torch.ones(1, 4))
    spoil(model)
    with pytest.raises(ValueError, match=DETECTED):
        model(torch.ones(1, 4))
    assert not detector.recorder.in_step


def test_a_deferred_verdict_of_a_forward_that_raises_is_printed(capsys, as_kept):
    model = Interrupted(child=nn.Linear(4, 4), error=None)
    DebugUnderflowOverflow(model, _defer=True)
    spoil(model)
    model.error = RuntimeError("the user's")
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="the user's"):
        model(torch.ones(1, 4))
    as_kept(capsys.readouterr().out)


def test_clean_steps_print_nothing(capsys):
    model = small_model()
    DebugUnderflowOverflow(model)
    for _ in range(3):
        model(torch.randn(2, 4))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
