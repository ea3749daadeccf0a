"""A check of Python snippets that need a server: their imports, calls and attributes exist."""

import ast
import inspect
from typing import Any


def check_names(source: str, classes: dict[str, type]) -> None:
    """Fail if a snippet imports, calls or reads something that does not exist, without running the snippet.

    `classes` are those of the variables that the snippet uses without assigning them.
    """
    tree = ast.parse(source)
    imported: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), "snippet", "exec"), imported)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in classes:
            assert hasattr(classes[node.value.id], node.attr), ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg is not None}
            inspect.signature(imported[node.func.id]).bind_partial(*node.args, **keywords)
