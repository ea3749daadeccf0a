"""The commands and snippets of the documentation: arguments and names that their programs and libraries know."""

import argparse
import ast
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import dropwhile, groupby
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.docs_pages import ROOT


ON_A_CPU = ["--use_cpu", "true", "--bf16", "false"]  # GRPOConfig refuses its default, bf16, without a GPU
# Programs of others, whose arguments are not checked.
NOT_PARSED = {"ruff", "mypy", "lint-imports", "pre-commit", "pytest", "build", "pip"}


class Parsed(Exception):
    """The arguments were parsed; the program stops here."""


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block as lists of words, without comments and without `...`."""
    for line in text.replace("\\\n", " ").splitlines():
        words = [word for word in shlex.split(line, comments=True) if word != "..."]
        if words:
            yield words


def is_command(code: str) -> bool:
    """Whether inline code is a command with arguments that can be checked."""
    head, *rest = code.split()
    if code.split()[:2] in (["trl-april", "serve"], ["trl-april", "report"], ["accelerate", "launch"]):
        rest = rest[1:]  # often named without arguments
    return bool(rest) and "--help" not in rest and (head in PROGRAMS or head.startswith("scripts/"))


def check(words: list[str]) -> None:
    """Fail unless the called program accepts these arguments."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *arguments = words
    if program.startswith(("scripts/", ".ci/")):
        check_script(program, arguments)
    elif program not in NOT_PARSED:
        assert program in PROGRAMS, f"tests/support/docs_commands.py does not know the program {program}"
        PROGRAMS[program](arguments)


def load(path: Path) -> ModuleType:
    """Import a program of this repository."""
    if path.parent.name == "benchmarks":  # on the path of the tests, and they import each other
        return importlib.import_module(path.stem)
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve their annotations there
    spec.loader.exec_module(module)
    return module


@contextmanager
def stopped_after_parsing() -> Iterator[None]:
    from trl import TrlParser

    def stopping(parse: Callable) -> Callable:
        def parse_and_stop(*args, **kwargs):
            raise Parsed(parse(*args, **kwargs))

        return parse_and_stop

    with (
        patch.object(argparse.ArgumentParser, "parse_args", stopping(argparse.ArgumentParser.parse_args)),
        patch.object(TrlParser, "parse_args_and_config", stopping(TrlParser.parse_args_and_config)),
        pytest.raises(Parsed),
    ):
        yield


def check_trl_april(arguments: list[str]) -> None:
    from trl_april.commands.serve import build_parser as build_serve_parser
    from trl_april.server.command_line import server_command

    name, *rest = arguments
    if name == "serve":
        options, vllm_args = build_serve_parser().parse_known_args(rest)
        server_command(options.model, options.host, options.port, vllm_args, platform="cpu")
    else:
        on_a_cpu = ON_A_CPU if name == "grpo" else []
        with stopped_after_parsing():
            importlib.import_module(f"trl_april.commands.{name}").main([*rest, *on_a_cpu])


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        if importlib.util.find_spec(arguments[1]) is None or len(arguments) > 2:
            check(arguments[1:])
        return
    path = ROOT / arguments[0]
    on_a_cpu = ON_A_CPU if path.parent.name == "scripts" else []
    with patch.object(sys, "argv", [str(path), *arguments[1:], *on_a_cpu]), stopped_after_parsing():
        load(path).main()


def check_script(path: str, arguments: list[str]) -> None:
    """A launcher's options are those of its --help; then come arguments of scripts/grpo.py, and flags of vLLM."""
    assert os.access(ROOT / path, os.X_OK), f"{path} is not executable"
    if not arguments:
        return
    usage = subprocess.run([ROOT / path, "--help"], capture_output=True, text=True, check=True).stdout
    known = re.findall(r"^  (--[a-z-]+)", usage, re.MULTILINE)
    (model, *options), *rest = split(arguments)
    for option, value in zip(options[::2], options[1::2], strict=True):
        assert option in known, f"{path} has no option {option}, only {known}"
        assert option != "--config" or (ROOT / value).is_file(), f"{value} does not exist"
    check_python(["scripts/grpo.py", "--model_name_or_path", model, *(rest[0] if rest else [])])
    check_trl_april(["serve", model, *(rest[1] if len(rest) > 1 else [])])


def split(arguments: list[str]) -> list[list[str]]:
    """Split at each `--`."""
    parts = [[*words] for _, words in groupby(arguments, lambda word: word == "--")]
    return parts[::2]


def check_accelerate(arguments: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser().parse_args(arguments[1:])
    assert (ROOT / options.config_file).is_file(), options.config_file
    check_python([options.training_script, *options.training_script_args])


def check_make(arguments: list[str]) -> None:
    """Check the commands of a target, except the installation."""
    versions = [word.removeprefix("VLLM=") for word in arguments if word.startswith("VLLM=")]
    installed = [".venv/.installed", *(f".venv-vllm-{version}/.installed" for version in versions)]
    old = [word for name in installed for word in ("-o", name)]
    command = ["make", "--no-print-directory", "-n", *old, *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "ARGS")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    for words in commands(re.sub(r"\.venv[\w.-]*/bin/", "", done.stdout)):
        check(words)


def check_vllm(arguments: list[str]) -> None:
    """A server started without `trl-april serve` gets flags that `trl-april serve` sets, too."""
    from trl_april.server.command_line import flag_name, server_command

    with patch("trl_april.server.command_line.version", lambda name: "0.31.0"):
        ours = {flag_name(word) for word in server_command("m", "127.0.0.1", 8000, platform="gpu")}
    theirs = {flag_name(word) for word in arguments[1:]} - {None}
    assert theirs <= ours, f"trl-april serve does not set {theirs - ours}"


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "trl-april": check_trl_april,
    "python": check_python,
    "accelerate": check_accelerate,
    "sbatch": lambda arguments: check([*dropwhile(lambda word: word.startswith("--"), arguments)]),
    "make": check_make,
    "vllm": check_vllm,
}


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
