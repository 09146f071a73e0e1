"""Where a tensor is: the forms that lists, sentences and rules write."""

import pytest

from overflow_fast.base.types import TensorPath
from overflow_fast.tools.compare.recording_schema import RowLine

OUTPUT = TensorPath("h.0.attn", "output", "[0]['x']")
OF_MODEL = TensorPath("", "input", ".attn_mask")
WEIGHT = TensorPath("h.0", "weight", "bias")
GRADIENT = TensorPath("h.0", "gradient", "bias")
STATE = TensorPath("h.0", "optimizer_state", "bias.exp_avg")
LOSS = TensorPath("", "recorded", "loss")


@pytest.mark.parametrize(
    ("path", "name", "words", "rule"),
    [
        (
            OUTPUT,
            "h.0.attn: output[0]['x']",
            "output[0]['x'] of h.0.attn",
            "h.0.attn:output[0]['x']",
        ),
        (
            OF_MODEL,
            "the model: input.attn_mask",
            "input.attn_mask of the model",
            ":input.attn_mask",
        ),
        (WEIGHT, "h.0: bias", "h.0.bias", "h.0:weight.bias"),
        (
            GRADIENT,
            "h.0: gradient of bias",
            "gradient of h.0.bias",
            "h.0:gradient.bias",
        ),
        (
            STATE,
            "h.0: optimizer state of bias.exp_avg",
            "h.0.bias.exp_avg",
            "h.0:optimizer_state.bias.exp_avg",
        ),
        (LOSS, "loss", "loss", ":recorded.loss"),
        (TensorPath("", "gradient", "w"), "gradient of w", "gradient of w", None),
    ],
)
def test_each_kind_of_text_has_its_form(path, name, words, rule):
    assert (str(path), path.in_words()) == (name, words)
    assert rule is None or f"{path.module}:{path.rule_label}" == rule


@pytest.mark.parametrize("path", [OUTPUT, OF_MODEL, WEIGHT, GRADIENT, LOSS])
def test_a_label_leads_back_to_its_path(path):
    assert TensorPath.from_label(path.module, path.role, path.label) == path


@pytest.mark.parametrize("path", [WEIGHT, GRADIENT, LOSS])
def test_a_qualified_name_leads_back_to_its_path(path):
    assert TensorPath.from_fqn(path.role, path.fqn) == path


def test_a_weight_that_is_called_output_keeps_its_name():
    path = TensorPath.from_label("h.0", "weight", "output")
    assert (path.path, path.rule_label) == ("output", "weight.output")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("h.0", "output", "[0]", 2), "h.0 #2: output[0]"),
        (("", "output_gradient", "[0]", 0), "the model: output gradient[0]"),
        (("h.0", "parameter_gradient", "bias", 0), "h.0.bias: parameter gradient"),
        (("", "parameter", "w", 0), "w: parameter"),
    ],
)
def test_comparisons_name_the_call_and_the_role(path, name):
    fields = dict(zip(("module", "role", "path", "call"), path, strict=True))
    line = RowLine(order=0, phase="forward", dtype="float32", shape=(), **fields)
    assert str(line) == name
