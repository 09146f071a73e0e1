"""Modules of other names are aligned by the order of their classes and shapes."""

import torch

import overflow_fast


class Chain(torch.nn.Module):
    def __init__(self, names, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(4, 4) for _ in names]
        self.layers = torch.nn.ModuleDict(dict(zip(names, layers, strict=True)))

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def compared(folder, *models):
    for name, model in zip("ab", models, strict=True):
        with overflow_fast.recording(folder / name, model):
            model(torch.ones(2, 4)).sum().backward()
    return overflow_fast.compare(folder / "a", folder / "b")


def test_layers_of_other_names_are_aligned_in_their_order(tmp_path, as_kept):
    diff = compared(tmp_path, Chain("abcdefgh"), Chain("stuvwxyz"))
    assert diff.first is None and diff.num_alone == 0, diff
    assert diff.counts()["equal"] == len(diff.rows) > 50
    as_kept(diff.said, diff.verdict())


def test_a_layer_that_differs_is_between_equal_ones(tmp_path):
    mine, its = Chain("abcdefgh"), Chain("stuvwxyz")
    mine.layers["f"].register_forward_hook(lambda m, args, output: output * 1.1)
    diff = compared(tmp_path, mine, its)
    assert (diff.first.module, diff.first.kind) == ("layers.f", "forward"), diff


def test_a_layer_more_leaves_one_alone(tmp_path, as_kept):
    mine, its = Chain("abcdefgh"), Chain("stuvwxyz")
    its.layers["v"] = torch.nn.Identity()
    as_kept(" ".join(compared(tmp_path, mine, its).said))


def test_other_weights_do_not_change_the_order(tmp_path):
    diff = compared(tmp_path, Chain("abcdefgh"), Chain("stuvwxyz", seed=1))
    names = {str(r.place): str(r.its.line) for r in diff.rows}
    assert names["layers.a: output"] == "layers.s: output"
    assert names["layers.h: output"] == "layers.z: output"
    assert diff.first.kind == "weights"


class Routed(torch.nn.Module):
    """Calls one of two experts."""

    def __init__(self, which):
        super().__init__()
        torch.manual_seed(0)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self._which = which

    def forward(self, x):
        return self.experts[self._which](x)


def test_a_module_of_both_runs_is_no_twin_of_another(tmp_path, as_kept):
    said = " ".join(compared(tmp_path, Routed(0), Routed(1)).said)
    assert "paired by order" not in said
    as_kept(said)


def test_one_module_of_another_name_is_counted_as_one(tmp_path, as_kept):
    diff = compared(tmp_path, Chain("a"), Chain("x"))
    (said,) = [each for each in diff.said if "paired by order" in each]
    as_kept(said)
