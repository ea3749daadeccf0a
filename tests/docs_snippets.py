"""The Python of the documentation: run where that is cheap, and otherwise held to the classes that it uses."""

from __future__ import annotations

import ast
import builtins
import doctest
import inspect
from typing import Any


# What a snippet may take for granted.
GIVEN = {"dataset", "my_reward", "url", "model"}
NEEDS_A_SERVER = {"LocalServer", "APRILGRPOTrainer", "trainer", "server"}


def source_of(text: str) -> str:
    """The code of a block, without the prompts of an interpreter."""
    return doctest.script_from_examples(text) if text.startswith(">>>") else text


def names_in(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


class Checker(ast.NodeVisitor):
    """Looks whether imports, calls and attributes of a snippet exist, without running it.

    Args:
        classes (`dict[str, type]`):
            Of the names that a snippet may use without making them.
    """

    def __init__(self, classes: dict[str, type]) -> None:
        self.known: dict[str, Any] = {}  # imported
        self.classes = dict(classes)  # of variables
        self.bound = set(dir(builtins)) | GIVEN | set(classes)

    def check(self, source: str) -> None:
        self.visit(ast.parse(source))

    def visit_Import(self, node: ast.Import) -> None:
        self._import(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._import(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        exec(compile(ast.Module([node], []), "snippet", "exec"), self.known)
        self.bound |= set(self.known)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, item.context_expr)
        for statement in node.body:
            self.visit(statement)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        self.bound |= names_in(target)
        if isinstance(target, ast.Name):
            made = self._object(value.func) if isinstance(value, ast.Call) else None
            if inspect.isclass(made):
                self.classes[target.id] = made

    def visit_Lambda(self, node: ast.Lambda) -> None:
        arguments = [*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        self.bound |= {argument.arg for argument in arguments if argument is not None}
        self.visit(node.body)

    def visit_For(self, node: ast.For) -> None:
        self.bound |= names_in(node.target)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        for generator in node.generators:
            self.visit(generator.iter)
            self.bound |= names_in(generator.target)
        self.visit(node.elt)

    def visit_Name(self, node: ast.Name) -> None:
        assert node.id in self.bound, f"{node.id} is used, but nothing says what it is"

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        owner = self.classes.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if owner is not None:
            assert hasattr(owner, node.attr), f"{owner.__name__} has no {node.attr}"

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = self._object(node.func)
        if called is None or called in vars(builtins).values():
            return
        keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
        try:
            inspect.signature(called).bind_partial(*node.args, **keywords)
        except TypeError as error:
            raise AssertionError(f"{ast.unparse(node.func)}: {error}") from error

    def _object(self, node: ast.expr) -> Any:
        """What an expression stands for, `None` where that is not known."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self.classes.get(node.value.id)
            method = getattr(owner, node.attr, None)
            # Bound to some instance: the signature without `self`.
            return method.__get__(object()) if inspect.isfunction(method) else None
        return None
