"""Finds wrong uses of TensorRT's Python API in a source file, by the real bindings: names, methods and keywords.

It follows `trt.a.b` for whatever `import tensorrt as trt` and `import tensorrt.plugin as trtp` call them. It follows
`x.method` where x is annotated with a class of TensorRT, or was assigned from one or from a method that says that it
returns one. The parameters of TensorRT's methods are in their docstrings, as pybind11 writes them.
"""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any

import tensorrt as trt
import tensorrt.plugin as trtp

from tests.contract.record_api import SIGNATURE, split

_MODULES = {"tensorrt": trt, "tensorrt.plugin": trtp}


def problems(source: str) -> list[str]:
    """Return one line, with its line number, for each name that does not exist and each keyword that is not taken."""
    tree = ast.parse(source)
    found: list[str] = []
    known = _roots(tree, found)
    if known:
        _visit(tree, known, found)
    return found


def uses(source: str) -> int:
    """Number of uses of TensorRT's names in the source."""
    tree = ast.parse(source)
    roots = _roots(tree, [])
    return sum(isinstance(node, ast.Name) and node.id in roots for node in ast.walk(tree))


def parameters(function: Any) -> list[set[str]] | None:
    """Return the parameter names of each overload of a function or class; None where they are not documented."""
    if isinstance(function, type) and function.__module__.startswith("tensorrt_bindings.tensorrt"):
        function = function.__init__
    overloads = [match["parameters"] for match in SIGNATURE.finditer(inspect.getdoc(function) or "")]
    overloads = [text for text in overloads if text != "*args, **kwargs"]
    if overloads:
        return [{part.split(":")[0].split("=")[0].strip() for part in split(text)} for text in overloads]
    try:
        return [set(inspect.signature(function).parameters)]
    except (TypeError, ValueError):
        return None


def _roots(tree: ast.AST, missing: list[str]) -> dict[str, Any]:
    """Return TensorRT's modules and members by the names that the file's imports give them."""
    roots: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in _MODULES:
                    roots[alias.asname or "tensorrt"] = _MODULES[alias.name] if alias.asname else trt
        elif isinstance(node, ast.ImportFrom) and node.module in _MODULES:
            for alias in node.names:
                if hasattr(_MODULES[node.module], alias.name):
                    roots[alias.asname or alias.name] = getattr(_MODULES[node.module], alias.name)
                else:
                    missing.append(f"line {node.lineno}: {node.module} has no {alias.name}")
    return roots


def _visit(node: ast.AST, known: dict[str, Any], found: list[str]) -> None:
    """Check a node and all nodes below it.

    known: names of the enclosing scopes, which are modules, classes, or instances (as `_Instance`).
    """
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        for argument in arguments:
            known = {key: value for key, value in known.items() if key != argument.arg}
            annotated = _resolve(argument.annotation, known, []) if argument.annotation is not None else None
            if isinstance(annotated, type):
                known[argument.arg] = _Instance(annotated)
    if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)):
        known = dict(known)
        for child in ast.walk(node):
            if isinstance(child, ast.Assign) and len(child.targets) == 1 and isinstance(child.targets[0], ast.Name):
                value = _resolve(child.value, known, [])
                if isinstance(value, _Instance):
                    known[child.targets[0].id] = value
    if isinstance(node, ast.Call):
        _check_call(node, known, found)
    if isinstance(node, ast.Attribute):
        _resolve(node, known, found)
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.Attribute) and isinstance(child, ast.Attribute):
            for below in ast.walk(child):  # the chain itself has been checked from its end
                if isinstance(below, ast.Call):
                    _visit(below, known, found)
        else:
            _visit(child, known, found)


class _Instance:
    def __init__(self, of: type) -> None:
        self.of = of


def _resolve(node: ast.AST | None, known: dict[str, Any], found: list[str]) -> Any:
    """Return the object of TensorRT that an expression stands for, an `_Instance`, or None where it is not known."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, known, found)
        if owner is None:
            return None
        place = owner.of if isinstance(owner, _Instance) else owner
        if hasattr(place, node.attr):
            return getattr(place, node.attr)
        if not isinstance(owner, _Instance) or not _has_free_attributes(place):
            found.append(f"line {node.lineno}: {ast.unparse(node)}: {place.__name__} has no {node.attr}")
        return None
    if isinstance(node, ast.Call):
        function = _resolve(node.func, known, [])
        if isinstance(function, type):
            return _Instance(function)
        for match in SIGNATURE.finditer(inspect.getdoc(function) or "") if function is not None else ():
            returned = getattr(trt, match["returns"].rsplit(".", 1)[-1], None)
            if isinstance(returned, type):
                return _Instance(returned)
    return None


def _has_free_attributes(owner: type) -> bool:
    """Whether instances are Python's own, which may have attributes that their class does not list."""
    return "__init__" in vars(owner) and isinstance(vars(owner)["__init__"], types.FunctionType)


def _check_call(node: ast.Call, known: dict[str, Any], found: list[str]) -> None:
    function = _resolve(node.func, known, [])
    if function is None or isinstance(function, _Instance):
        return
    overloads = parameters(function)
    used = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    if overloads is not None and not any(used <= names for names in overloads):
        taken = sorted(set().union(*overloads) - {"self"})
        strange = sorted(used - set(taken)) or sorted(used)
        found.append(f"line {node.lineno}: {ast.unparse(node.func)} takes no {', '.join(strange)} (of {taken})")
