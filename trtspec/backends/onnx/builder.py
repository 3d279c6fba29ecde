"""A writer of ONNX functions: `body.Gather(table, rows, axis=0)` appends a node to a body and returns its result.

onnxscript's decorator reads Python source, so it cannot assemble one body from several typed Python functions. Here a
helper is a Python function that appends nodes to the body, or the branch of an `If`, that is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

DOMAIN = "trtspec"
OPSET = 21
"""Oldest opset of the main domain for the bodies. The operators that they use have not changed meaning since."""


@dataclass(frozen=True)
class Value:
    """A result in a body. Python numbers as other operands become constants: an int is int64, a float is float32."""

    body: Body
    name: str

    def __add__(self, other: Value | float) -> Value:
        return self.body.Add(self, other)

    def __sub__(self, other: Value | float) -> Value:
        return self.body.Sub(self, other)

    def __rsub__(self, other: float) -> Value:
        return self.body.Sub(other, self)

    def __mul__(self, other: Value | float) -> Value:
        return self.body.Mul(self, other)

    def __truediv__(self, other: Value | float) -> Value:
        return self.body.Div(self, other)

    def __floordiv__(self, other: Value | int) -> Value:
        """Divide integers that are not negative, because ONNX rounds towards zero."""
        return self.body.Div(self, other)

    def __mod__(self, other: Value | int) -> Value:
        """Remainder as in Python, with the sign of the divisor."""
        return self.body.Mod(self, other)

    def __neg__(self) -> Value:
        return self.body.Neg(self)

    def __lt__(self, other: Value | float) -> Value:
        return self.body.Less(self, other)

    def __le__(self, other: Value | float) -> Value:
        return self.body.LessOrEqual(self, other)

    def __gt__(self, other: Value | float) -> Value:
        return self.body.Greater(self, other)

    def __ge__(self, other: Value | float) -> Value:
        return self.body.GreaterOrEqual(self, other)

    def __and__(self, other: Value) -> Value:
        """Logical and of booleans; `BitwiseAnd` is for integers."""
        return self.body.And(self, other)

    def __or__(self, other: Value) -> Value:
        return self.body.Or(self, other)

    def __invert__(self) -> Value:
        return self.body.Not(self)

    def to(self, dtype: int) -> Value:
        """Cast to a TensorProto data type; the values of float16 and similar types are converted, not their bits."""
        return self.body.Cast(self, to=dtype)

    def int64(self) -> Value:
        return self.to(TensorProto.INT64)

    def float32(self) -> Value:
        return self.to(TensorProto.FLOAT)

    def dim(self, axis: int) -> Value:
        """Size of one axis, [1] int64."""
        return self.body.Shape(self, start=axis, end=axis + 1)

    def inner_dim(self, axis: int) -> Value:
        """Size of an axis other than the first, [1] int64. The first axis must not be empty.

        ONNX Runtime turns the size into a constant only if it knows all sizes of the tensor. So the first axis is
        removed before.
        """
        return self.body.Gather(self, 0, axis=0).dim(axis - 1)

    def at(self, *axes: int) -> Value:
        """Insert axes of size 1. axes: their indices in the result."""
        return self.body.Unsqueeze(self, list(axes))

    def reshape(self, *sizes: Value | int) -> Value:
        """Reshape to sizes that are [1] int64 values or numbers; one of them may be -1."""
        if all(isinstance(size, int) for size in sizes):
            return self.body.Reshape(self, list(sizes))
        parts = [[size] if isinstance(size, int) else size for size in sizes]
        return self.body.Reshape(self, parts[0] if len(parts) == 1 else self.body.Concat(*parts, axis=0))

    def permute(self, *axes: int) -> Value:
        return self.body.Transpose(self, perm=list(axes))

    def slice(self, start: Value | int, end: Value | int, axis: int) -> Value:
        """Slice one axis; the bounds are [1] int64 values or numbers."""
        bounds = [[bound] if isinstance(bound, int) else bound for bound in (start, end)]
        return self.body.Slice(self, *bounds, [axis])

    def sum(self, axis: int, keep: bool = False) -> Value:
        return self.body.ReduceSum(self, [axis], keepdims=int(keep))

    def max(self, axis: int, keep: bool = False) -> Value:
        return self.body.ReduceMax(self, [axis], keepdims=int(keep))

    def any(self) -> Value:
        """Whether at least one of its booleans is true, a scalar; false if there are none."""
        return self.body.ReduceSum(self.int64(), keepdims=0) > 0


Operand = Value | float | Sequence[int]
Results = tuple[Value, ...]


class Body:
    """An ONNX function being written, in domain `trtspec`. Each op of the main domain is a method with its name."""

    def __init__(
        self, name: str, inputs: Sequence[str], attributes: Sequence[str] = (), absent: Collection[str] = ()
    ) -> None:
        """Begin a body. absent: inputs that the body lacks, as a function cannot test for the presence of an input."""
        self.name = name
        self.inputs = tuple(Value(self, one) for one in inputs)
        self._absent = absent
        self._attributes = attributes
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], tuple[Value, NodeProto]] = {}
        self._nodes: list[NodeProto] = []  # nodes of the innermost branch that is being written
        self._count = 0

    def has(self, value: Value) -> bool:
        """Whether the body has this input."""
        return value.name not in self._absent

    def __getattr__(self, op_type: str) -> Callable[..., Value]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)

        def append(*operands: Operand, **attributes: Any) -> Value:
            return self.op(op_type, *operands, **attributes)[0]

        return append

    def op(self, op_type: str, *operands: Operand, outputs: int = 1, **attributes: Any) -> Results:
        """Append a node of the main domain and return its results."""
        results = tuple(self._value(op_type) for _ in range(outputs))
        inputs = [self.value(operand).name for operand in operands]
        node = helper.make_node(op_type, inputs, [result.name for result in results], **attributes)
        self._nodes.append(node)
        return results

    def value(self, operand: Operand) -> Value:
        """Return an operand as a value; a number or a list of ints becomes a constant."""
        if isinstance(operand, Value):
            return operand
        dtype = np.float32 if isinstance(operand, float) else np.int64
        return self.constant(np.array(operand, dtype))

    def constant(self, array: np.ndarray) -> Value:
        """Return a constant of the array's shape and dtype. Equal constants of a branch are one value.

        Each branch has its own constants. ONNX Runtime merges equal work of two functions only if it detects that their
        constants are equal. It tries this only for single numbers that no branch uses.
        """
        key = (array.dtype.str, array.tobytes(), array.shape)
        if key not in self._constants:
            value = self._value("constant")
            node = helper.make_node("Constant", [], [value.name], value=numpy_helper.from_array(array))
            self._constants[key] = value, node
        return self._constants[key][0]

    def attribute(self, name: str, kind: AttributeProto.AttributeType) -> Value:
        """Return an attribute of the function, FLOAT or INT, as a scalar, float32 or int64."""
        field = {AttributeProto.FLOAT: "value_float", AttributeProto.INT: "value_int"}[kind]
        value = self._value(name)
        node = helper.make_node("Constant", [], [value.name])
        node.attribute.append(AttributeProto(name=field, ref_attr_name=name, type=kind))
        self._nodes.append(node)
        return value

    def arange(self, count: Value) -> Value:
        """Return 0 .. count - 1, int64; count is [1] int64."""
        return self.Range(0, self.Squeeze(count, [0]), 1)

    def when(self, condition: Value, then: Callable[[], Results], otherwise: Callable[[], Results]) -> Results:
        """Append an `If` on one boolean of shape [] or [1]. Both branches return the same number of results."""
        branches = [self._branch(kind, then if kind == "then" else otherwise) for kind in ("then", "else")]
        return self.op(
            "If", condition, outputs=len(branches[0].output), then_branch=branches[0], else_branch=branches[1]
        )

    def maybe(self, condition: Value, value: Value, change: Callable[[], Value]) -> Value:
        """Return change() if the condition holds, else `value` unchanged."""
        return self.when(condition, lambda: (change(),), lambda: (value,))[0]

    def loop(self, count: Value, carried: Value, step: Callable[[Value, Value], Value]) -> Value:
        """Append a `Loop`: carried = step(i, carried) for i < count, int64 scalars. Return the last carried."""
        index, old, going = self._value("i"), self._value("carried"), self._value("going")
        # ONNX Runtime requires that two of the inputs are declared as scalars. `carried` may change its shape.
        inputs = [
            helper.make_tensor_value_info(index.name, TensorProto.INT64, []),
            helper.make_tensor_value_info(going.name, TensorProto.BOOL, []),
            helper.make_empty_tensor_value_info(old.name),
        ]
        graph = self._branch("loop", lambda: (self.Identity(going), step(index, old)), inputs)
        return self.op("Loop", count, self.constant(np.array(True)), carried, body=graph)[0]

    def function(self, outputs: Sequence[Value], names: Sequence[str]) -> FunctionProto:
        """Return the finished function. names: names of its outputs."""
        for value, name in zip(outputs, names, strict=True):
            _rename(self._nodes, value.name, name)
        return helper.make_function(
            DOMAIN,
            "_".join([self.name, *(["without", *sorted(self._absent)] if self._absent else [])]),
            [value.name for value in self.inputs if self.has(value)],
            list(names),
            self._written(),
            [helper.make_opsetid("", OPSET)],
            list(self._attributes),
        )

    def _value(self, hint: str) -> Value:
        self._count += 1
        return Value(self, f"{hint.lower()}_{self._count}")

    def _written(self) -> list[NodeProto]:
        """Nodes of the innermost branch, constants first."""
        return [*(node for _, node in self._constants.values()), *self._nodes]

    def _branch(self, name: str, write: Callable[[], Results], inputs: Sequence[ValueInfoProto] = ()) -> GraphProto:
        """Return a subgraph of what `write` appends. Its results are copies, because they must be values of its own."""
        outer, self._nodes, self._constants = (self._nodes, self._constants), [], {}
        results = [self.Identity(value) for value in write()]
        nodes = self._written()
        self._nodes, self._constants = outer
        outputs = [helper.make_empty_tensor_value_info(value.name) for value in results]  # types are inferred
        return helper.make_graph(nodes, name, inputs, outputs)


def _rename(nodes: Sequence[NodeProto], old: str, new: str) -> None:
    """Rename a value wherever nodes and their branches name it."""
    for node in nodes:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == old:
                    names[i] = new
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _rename(cast("Sequence[NodeProto]", attribute.g.node), old, new)
