"""A recorded graph as plain data, and back: how a recording travels to a compiler and waits on disk.

Only what a recording holds can be written: ops by name, numbers, dtypes, and small literal tensors by their bytes.
Reading looks names up in torch and runs nothing, so a graph from disk can compute something wrong at worst (its
fingerprint and a run beside the layer guard against that), never execute something else. Needs no tracing code.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["UnwritableGraph", "read_graph", "write_graph"]

_OPERATORS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        operator.add,
        operator.floordiv,
        operator.getitem,
        operator.mod,
        operator.mul,
        operator.neg,
        operator.sub,
        operator.truediv,
        torch.sym_float,
        torch.sym_int,
        torch.sym_max,
        torch.sym_min,
    )
}
_CONSTANTS: tuple[type, ...] = (torch.dtype, torch.layout, torch.memory_format)


class UnwritableGraph(Exception):
    """The graph holds something that has no written form; it stays in its process."""


def write_graph(module: fx.GraphModule) -> dict[str, Any]:
    """The graph as JSON can carry it. Raises UnwritableGraph."""
    constants: dict[str, Any] = {}
    nodes = []
    for node in module.graph.nodes:
        if node.op == "get_attr":
            constants[str(node.target)] = _write_tensor(getattr(module, str(node.target)))
        entry = {"op": node.op, "name": node.name, "target": _write_target(node)}
        entry["args"] = _write(node.args)
        entry["kwargs"] = {name: _write(value) for name, value in node.kwargs.items()}
        nodes.append(entry)
    return {"nodes": nodes, "constants": constants}


def read_graph(written: dict[str, Any]) -> fx.GraphModule:
    """The graph that ``write_graph`` wrote, names included. Raises UnwritableGraph for what it did not write."""
    try:
        return _read_graph(written)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UnwritableGraph(f"no graph: {type(error).__name__}: {error}") from error


def _read_graph(written: dict[str, Any]) -> fx.GraphModule:
    graph, named = fx.Graph(), dict[str, fx.Node]()
    for entry in written["nodes"]:
        op, name, target = entry["op"], entry["name"], entry["target"]
        args = _read(entry["args"], named)
        kwargs = {key: _read(value, named) for key, value in entry["kwargs"].items()}
        if op == "call_function":
            node = graph.create_node(op, _read_target(target), args, kwargs, name=name)
        elif op in ("placeholder", "get_attr", "output"):
            node = graph.create_node(op, target, args, kwargs, name=name)
        else:
            raise UnwritableGraph(f"a node {op!r}")
        if node.name != name:
            raise UnwritableGraph(f"a name {name!r} that torch does not keep")
        named[name] = node
    root = nn.Module()
    for name, tensor in written["constants"].items():
        root.register_buffer(name, _read_tensor(tensor), persistent=False)
    module = fx.GraphModule(root, graph)
    graph.lint()
    return module


def _write_target(node: fx.Node) -> str:
    target = node.target
    if node.op != "call_function":
        return str(target)
    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name}.{target._overloadname}"
    name = getattr(target, "__name__", "")
    if _OPERATORS.get(name) is target:
        return name
    raise UnwritableGraph(f"a call of {target}")


def _read_target(text: str) -> Callable[..., Any]:
    if "::" not in text:
        return _OPERATORS[text]
    namespace, _, rest = text.partition("::")
    name, _, overload = rest.rpartition(".")
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise UnwritableGraph(f"{text!r}, which is no op")
    return found


def _write(value: Any) -> Any:
    """Numbers and texts as themselves; everything else as a list whose first item says what it is."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return ["float", value.hex() if math.isfinite(value) else repr(value)]
    if isinstance(value, fx.Node):
        return ["node", value.name]
    if isinstance(value, tuple):
        return ["tuple", *(_write(item) for item in value)]
    if isinstance(value, list):
        return ["list", *(_write(item) for item in value)]
    if isinstance(value, slice):
        return ["slice", _write(value.start), _write(value.stop), _write(value.step)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, _CONSTANTS):
        return ["torch", str(value).removeprefix("torch.")]
    raise UnwritableGraph(f"an argument {type(value).__name__}")


def _read(value: Any, named: dict[str, fx.Node]) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "node":
        return named[rest[0]]
    if kind == "float":
        return float.fromhex(rest[0])  # reads nan and inf as well
    if kind == "tuple":
        return tuple(_read(item, named) for item in rest)
    if kind == "list":
        return [_read(item, named) for item in rest]
    if kind == "slice":
        return slice(*(_read(item, named) for item in rest))
    if kind == "device":
        return torch.device(rest[0])
    if kind == "torch":
        found = getattr(torch, rest[0])
        if isinstance(found, _CONSTANTS):
            return found
    raise UnwritableGraph(f"a value of kind {kind!r}")


def _write_tensor(tensor: Tensor) -> dict[str, Any]:
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
        raise UnwritableGraph(f"a constant {type(tensor).__name__}")
    data = tensor.detach().contiguous().flatten().view(torch.uint8).tolist() if tensor.numel() else []
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "bytes": data}


def _read_tensor(written: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, written["dtype"])
    data = torch.tensor(written["bytes"], dtype=torch.uint8)
    return data.view(dtype).reshape(written["shape"]) if data.numel() else torch.empty(written["shape"], dtype=dtype)
