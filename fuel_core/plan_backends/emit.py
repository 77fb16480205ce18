"""Turn a recorded graph into one flat Python function.

Calling an ATen overload object from Python costs about twice what the torch function of the same name costs, so
known overloads are written as the function or method that reaches the same kernel. Anything not listed is called as
the overload itself. The values do not depend on which of the two is written; tests/test_emit.py holds both to that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["emit_python"]

# aten name (without overload) -> called as a method of its first argument, same arguments otherwise
_METHODS = frozenset(
    [
        "chunk",
        "copy_",
        "contiguous",
        "expand",
        "flatten",
        "index_copy_",
        "narrow",
        "permute",
        "reshape",
        "scatter_",
        "select",
        "squeeze",
        "t",
        "to",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
    ]
)
# aten name -> torch function with the same positional arguments
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "bmm": torch.bmm,
    "cat": torch.cat,
    "cos": torch.cos,
    "div": torch.div,
    "embedding": torch.embedding,
    "exp": torch.exp,
    "gelu": torch._C._nn.gelu,
    "linear": torch._C._nn.linear,
    "matmul": torch.matmul,
    "mean": torch.mean,
    "mm": torch.mm,
    "mul": torch.mul,
    "mv": torch.mv,
    "neg": torch.neg,
    "pow": torch.pow,
    "rms_norm": torch.rms_norm,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "silu": torch._C._nn.silu,
    "sin": torch.sin,
    "softmax": torch.softmax,
    "stack": torch.stack,
    "sub": torch.sub,
    "tanh": torch.tanh,
}
_SAFE_OVERLOADS = frozenset({"default", "Tensor", "int", "dtype", "dim", "Tensor_Scalar", "Scalar", "src", "sizes"})

# Overloads of safe names whose torch function takes other arguments, or has none.
_AS_THEMSELVES = frozenset({"bmm.dtype", "copy_.Tensor", "copy_.int", "mm.dtype"})

_INFIX = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.mod: "%",
}


def emit_python(module: fx.GraphModule) -> Callable[..., Tensor]:
    """The graph as a function of its placeholders, in order, returning its output."""
    writer = _Writer(module)
    return writer.compile()


class _Writer:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.globals: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.names: dict[fx.Node, str] = {}
        self.free: list[str] = []
        self.count = 0

    def constant(self, value: Any, hint: str) -> str:
        name = self.known.get(id(value))
        if name is None:
            name = self.known[id(value)] = f"{hint}_{len(self.globals)}"
            self.globals[name] = value
        return name

    def argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, list | tuple):
            items = ", ".join(self.argument(item) for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
        if isinstance(value, slice):
            return f"slice({self.argument(value.start)}, {self.argument(value.stop)}, {self.argument(value.step)})"
        if isinstance(value, bool | int | str) or value is None:
            return repr(value)
        return self.constant(value, "c")  # floats (inf and nan have no literal), dtypes, devices, layouts

    def call(self, node: fx.Node) -> str:
        target, args = node.target, [self.argument(a) for a in node.args]
        keywords = [f"{name}={self.argument(value)}" for name, value in node.kwargs.items()]
        if target in _INFIX and len(args) == 2 and not keywords:
            return f"{args[0]} {_INFIX[target]} {args[1]}"
        if target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
            name, overload = target._schema.name.split("::")[1], target._overloadname
            if overload in _SAFE_OVERLOADS and f"{name}.{overload}" not in _AS_THEMSELVES:
                if name in _METHODS and args:
                    return f"{args[0]}.{name}({', '.join([*args[1:], *keywords])})"
                # A third positional argument of these is alpha in ATen and another operand in the torch function.
                if name in _FUNCTIONS and not (name in ("add", "sub") and len(args) > 2):
                    function = self.constant(_FUNCTIONS[name], name)
                    return f"{function}({', '.join([*args, *keywords])})"
        # An overload's own call adds a Python frame to the function it holds.
        function = self.constant(target._op if isinstance(target, torch._ops.OpOverload) else target, "op")
        return f"{function}({', '.join([*args, *keywords])})"

    def compile(self) -> Callable[..., Tensor]:
        nodes = list(self.module.graph.nodes)
        last_use = {argument: node for node in nodes for argument in node.all_input_nodes}
        parameters: list[str] = []
        lines: list[str] = []
        for node in nodes:
            if node.op == "placeholder":
                self.names[node] = f"a{len(parameters)}"
                parameters.append(self.names[node])
                continue
            if node.op == "get_attr":
                self.names[node] = self.constant(getattr(self.module, str(node.target)), "const")
                continue
            if node.op == "output":
                lines.append(f"return {self.argument(node.args[0])}")
                break
            expression = self.call(node)
            # A name whose value was read for the last time is reused, which drops that value.
            for argument in node.all_input_nodes:
                if last_use[argument] is node and self.names[argument].startswith("t"):
                    self.free.append(self.names[argument])
            if not node.users:
                lines.append(expression)
                continue
            if self.free:
                name = self.free.pop()
            else:
                name, self.count = f"t{self.count}", self.count + 1
            self.names[node] = name
            lines.append(f"{name} = {expression}")
        source = f"def segment({', '.join(parameters)}):\n" + "\n".join(f"    {line}" for line in lines)
        exec(compile(source, "<recorded segment>", "exec"), self.globals)
        function: Callable[..., Tensor] = self.globals["segment"]
        function.__doc__ = source
        return function
