"""The table of torch's operations, compared with torch's registry and its numbers."""

import ast
import contextlib
import functools
import inspect
import itertools
import typing
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import get_overridable_functions
from torch.utils._python_dispatch import TorchDispatchMode

import overflow_fast
from overflow_fast.base import torch_ops
from overflow_fast.base.torch_ops import (
    ALIASES,
    ROWS,
    SWAPPED,
    Operation,
    Trait,
    base_of,
    has,
    op_of,
    plain_name,
)
from overflow_fast.explainer.torch_calls import SAME

every_case = pytest.mark.day  # of tables that are contracts

PACKAGE = Path(overflow_fast.__file__).parent
ATEN = {
    schema.name.removeprefix("aten::")
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("aten::")
}
FUNCTIONS = {
    function.__name__: function
    for functions in get_overridable_functions().values()
    for function in functions
    if hasattr(function, "__name__")
}
# What torch shows a mode by these names, and does not list.
SHOWN = {"__set__", "_set_grad_enabled"}
TRAITS = typing.get_args(Trait)
NAMES = [name for name in ROWS if "*" not in name]
# Numbers at which functions have their poles, and ends of what they are defined for.
NUMBERS = torch.tensor(
    [*(-4, -3.5, -2, -1.5, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 1.5, 2, 3.5, 4)],
    dtype=torch.float64,
)
LARGE = torch.tensor([-1e308, -1e3, -1e2, 1e2, 1e3, 1e308], dtype=torch.float64)


def is_of_torch(name):
    known = ATEN | FUNCTIONS.keys() | SHOWN
    is_known = not known.isdisjoint((name, f"{name}_", name.removeprefix("_")))
    homes = (torch.Tensor, F, torch.linalg)
    return is_known or any(hasattr(home, name) for home in homes)


def overloads(name):
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


@functools.cache
def of_each_element(num_tensors):
    """The operators of torch that compute each element by itself, and need no more."""
    found = {}
    for name in sorted(ATEN):
        if name.endswith("_") or name.startswith("_foreach_"):
            continue
        for overload in overloads(name):
            schema, tags = overload._schema, overload.tags
            needed = [a for a in schema.arguments if not a.has_default_value()]
            if torch.Tag.pointwise not in tags or torch.Tag.out in tags:
                continue
            if [str(each.type) for each in needed] == ["Tensor"] * num_tensors:
                found[name] = overload
    return found


class Ops(TorchDispatchMode):
    """Lists the operators that run while it is entered."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(base_of(str(func)))
        return func(*args, **(kwargs or {}))


def result_of(function, *given):
    """The tensor that a function returns, or None."""
    try:
        result = function(*given)
    except Exception:  # it takes other arguments
        return None
    is_plain = isinstance(result, torch.Tensor) and result.layout is torch.strided
    return result if is_plain else None


# The names.


def test_each_operation_has_one_row_of_known_traits():
    names = [name for names, _ in torch_ops._TABLE for name in names.split()]
    assert len(names) == len(set(names))
    assert {trait for op in ROWS.values() for trait in op.traits} == set(TRAITS)


def test_each_trait_is_explained():
    source = Path(torch_ops.__file__).read_text()
    for trait in TRAITS:
        assert f"\n# {trait} " in source


def test_each_name_is_one_of_torch():
    """One that torch has renamed is found here."""
    named = {name[1:] if name in SWAPPED else name for name in NAMES}
    assert [name for name in sorted(named) if not is_of_torch(name)] == []


def test_each_alias_is_a_name_of_torch():
    plain = {name[1:] if name in SWAPPED else name for name in ALIASES.values()}
    assert [name for name in {*ALIASES, *plain} if not is_of_torch(name)] == []
    assert ALIASES.keys() & {*ALIASES.values()} == set()


def test_each_pattern_has_an_operator():
    for pattern in ROWS.keys() - NAMES:
        assert any(op_of(name) is ROWS[pattern] for name in ATEN), pattern


def test_each_name_that_code_compares_is_one_of_torch():
    """A case of a single operation, such as `base == "pow"`."""
    found = set()
    for path in (PACKAGE / "explainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare):
                continue
            if not ast.unparse(node.left).endswith(("base", "plain_name", "call.name")):
                continue
            texts = [n for n in ast.walk(node) if isinstance(n, ast.Constant)]
            found |= {each.value for each in texts if isinstance(each.value, str)}
    assert {"pow", "_ctc_loss", "div", "__setitem__"} <= found
    found -= {"_", *SWAPPED}  # of `base.removesuffix("_")`, and names of ours
    assert [name for name in sorted(found) if not is_of_torch(name)] == []


def test_what_is_known_of_operations_stands_in_the_table_alone():
    """No other tuple, set or dict is of three names of operators or more."""
    found = []
    for path in {*PACKAGE.rglob("*.py")} - {PACKAGE / "base/torch_ops.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            own = getattr(node, "elts", None) or getattr(node, "keys", None)
            own = own if isinstance(own, list) else []
            texts = [each.value for each in own if isinstance(each, ast.Constant)]
            if len(texts) == len(own) > 2 and set(texts) <= ATEN:
                found.append(f"{path.name}:{node.lineno}: {texts}")
    assert found == []


def test_names_of_one_operation_have_one_row():
    """A function that runs an operator and nothing else is that operator."""

    other = {
        *("bool", "byte", "char", "short", "int", "long"),  # no numbers with fractions
        *("cfloat", "cdouble", "chalf"),
        *("float_power", "square", "sym_sum", "linalg_matrix_norm"),  # of other inputs
        *("fft_fftshift", "fft_ifftshift"),
        *("matmul", "linalg_matmul", "dsmm", "spmm"),  # of matrices alone
        "lobpcg",  # runs many, for 4 s
    }
    x, different = torch.rand(3, 3, dtype=torch.float64), {}
    for name, function in FUNCTIONS.items():
        if name in other or name.endswith("_"):
            continue
        for given in ((x,), (x, x)):
            with Ops() as ops:
                if result_of(function, *map(torch.clone, given)) is None:
                    continue
            ran = [each for each in ops.names if each != "clone"]
            is_known = len(ran) == 1 and op_of(ran[0]) != Operation()
            if is_known and op_of(name) != op_of(ran[0]) and not has(name, "moves"):
                different[name] = ran[0]
            break
    assert different == {}


X, PLACES = torch.rand(3, 3) + 0.5, torch.arange(3)
# What a function is given, where that is not X, once, twice or three times.
GIVEN = {
    **dict.fromkeys(("layer_norm", "rms_norm"), (X, (3,))),
    "group_norm": (X[None], 3),
    "instance_norm": (X[None],),
    "native_layer_norm": (X, (3,), None, None, 1e-5),
    "native_group_norm": (X, None, None, 3, 3, 1, 3, 1e-5),
    **dict.fromkeys(("softmax", "log_softmax"), (X, -1)),
    "conv1d": (X[None], X[:, :, None]),
    "conv2d": (X[None, :, None], X[:, :, None, None]),
    "conv3d": (X[None, :, None, None], X[:, :, None, None, None]),
    "einsum": ("ij,jk", X, X),
    "bmm": (X[None], X[None]),
    "baddbmm": (X[None], X[None], X[None]),
    "addbmm": (X, X[None], X[None]),
    "addmv": (X[0], X, X[0]),
    "mv": (X, X[0]),
    "addr": (X, X[0], X[0]),
    **dict.fromkeys(("dot", "vdot", "outer"), (X[0], X[0])),
    **dict.fromkeys(("cat", "stack"), ([X, X],)),
    "where": (X, X > 1, X),
    "masked_select": (X, X > 1),
    "masked_fill": (X, X > 1, 0.0),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), (X, 0)),
    **dict.fromkeys(("cumsum", "cumprod", "logsumexp", "__getitem__"), (X, 0)),
    "bincount": (PLACES,),
    "bernoulli": (X / 2,),
    "gather": (X, 0, PLACES[None]),
    "index_select": (X, 0, PLACES),
    "take_along_dim": (X, PLACES[None], 0),
    "index_add": (X, 0, PLACES, X),
    "index_put": (X, (PLACES,), X),
    **dict.fromkeys(("scatter", "scatter_add"), (X, 0, PLACES[None], X)),
    "nll_loss": (X, PLACES),
    "broadcast_tensors": (X, X[0]),
    **dict.fromkeys(("tile", "flip"), (X, (1,))),
    **dict.fromkeys(("repeat_interleave", "roll"), (X, 2)),
    "repeat": (X, 2, 1),
    "to": (X, torch.float16),
    "as_strided": (X, (2,), (1,)),
    "view_as_complex": (X[:, :2].clone(),),
    **dict.fromkeys(("real", "imag", "view_as_real"), (X.cfloat(),)),
    **dict.fromkeys(("indices", "values"), (X.to_sparse().coalesce(),)),
    "resize_": (X.clone(), (2,)),
    "resize_as_": (X.clone(), X),
}
# Functions that have another row than the operator that they become, and why.
OTHER = {
    "instance_norm": "a batch norm, which in evaluation divides by what it has kept",
    "rms_norm": "several operators on the CPU; on a GPU it is _fused_rms_norm",
    "square": "a power, which has poles and promotes for other exponents",
    "to": "moves values where the dtype stays; the operator is a cast",
}


def test_a_function_has_what_the_operator_has_that_it_becomes():
    names = [n for n in NAMES if n in FUNCTIONS and not has(n, "tells")]
    different, failed = set(), set()
    for name in names:
        tries = [GIVEN[name]] if name in GIVEN else [(X,), (X, X), (X, X, X)]
        for given in tries:
            with contextlib.suppress(Exception), Ops() as ops:
                FUNCTIONS[name](*given)
                break
        else:
            failed.add(name)
            continue
        ran = [*dict.fromkeys(ops.names)] or [name]
        lost = {t for t in op_of(name).traits if not any(has(each, t) for each in ran)}
        more = {t for t in TRAITS if has(ran[0], t) and not has(name, t)}
        if lost or (more and len(ran) == 1):
            different.add(name)
    assert not failed
    assert different == OTHER.keys()


def test_parameters_are_those_of_torch():
    for name in NAMES:
        known = set()
        for overload in overloads(name) if name in ATEN else ():
            known |= {argument.name for argument in overload._schema.arguments}
        function = getattr(F, name, None)
        if inspect.isfunction(function):
            known |= set(inspect.signature(function).parameters)
        known = {SAME.get(each, each) for each in known}
        assert set(op_of(name).parameters) <= known, name


# The numbers.


@every_case
@pytest.mark.parametrize("name", of_each_element(1))
def test_what_an_operation_needs_is_where_it_is_finite(name):
    """Each that has a pole, or an end, has a row that says so."""
    op, function = op_of(name), of_each_element(1)[name]
    result = result_of(function, NUMBERS.clone())
    if result is None or not result.is_floating_point():
        return
    inside = [op.is_inside(float(each)) for each in NUMBERS]
    assert result.isfinite().tolist() == inside
    large = result_of(function, LARGE.clone())
    if large is None or not all(inside):
        return
    if bool(large.isinf().any()):
        assert "grows" in op.traits


@every_case
@pytest.mark.parametrize("name", [n for n in NAMES if has(n, "each")])
def test_an_operation_and_its_derivative_are_finite_at_its_safe_argument(name):
    plain = name[1:] if name in SWAPPED else name
    x = torch.tensor([op_of(name).safe], dtype=torch.float64, requires_grad=True)
    function = getattr(torch, plain, None) or getattr(torch.ops.aten, plain)
    given = {"div": (1.0, x), "pow": (x, 0.5)}.get(plain, (x,))
    result = torch.div(torch.ones(1), x) if plain == "div" else function(*given)
    assert bool(result.isfinite().all())
    if result.requires_grad:
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert bool(gradient.isfinite().all())


@every_case
@pytest.mark.parametrize("name", [n for n in NAMES if has(n, "grows")])
def test_what_only_grows_has_no_pole(name):
    function = getattr(torch, name, None) or getattr(F, name, None)
    if function is None:
        return
    for given in ((NUMBERS,), (NUMBERS, NUMBERS), (NUMBERS, NUMBERS, NUMBERS)):
        result = result_of(function, *given)
        if result is not None and result.is_floating_point():
            assert bool(result.isfinite().all())


@every_case
@pytest.mark.parametrize("name", [n for n in NAMES if op_of(n).never])
def test_a_magnitude_that_results_never_have_is_one_that_rounding_makes(name):
    function = getattr(torch, name, None) or getattr(F, name, None)
    if function is None:
        function = getattr(torch.ops.aten, name)
    dim = (-1, False) if name == "_softmax" else (-1,) * ("softmax" in name)
    near = torch.tensor([-3.0, -1.0, 0.25, 2.0], dtype=torch.float64)
    far = torch.tensor([-2e3, 0.0, 2e3], dtype=torch.float64)
    for value in op_of(name).never:
        assert value not in function(near, *dim).abs().tolist()
        assert value in function(far, *dim).abs().tolist()


def promotes(name, function):
    """Whether float32 in any of two tensors makes float32, if both work."""
    half, single = torch.rand(2, 2).half(), torch.rand(2, 2)
    dtypes = set()
    for one, other in ((half, single), (single, half)):
        given = {
            "where": (one > 0, one, other),
            "masked_fill": (single, single > 0, half.sum()),
            "cat": ([one, other],),
            "stack": ([one, other],),
            "addcmul": (one, other, one),
            "addcdiv": (one, other, one),
        }.get(name, (one, other))
        result = result_of(function, *given)
        dtypes.add(None if result is None else result.dtype)
    return dtypes == {torch.float32}


def test_what_promotes_does_so():
    functions = {n: getattr(torch, n, None) or getattr(F, n, None) for n in NAMES}
    functions |= of_each_element(2)
    names = functions.keys() & FUNCTIONS.keys() - {*SWAPPED, "gumbel_softmax"}
    found = {name for name in names if promotes(name, functions[name])}
    assert {name for name in names if has(name, "promotes")} == found


def test_what_moves_values_computes_none():
    x = torch.rand(3, 3, dtype=torch.float64)
    values = {*x.flatten().tolist()}
    for name, function in FUNCTIONS.items():
        result = result_of(function, x.clone()) if has(name, "moves") else None
        if result is not None and result.dtype is x.dtype:
            assert set(result.flatten().tolist()) <= values, name


def test_views_of_torch_are_moves_unless_they_are_other_numbers():
    assert all(has(name, "moves") for name in ("diagonal", "unfold", "tensor_split"))
    assert not any(has(name, "moves") for name in ("real", "as_strided", "relu"))
    x = torch.rand(2, 2)
    assert has("mT", "moves") and torch.equal(x.mT, x.t())


def test_what_draws_numbers_is_random():
    """torch has a tag for its operators; of its functions in Python the table tells."""
    x = torch.rand(1, 64, 4, 4) + 0.5  # of 4 channels two draws are the same at times
    different = set()
    for name, function in FUNCTIONS.items():
        if name[-1] == "_" or name == "lobpcg":  # that returns two, after 4 s
            continue
        one, other = result_of(function, x.clone()), result_of(function, x.clone())
        if one is None or other is None:
            continue
        if has(name, "empty") or name.startswith("fbgemm_"):  # memory as it was
            continue
        if not bool(((one == other) | (one != one)).all()):
            different.add(name)
    assert {"dropout", "dropout2d", "gumbel_softmax", "poisson"} <= different
    assert [name for name in sorted(different) if not has(name, "random")] == []
    assert not has("scaled_dot_product_attention", "random")


def test_random_operations_in_place_overwrite_unless_they_read():
    read = {"dropout_", "alpha_dropout_", "feature_dropout_", "rrelu_"}
    read |= {"feature_alpha_dropout_", "rrelu_with_noise_"}
    in_place = {name for name in ATEN if name.endswith("_") and has(name, "random")}
    assert {name for name in in_place if not has(name, "overwrites")} == read


def test_factories_of_empty_tensors_are_known():
    names = {name for name in ATEN if "empty" in name}
    assert names == {name for name in names if has(name, "empty")}


def test_operations_on_lists_overwrite_and_grow_as_those_on_tensors():
    assert has("_foreach_zero_", "overwrites") and has("_foreach_sinh_", "grows")
    assert not has("_foreach_div", "grows") and not has("_foreach_sub", "difference")


def test_an_operation_of_no_row_has_no_traits():
    assert op_of("floor") == Operation() and not any(
        has("floor", trait) for trait in TRAITS
    )
    assert plain_name("special_exp2") == "exp2" and plain_name("floor") == "floor"
    assert base_of("aten.div.Tensor") == "div" == base_of("div")


def without_nan_and_with(function, x):
    if has(function.__name__, "promotes"):  # of two tensors
        return function(x, x), function(x, x * torch.nan)
    return function(x), function(torch.cat([x, x[:1] * torch.nan]))


def test_what_some_traits_say_is_so():
    x = torch.tensor([[0.5, 0.0], [1.0, 2.0]], dtype=torch.float64)
    is_so = {
        "same": lambda f: torch.equal(f(x), x),
        "divides": lambda f: not f(*(x,) * (2 + (f is torch.addcdiv))).isfinite().all(),
        "bilinear": lambda f: torch.equal(f(2 * x, x), 2 * f(x, x)),
        "commutes": lambda f: torch.equal(f(x, 3 * x), f(3 * x, x)),
        "whole": lambda f: not (f(x.ceil() * 3, 1) % 1).any(),
        "leaves_out_nan": lambda f: torch.equal(*without_nan_and_with(f, x)),
        "deviation": lambda f: any(each.isnan().all() for each in (*f(x[:1], 0),)),
    }
    for name, trait in itertools.product(NAMES, is_so):
        function = getattr(torch, name, None) or getattr(torch.Tensor, name, None)
        if has(name, trait) and function is not None and name not in ("to", "bmm"):
            assert is_so[trait](function), name
