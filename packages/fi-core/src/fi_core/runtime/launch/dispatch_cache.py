"""Programs of dispatch caches: the facts that `Op.read` reads of a call, as fi/host/dispatch_cache.h reads them."""

from __future__ import annotations

import ast
from enum import IntEnum
from typing import Any

from fi_core.runtime.spec.op import Op


class Fact(IntEnum):
    """Of an argument; `Fact` of dispatch_cache.h."""

    VALUE = 0
    GIVEN = 1  # whether a tensor is given
    DTYPE = 2
    RANK = 3
    SIZE = 4  # of an axis
    SHAPE_FROM = 5  # an axis on
    STRIDE = 6  # of an axis
    STRIDES = 7
    ADDRESS = 8  # some bits of it


_ATTRIBUTES = {"dtype": Fact.DTYPE, "ndim": Fact.RANK, "shape": Fact.SHAPE_FROM}
_FUNCTIONS = ("max", "min", "tuple")


def program(op: Op) -> list[int]:
    """Three integers for each fact from which `op.read` is computed: the argument, a Fact and its operand.

    Raises:
        ValueError: op.read reads what is no fact, so that calls with the same facts could need different kernels.
    """
    reader = _Reader(op)
    reader.visit(ast.parse(f"({op.read},)", mode="eval"))
    return [word for fact in reader.facts for word in fact]


def _constant(node: ast.AST) -> int | None:
    """The value of an integer literal; None for other expressions."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int) else None


class _Reader(ast.NodeVisitor):
    """Collects the facts of an expression, each once."""

    def __init__(self, op: Op) -> None:
        self.op = op
        native = [argument for argument in op.parsed if argument.native]
        self.places = {argument.name: i for i, argument in enumerate(native)}
        self.tensors = {argument.name for argument in native if argument.kind.startswith("Tensor")}
        self.facts: dict[tuple[int, int, int], None] = {}

    def add(self, name: str, fact: Fact, operand: int = 0) -> None:
        self.facts[self.places[name], int(fact), operand] = None

    def refuse(self, node: ast.AST) -> None:
        raise ValueError(
            f"{self.op.name}: read must consist of numbers and of dtype, ndim, shape, stride(), numel() and bits of "
            f"data_ptr() of tensors; got {ast.unparse(node)}"
        )

    def member(self, node: ast.AST) -> tuple[str, str]:
        """("x", "shape") of `x.shape` for a tensor x; else two empty words."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.tensors:
            return node.value.id, node.attr
        return "", ""

    def visit_Name(self, node: ast.Name) -> None:
        if node.id not in self.places:
            self.refuse(node)
        self.add(node.id, Fact.GIVEN if node.id in self.tensors else Fact.VALUE)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name, attribute = self.member(node)
        if attribute not in _ATTRIBUTES:
            self.refuse(node)
        self.add(name, _ATTRIBUTES[attribute])

    def visit_Compare(self, node: ast.Compare) -> None:
        """Tensors are compared with None only: `x is y is None` holds if both are."""
        operands: list[Any] = [node.left, *node.comparators]
        tensors = any(isinstance(x, ast.Name) and x.id in self.tensors for x in operands)
        if tensors and not (isinstance(operands[-1], ast.Constant) and operands[-1].value is None):
            self.refuse(node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """`x.shape[-1]` and `tuple(x.shape)[1:]`."""
        inner = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
        name, attribute = self.member(inner)
        if isinstance(node.slice, ast.Slice):
            begin = _constant(node.slice.lower) if node.slice.lower and not node.slice.upper else None
            fact = Fact.SHAPE_FROM
        else:
            begin, fact = _constant(node.slice), Fact.SIZE
        if attribute == "shape" and begin is not None:
            self.add(name, fact, begin)
        else:
            self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """`(x.data_ptr() | y.data_ptr()) & 15`."""
        bits = _constant(node.right)
        addresses = self.addresses(node.left) if isinstance(node.op, ast.BitAnd) and bits is not None else None
        for name in addresses or ():
            self.add(name, Fact.ADDRESS, bits or 0)
        if not addresses:
            self.generic_visit(node)

    def addresses(self, node: ast.AST) -> list[str] | None:
        """The tensors whose addresses an expression joins by `|`; None for another expression."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            left, right = self.addresses(node.left), self.addresses(node.right)
            return left + right if left and right else None
        name, attribute = self.member(node.func) if isinstance(node, ast.Call) else ("", "")
        return [name] if attribute == "data_ptr" else None

    def visit_Call(self, node: ast.Call) -> None:
        name, method = self.member(node.func)
        if method == "stride" and not node.args:
            self.add(name, Fact.STRIDES)
        elif method == "stride" and (axis := _constant(node.args[0])) is not None:
            self.add(name, Fact.STRIDE, axis)
        elif method == "numel":
            self.add(name, Fact.SHAPE_FROM)
        elif isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords:
            for argument in node.args:
                self.visit(argument)
        else:
            self.refuse(node)
