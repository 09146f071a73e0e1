"""Modules that ask whether there are hooks compute as if nobody watched them."""

import pytest
import torch
from torch import nn

from overflow_fast import DebugUnderflowOverflow, NonFiniteError, OverflowGuard

WATCHES = {
    "detector": DebugUnderflowOverflow,
    "guard": lambda model: OverflowGuard(model, on_overflow="warn", explain=False),
    "tripwire": lambda model: OverflowGuard(
        model, on_overflow="warn", explain=False, watch="tripwire"
    ),
    "trained": lambda model: OverflowGuard(
        model, torch.optim.SGD(model.parameters()), "warn", explain=False
    ),
}


class Own(nn.Module):
    """Asks in a function within its forward, as code of others does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        def is_plain(module):
            return not module._forward_hooks and not module._forward_pre_hooks

        y = self.inner(x)
        return y if self.training else y * all(map(is_plain, self.modules()))


class Inherits(Own):
    def forward(self, x):
        return super().forward(x) + 1


def encoder(layers=2):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


MAKERS = {
    "encoder": encoder,
    "nested": lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(encoder())),
    "own": lambda: nn.Sequential(nn.Linear(8, 8), Own()),
    "inherits": lambda: nn.Sequential(nn.Linear(8, 8), Inherits()),
}
X = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(1))


def made(make, is_training=False):
    torch.manual_seed(0)
    return MAKERS[make]().train(is_training)


def num_hooks(model):
    return sum(len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("was_training", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_computes_every_bit_as_without_a_watch(
    mode, was_training, make, watch
):
    bare, model = made(make), made(make, was_training)
    with WATCHES[watch](model) as watching:
        if was_training:
            model(X).sum().backward()
        model.eval()
        with mode():
            for _ in range(2):
                assert torch.equal(model(X), bare(X))
            if watch in ("guard", "trained"):
                assert "were left out" in str(watching.coverage())
        model.train()
        model(X).sum().backward()
        linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
        assert watch == "tripwire" or all(m._forward_hooks for m in linear)
    assert num_hooks(model) == 0


def test_a_nan_of_the_fast_path_is_seen_and_no_module_is_wrongly_named():
    model, hidden = made("encoder"), torch.zeros(3, 7, dtype=torch.bool)
    hidden[0, :4] = True
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1)
    for watch in ("tripwire", ("activations", "weights")):
        with OverflowGuard(model, watch=watch), torch.inference_mode():
            with pytest.raises(NonFiniteError) as error:
                model(X, src_key_padding_mask=hidden, mask=causal)
        text = str(error.value)
        assert "a fast path" in text
        assert "the model itself" not in text and "Not reproducible" not in text


def test_a_frozen_encoder_is_seen_from_outside_in_training():
    model = nn.Sequential(made("encoder").requires_grad_(False), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
    bare = model(X)
    with OverflowGuard(model, optimizer):
        assert torch.equal(model(X), bare)
        model[0].requires_grad_(True)
        model(X)
        assert model[0].layers[0].linear1._forward_hooks


def test_a_model_that_asks_itself_is_named_once(caplog):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    for watch in WATCHES.values():
        caplog.clear()
        with watch(model):
            assert caplog.text.count("asks whether modules") == 1
    with DebugUnderflowOverflow(model, strict_compat=True):
        assert caplog.text.count("asks whether modules") == 1
