"""Emitted Python against the ops it stands for: the same bits, no value dropped early or kept by another's name."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fuel_core.plan_backends import emit
from fuel_core.plan_backends.emit import emit_python

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(3)


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=GENERATOR).to(dtype)


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


INF, NAN = math.inf, math.nan
bf16, f64 = torch.bfloat16, torch.float64

# name.overload -> argument forms: (positional, keyword). Every form the recorder writes, and others that the schema
# allows beside it.
FORMS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    # methods
    "chunk.default": [((r(2, 6), 2, -1), {}), ((r(6, 2), 3), {})],
    "copy_.default": [
        ((r(2, 3), r(2, 3)), {}),
        ((r(2, 3), r(3)), {}),
        ((r(2, 3, dtype=bf16), r(2, 3), False), {}),
        ((r(4), r(4, dtype=f64)), {"non_blocking": True}),
    ],
    "contiguous.default": [((r(2, 3).T,), {}), ((r(1, 2, 3, 4),), {"memory_format": torch.channels_last})],
    "expand.default": [((r(1, 3), [2, -1]), {}), ((r(1, 3), [2, 3]), {"implicit": False})],
    "index_copy_.default": [((r(1, 2, 5, 3), 2, ids(1), r(1, 2, 1, 3)), {}), ((r(4, 3), 0, ids(2, 0), r(2, 3)), {})],
    "narrow.default": [((r(2, 5), 1, 1, 3), {}), ((r(2, 5), -1, -2, 1), {}), ((r(2, 5), 1, 5, 0), {})],
    "narrow.Tensor": [((r(2, 5), 1, torch.tensor(2), 3), {})],
    "permute.default": [((r(2, 3, 4), [2, 0, 1]), {})],
    "reshape.default": [((r(2, 6), [3, -1]), {}), ((r(3, 2).T, [6]), {})],
    "scatter_.src": [((r(3, 4), 1, ids(0, 2, 1).view(3, 1), r(3, 1)), {})],
    "select.int": [((r(2, 3), 0, 1), {}), ((r(2, 3), -1, -1), {})],
    "squeeze.default": [((r(1, 3, 1),), {})],
    "squeeze.dim": [((r(1, 3, 1), -1), {}), ((r(2, 3), 0), {})],
    "t.default": [((r(2, 3),), {}), ((r(3),), {})],
    "to.dtype": [
        ((r(3), bf16), {}),
        ((r(3), torch.float32), {}),
        ((r(3), f64, False, True), {}),
        ((r(1, 2, 3, 4), bf16), {"memory_format": torch.channels_last}),
    ],
    "transpose.int": [((r(2, 3, 4), 1, 2), {}), ((r(2, 3, 4), -1, 0), {})],
    "unbind.int": [((r(2, 3),), {}), ((r(2, 3), -1), {})],
    "unflatten.int": [((r(2, 6), -1, [2, 3]), {}), ((r(6), 0, [-1, 2]), {})],
    "unsqueeze.default": [((r(2, 3), 1), {}), ((r(2, 3), -1), {})],
    "view.default": [((r(2, 6), [3, 4]), {}), ((r(2, 6), [-1]), {})],
    "view.dtype": [((r(2, 6), torch.int32), {})],
    # functions
    "add.Tensor": [
        ((r(2, 3), r(3)), {}),
        ((r(2), r(2)), {"alpha": 2}),
        ((r(3), 2.5), {}),
        ((r(3), INF), {}),
        ((r(3, dtype=bf16), r(3)), {}),
        ((ids(1, 2), 3), {}),
    ],
    "add.Scalar": [((r(3), 2), {}), ((r(3), -0.0), {}), ((r(3), 2, 3), {})],
    "bmm.default": [((r(2, 3, 4), r(2, 4, 5)), {})],
    "cat.default": [(([r(2, 3), r(1, 3)],), {}), (([r(2, 3), r(2, 1)], -1), {})],
    "cos.default": [((r(9),), {})],
    "div.Tensor": [((r(3), r(3)), {}), ((r(3), 3.0), {}), ((r(3), 3), {}), ((ids(7, 8), 2), {}), ((r(3), 0.0), {})],
    "div.Scalar": [((r(3), 3), {}), ((r(3), NAN), {})],
    "embedding.default": [
        ((r(5, 3), ids(0, 4)), {}),
        ((r(5, 3), ids(1).view(1, 1), -1, False, False), {}),
        ((r(5, 3), ids(1), 2), {"sparse": False}),
    ],
    "exp.default": [((r(9),), {})],
    "gelu.default": [((r(9),), {}), ((r(9),), {"approximate": "tanh"}), ((r(9, dtype=bf16),), {"approximate": "none"})],
    "linear.default": [
        ((r(2, 3), r(4, 3)), {}),
        ((r(1, 1, 3), r(4, 3), r(4)), {}),
        ((r(2, 3, dtype=bf16), r(4, 3, dtype=bf16), None), {}),
    ],
    "matmul.default": [((r(2, 3, 4), r(4, 5)), {}), ((r(4), r(4)), {}), ((r(1, 2, 1, 4), r(1, 2, 4, 3)), {})],
    "mean.default": [((r(2, 3),), {}), ((r(2, 3),), {"dtype": f64})],
    "mean.dim": [
        ((r(2, 3), [-1]), {}),
        ((r(2, 3), [1], True), {}),
        ((r(2, 3), None), {}),
        ((r(2, 3, dtype=bf16), [0]), {"dtype": torch.float32}),
    ],
    "mm.default": [((r(2, 3), r(3, 4)), {})],
    "mul.Tensor": [
        ((r(2, 3), r(3)), {}),
        ((r(3), 0.1), {}),
        ((r(3), 2), {}),
        ((r(3, dtype=bf16), 0.1), {}),
        ((r(3), NAN), {}),
        ((r(3), True), {}),
    ],
    "mul.Scalar": [((r(3), 0.1), {}), ((r(3), -0.0), {})],
    "mv.default": [((r(2, 3), r(3)), {})],
    "neg.default": [((r(9),), {})],
    "pow.Tensor_Scalar": [((r(9), 2), {}), ((r(9).abs(), 0.5), {}), ((r(9), 3.0), {})],
    "pow.Scalar": [((2.0, r(3)), {}), ((3, r(3)), {})],
    "rms_norm.default": [
        ((r(2, 8), [8], r(8), 1e-5), {}),
        ((r(2, 8), [8]), {}),
        ((r(2, 8), [8], None, 1e-6), {}),
        ((r(2, 8, dtype=bf16), [8], r(8, dtype=bf16), 1e-5), {}),
    ],
    "rsqrt.default": [((r(9).abs(),), {})],
    "sigmoid.default": [((r(9),), {})],
    "silu.default": [((r(9),), {})],
    "sin.default": [((r(9),), {})],
    "softmax.int": [
        ((r(2, 5), -1), {}),
        ((r(2, 5), 0, None), {}),
        ((r(2, 5, dtype=bf16), -1, torch.float32), {}),
        ((r(2, 5, dtype=bf16), -1), {"dtype": torch.float32}),
    ],
    "stack.default": [(([r(2), r(2)],), {}), (([r(2), r(2)], -1), {})],
    "sub.Tensor": [((r(3), r(3)), {}), ((r(3), r(3)), {"alpha": 2.5}), ((r(3), 1), {})],
    "sub.Scalar": [((r(3), 2), {}), ((r(3), 2, 3), {})],
    "tanh.default": [((r(9),), {})],
}  # fmt: skip


def graph_of(build: Callable[[fx.Graph], Any]) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(build(graph))
    return fx.GraphModule(torch.nn.Module(), graph)


def call_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.GraphModule, list[Tensor]]:
    """One call whose tensors are placeholders and whose other arguments stand in the graph."""
    inputs: list[Tensor] = []

    def build(graph: fx.Graph) -> fx.Node:
        def lift(value: Any) -> Any:
            if isinstance(value, Tensor):
                inputs.append(value)
                return graph.placeholder(f"x{len(inputs)}")
            return [lift(item) for item in value] if isinstance(value, list) else value

        lifted = [lift(a) for a in args]
        return graph.call_function(target, tuple(lifted), dict(kwargs))

    return graph_of(build), inputs


def bits(value: Any) -> Any:
    """The value so that equality means equal bits, shape, strides and dtype."""
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    if isinstance(value, Tensor):
        raw = value.contiguous().flatten()
        return value.dtype, value.shape, value.stride(), raw.view(torch.uint8).tolist() if raw.numel() else []
    return value


def overload(name: str) -> Any:
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet), which)


def reachable() -> list[str]:
    """Every overload that the tables may rewrite: named in a table, a safe overload, and about tensors."""
    found = []
    for name in sorted({*emit._METHODS, *emit._FUNCTIONS}):
        packet = getattr(aten, name)
        for which in packet.overloads():
            schema = getattr(packet, which)._schema
            about_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
            if which in emit._SAFE_OVERLOADS and about_tensors and f"{name}.{which}" not in emit._AS_THEMSELVES:
                found.append(f"{name}.{which}")
    return found


def test_every_overload_that_is_rewritten_has_forms_here() -> None:
    assert sorted(FORMS) == sorted(reachable())


@pytest.mark.parametrize("name", FORMS)
def test_a_rewritten_op_gives_the_bits_of_the_overload(name: str) -> None:
    target = overload(name)
    for args, kwargs in FORMS[name]:
        module, inputs = call_of(target, args, kwargs)
        function = emit_python(module)
        ours, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
        expected = fx.Interpreter(module).run(*theirs)
        assert bits(function(*ours)) == bits(expected), function.__doc__
        assert bits(ours) == bits(theirs), "what is written in place as well"


@pytest.mark.parametrize("name", FORMS)
def test_a_listed_op_really_is_rewritten(name: str) -> None:
    module, _ = call_of(overload(name), *FORMS[name][0])
    function = emit_python(module)
    assert not any(isinstance(v, torch._ops.OpOverload) for v in function.__globals__.values())
    packet = name.partition(".")[0]
    assert f"{packet}(" in str(function.__doc__) or f"{packet}_" in str(function.__doc__)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.pow.Tensor_Tensor, (r(3).abs(), r(3))),
        (aten.div.Tensor_mode, (r(3), r(3))),
        (aten.scatter_.value, (r(3, 4), 1, ids(0, 2, 1).view(3, 1), 2.0)),
        (aten.flatten.using_ints, (r(2, 3), 0, 1)),
        (aten.relu.default, (r(3),)),
        (aten.slice.Tensor, (r(5), 0, 1, 3)),
        (aten._softmax.default, (r(2, 3), -1, False)),
        (aten.add.Scalar, (r(3), 2, 3)),
        (aten.copy_.int, (r(3), 5)),
    ],
    ids=str,
)
def test_an_op_that_is_not_listed_is_called_as_itself(target: Any, args: tuple[Any, ...]) -> None:
    kwargs = {"rounding_mode": "floor"} if target is aten.div.Tensor_mode else {}
    module, inputs = call_of(target, args, kwargs)
    function = emit_python(module)
    assert any(v is target._op for v in function.__globals__.values())
    ours, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    assert bits(function(*ours)) == bits(fx.Interpreter(module).run(*theirs))


# -- constants and structure ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [INF, -INF, NAN, 0.0, -0.0, 5e-324, 0.1, math.nextafter(0.1, 1)])
def test_floats_keep_their_bits(value: float) -> None:
    module = graph_of(lambda g: g.call_function(aten.full.default, ([2], value)))
    assert bits(emit_python(module)()) == bits(torch.full((2,), value))


def test_equal_floats_of_either_sign_do_not_share_a_constant() -> None:
    def build(graph: fx.Graph) -> Any:
        full = [graph.call_function(aten.full.default, ([1], v)) for v in (0.0, -0.0, 1.0, NAN)]
        return graph.call_function(aten.cat.default, (full,))

    assert bits(emit_python(graph_of(build))()) == bits(torch.tensor([0.0, -0.0, 1.0, NAN]))


def test_lists_tuples_and_slices_keep_their_kind_and_nesting() -> None:
    def echo(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    nested = ([1, [2, (3,)]], (), [], (4,), ([5],), slice(1, None, 2), None, True, "a'b\n", -1, torch.float32)
    module = graph_of(lambda g: g.call_function(echo, nested, {"k": [[-2], "x"]}))
    args, kwargs = emit_python(module)()
    assert args == nested
    assert kwargs == {"k": [[-2], "x"]}
    assert [type(a) for a in args] == [type(a) for a in nested]
    assert type(args[0][1][1]) is tuple


def test_nodes_are_found_inside_nested_arguments() -> None:
    def build(graph: fx.Graph) -> Any:
        x, n = graph.placeholder("x"), graph.placeholder("n")
        m = graph.call_function(operator.add, (n, 1))
        rows = graph.call_function(operator.getitem, (x, (slice(n, m, None), slice(None, None, 2))))
        return rows, [m, 1]

    x = r(4, 6)
    rows, (m, one) = emit_python(graph_of(build))(x, 2)
    assert torch.equal(rows, x[2:3, ::2])
    assert (m, one) == (3, 1)


@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod])
def test_integer_arithmetic_of_either_order_and_sign(operation: Callable[[Any, Any], Any]) -> None:
    def build(graph: fx.Graph) -> Any:
        n = graph.placeholder("n")
        return [graph.call_function(operation, args) for args in ((n, 3), (-7, n), (n, -3), (n, n))]

    function = emit_python(graph_of(build))
    for n in (-5, 1, 4):
        assert function(n) == [operation(n, 3), operation(-7, n), operation(n, -3), operation(n, n)]


def test_a_tensor_of_the_module_is_a_constant_and_an_unused_effect_still_happens() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.placeholder("unused")
    graph.call_function(aten.copy_.default, (x, graph.get_attr("two")))
    graph.output(graph.call_function(aten.neg.default, (x,)))
    root = torch.nn.Module()
    root.two = torch.full((2,), 2.0)
    x = torch.zeros(2)
    assert emit_python(fx.GraphModule(root, graph))(x, None).tolist() == [-2.0, -2.0]
    assert x.tolist() == [2.0, 2.0]


def test_a_value_is_dropped_after_its_last_use() -> None:
    """What a step allocates must not add up over its ops."""

    def build(graph: fx.Graph) -> Any:
        x = graph.placeholder("x")
        for _ in range(20):
            x = graph.call_function(aten.sin.default, (x,))
        return x

    source = str(emit_python(graph_of(build)).__doc__)
    assert source.count("t0 = ") == 20
    assert "t1" not in source


# -- random graphs ----------------------------------------------------------------------------------------------------

UNARY = [aten.neg.default, aten.sin.default, aten.tanh.default, aten.abs.default]
BINARY = [aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.maximum.default]
step = st.tuples(st.integers(0, 6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(
    steps=st.lists(step, min_size=1, max_size=25),
    n_inputs=st.integers(1, 4),
    outputs=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
)
def test_random_graphs_give_what_the_interpreter_gives(
    steps: list[tuple[int, int, int, int]], n_inputs: int, outputs: list[int]
) -> None:
    """Values used once, often, never, together with themselves, and written in place while others still read them."""
    graph = fx.Graph()
    values = [graph.placeholder(f"x{i}") for i in range(n_inputs)]
    for kind, a, b, c in steps:
        x, y, z = (values[i % len(values)] for i in (a, b, c))
        if kind == 0:
            values.append(graph.call_function(UNARY[c % 4], (x,)))
        elif kind <= 2:
            values.append(graph.call_function(BINARY[c % 4], (x, y)))
        elif kind == 3:
            parts = graph.call_function(aten.chunk.default, (x, 2))
            halves = [graph.call_function(operator.getitem, (parts, i)) for i in (b % 2, c % 2)]
            values.append(graph.call_function(aten.cat.default, (halves,)))
        elif kind == 4:
            stacked = graph.call_function(aten.stack.default, ([x, y, z],))
            values.append(graph.call_function(aten.select.int, (stacked, 0, c % 3)))
        elif kind == 5:
            row = graph.call_function(aten.narrow.default, (x, 0, b % 4, 1))
            graph.call_function(aten.copy_.default, (row, graph.call_function(aten.sum.default, (y,))))
        else:
            graph.call_function(BINARY[c % 4], (x, y))  # never read
    graph.output([values[i % len(values)] for i in outputs])
    module = fx.GraphModule(torch.nn.Module(), graph)
    inputs = [torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(n_inputs)]
    ours, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    function = emit_python(module)
    expected = fx.Interpreter(module).run(*theirs)
    assert bits(function(*ours)) == bits(expected), function.__doc__
    assert bits(ours) == bits(theirs)
    again = [t.clone() for t in inputs]
    assert bits(function(*again)) == bits(expected), "nothing is kept from one call to the next"
