"""The probe's log: bound integers stay unread, equal logs mean equal segments, weights are named by first use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuel_core.errors import RecordingError
from fuel_core.plan_backends.probe import BoundInt, ProbeLog, _BoundIntRead, probe

# -- bound integers ------------------------------------------------------------------------------------------------

COMPUTES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "add": (lambda n: n + 2, 93),
    "radd": (lambda n: 2 + n, 93),
    "sub": (lambda n: n - 2, 89),
    "rsub": (lambda n: 100 - n, 9),
    "mul": (lambda n: n * 3, 273),
    "rmul": (lambda n: 3 * n, 273),
    "floordiv": (lambda n: n // 2, 45),
    "mod": (lambda n: n % 2, 1),
    "neg": (lambda n: -n, -91),
    "pos": (lambda n: +n, 91),
    "with another": (lambda n: n - (n - 5), 5),
}

READS: dict[str, Callable[[Any], Any]] = {
    "lt": lambda n: n < 5,
    "le": lambda n: n <= 5,
    "gt": lambda n: n > 5,
    "ge": lambda n: n >= 5,
    "eq": lambda n: n == 91,
    "ne": lambda n: n != 91,
    "reflected": lambda n: 91 == n,  # noqa: SIM300
    "if": lambda n: 1 if n else 2,
    "not": lambda n: not n,
    "min": lambda n: min(n, 64),
    "max": lambda n: max(64, n),
    "int": int,
    "float": float,
    "round": round,
    "sqrt": math.sqrt,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "truediv": lambda n: n / 2,
    "rtruediv": lambda n: 2 / n,
    "rfloordiv": lambda n: 1000 // n,
    "rmod": lambda n: 1000 % n,
    "divmod": lambda n: divmod(n, 2),
    "rdivmod": lambda n: divmod(1000, n),
    "pow": lambda n: n**2,
    "rpow": lambda n: 2**n,
    "abs": abs,
    "shift": lambda n: n << 1,
    "rshift": lambda n: n >> 1,
    "and": lambda n: n & 1,
    "rand": lambda n: 1 & n,
    "or": lambda n: n | 1,
    "xor": lambda n: n ^ 1,
    "invert": lambda n: ~n,
    "bit_length": lambda n: n.bit_length(),
    "in a set": lambda n: n in {5, 91},
    "in a list": lambda n: n in [5, 91],
    "as a key": lambda n: {91: "a"}.get(n),
}


@pytest.mark.parametrize("name", COMPUTES)
def test_a_bound_integer_computes_and_stays_bound(name: str) -> None:
    operation, value = COMPUTES[name]
    result = operation(BoundInt(91))
    assert type(result) is BoundInt
    assert int.__index__(result) == value


@pytest.mark.parametrize("name", READS)
def test_a_bound_integer_refuses_to_be_looked_at(name: str) -> None:
    with pytest.raises(_BoundIntRead):
        READS[name](BoundInt(91))


def test_a_bound_integer_is_taken_by_torch_as_the_number_it_stands_for() -> None:
    buffer, n = torch.arange(200.0), BoundInt(91)
    assert buffer.narrow(0, n, 1).item() == 91
    assert buffer[n].item() == 91
    assert buffer[: n + 1].shape == (92,)
    assert torch.equal(torch.ones(2) * n, torch.full((2,), 91.0))
    assert torch.equal(n * torch.ones(2), torch.full((2,), 91.0)), "the tensor's turn comes when the integer is first"
    assert torch.equal(n + torch.ones(2), torch.full((2,), 92.0))
    assert torch.equal(n - torch.ones(2), torch.full((2,), 90.0))
    assert torch.arange(n).shape == (91,)


# -- the log ---------------------------------------------------------------------------------------------------------

Call = Callable[[Mapping[str, Tensor], Mapping[str, int]], Tensor]


def log_of(call: Callable[..., Tensor], *weights: Tensor, n: int = 91, h: Tensor | None = None) -> ProbeLog:
    inputs = {"h": torch.linspace(-1, 1, 6).view(2, 3) if h is None else h, "g": torch.ones(2, 3)}
    return probe(
        lambda t, s: call(t["h"], t["g"], s["n"]), inputs, {"n": n}, {id(w): w for w in weights}, "toy::layer 0"
    )


def with_float(value: float) -> Callable[..., Tensor]:
    return lambda h, g, n: torch.full_like(h, value)


DIFFERENT: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "ops": (lambda h, g, n: h.sin(), lambda h, g, n: h.cos()),
    "inputs": (lambda h, g, n: h + 1, lambda h, g, n: g + 1),
    "order of operands": (lambda h, g, n: h - g, lambda h, g, n: g - h),
    "an earlier value": (lambda h, g, n: (a := h.sin()).cos() + a, lambda h, g, n: (a := h.sin()).cos() + h + 0 * a),
    "the returned value": (lambda h, g, n: (h.sin(), h.cos())[0], lambda h, g, n: (h.sin(), h.cos())[1]),
    "an int and a bool": (lambda h, g, n: torch.full_like(h, 1), lambda h, g, n: torch.full_like(h, True)),
    "an int and a float": (with_float(1), with_float(1.0)),
    "the sign of zero": (with_float(0.0), with_float(-0.0)),
    "infinities": (with_float(math.inf), with_float(-math.inf)),
    "nan and a number": (with_float(math.nan), with_float(0.0)),
    "the last bit": (with_float(0.1), with_float(math.nextafter(0.1, 1))),
    "literals": (lambda h, g, n: h * torch.tensor(2.0), lambda h, g, n: h * torch.tensor(3.0)),
    "the dtype of a literal": (
        lambda h, g, n: h * torch.tensor(2.0),
        lambda h, g, n: h * torch.tensor(2.0, dtype=torch.float64),
    ),
    "the sign of a literal zero": (lambda h, g, n: h * torch.tensor(0.0), lambda h, g, n: h * torch.tensor(-0.0)),
    "nesting": (lambda h, g, n: torch.cat([h, g, h]), lambda h, g, n: torch.cat([torch.cat([h, g]), h])),
    "a keyword": (lambda h, g, n: torch.sum(h, 0, keepdim=True), lambda h, g, n: torch.sum(h, 0).unsqueeze(0)),
    "dtypes": (lambda h, g, n: h.to(torch.float64), lambda h, g, n: h.to(torch.bfloat16)),
    "an output of several": (lambda h, g, n: h.chunk(3, 1)[0], lambda h, g, n: h.chunk(3, 1)[1]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_segments_that_differ_have_different_logs(name: str) -> None:
    one, other = DIFFERENT[name]
    assert log_of(one).ops == log_of(one).ops, "and each equals itself"
    assert hash(log_of(one).ops) == hash(log_of(one).ops)
    assert log_of(one).ops != log_of(other).ops


@pytest.mark.parametrize("value", [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324])
def test_every_float_equals_itself_in_a_log(value: float) -> None:
    """Also a nan that was computed anew: or every model with one would be recorded for itself."""
    assert log_of(with_float(value)).ops == log_of(with_float(float(str(value)))).ops


def test_logs_do_not_depend_on_values() -> None:
    def call(h: Tensor, g: Tensor, n: int) -> Tensor:
        return torch.softmax(h.narrow(1, 0, 2) @ h.T[:2], -1) + n

    assert log_of(call).ops == log_of(call, h=torch.full((2, 3), math.nan)).ops
    weight = nn.Parameter(torch.randn(3))
    other = nn.Parameter(torch.randn(3))
    assert log_of(lambda h, g, n: h * weight, weight).ops == log_of(lambda h, g, n: h * other, other).ops


def test_a_value_read_back_does_not_reach_the_log() -> None:
    """Routing: each layer, and each token, picks another row; the structure is one."""
    w = nn.Parameter(torch.randn(4, 3))

    def call(h: Tensor, g: Tensor, n: int) -> Tensor:
        return h * w.select(0, int(h.argmax().item()) % 4)

    high, low = torch.zeros(2, 3), torch.zeros(2, 3)
    high[0, 0], low[1, 2] = 1.0, 1.0
    assert log_of(call, w, h=high).ops == log_of(call, w, h=low).ops


# -- weights -----------------------------------------------------------------------------------------------------------


def test_weights_are_named_by_first_use_and_are_the_very_objects() -> None:
    a, b, c = (nn.Parameter(torch.randn(3)) for _ in range(3))
    log = log_of(lambda h, g, n: h * b + a * b, a, b, c)
    assert [id(w) for w in log.weights] == [id(b), id(a)]
    swapped = log_of(lambda h, g, n: h * a + b * a, a, b, c)
    assert swapped.ops == log.ops, "the same to other weights"
    assert [id(w) for w in swapped.weights] == [id(a), id(b)]


def test_one_weight_used_twice_is_not_two_equal_weights() -> None:
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    assert log_of(lambda h, g, n: h * a + a, a, b).ops != log_of(lambda h, g, n: h * a + b, a, b).ops


@pytest.mark.parametrize(
    "other",
    [
        nn.Parameter(torch.randn(3, 3, dtype=torch.float64)),
        nn.Parameter(torch.randn(3, 3).T),
        nn.Parameter(torch.randn(1, 3)),
    ],
    ids=["dtype", "strides", "shape"],
)
def test_weights_of_another_layout_are_another_structure(other: nn.Parameter) -> None:
    one = nn.Parameter(torch.randn(3, 3))

    def length(w: Tensor) -> Callable[..., Tensor]:
        return lambda h, g, n: h * w.sum()

    assert log_of(length(one), one).ops != log_of(length(other), other).ops


def test_a_tensor_nobody_registered_is_refused_whatever_its_size() -> None:
    """Written to later, it would not be followed; another model that shares the recording would follow."""
    for size in (1, 3, 300):
        loose = torch.ones(size)
        with pytest.raises(RecordingError, match=r"toy::layer 0.*register_buffer"):
            log_of(lambda h, g, n, loose=loose: h.sum() * loose)


def test_a_weight_reached_past_autograd_is_still_that_weight() -> None:
    weight = nn.Parameter(torch.ones(3))
    for reach in (lambda: weight.data, weight.detach):
        log = log_of(lambda h, g, n, reach=reach: h * reach(), weight)
        assert [id(w) for w in log.weights] == [id(weight)]


def test_a_literal_of_the_code_is_part_of_the_structure_up_to_a_size() -> None:
    assert log_of(lambda h, g, n: h * torch.tensor([1.0, 2.0, 3.0])).weights == ()
    with pytest.raises(RecordingError, match="register_buffer"):
        log_of(lambda h, g, n: h.sum() * torch.tensor([1.0] * 65))


def test_a_read_integer_is_refused_naming_the_place() -> None:
    for read in (lambda n: n > 4, lambda n: n / 2, lambda n: int(n)):
        with pytest.raises(RecordingError, match=r"toy::layer 0.*plan='off'"):
            log_of(lambda h, g, n, read=read: h * (1.0 if read(n) else 2.0))


def test_other_errors_of_a_layer_come_out_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError):
        log_of(lambda h, g, n: h * (1 / 0))
    with pytest.raises(RuntimeError, match="shapes"):
        log_of(lambda h, g, n: h @ h)
