"""The commands of the documentation, each parsed by the program that it calls.

A command is right if that program's own parser takes it. What cannot be asked (vLLM, pip, the tools of `make lint`) is
held to what this repository says of it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

from tests.docs_pages import ROOT


PLACEHOLDER = "..."  # stands for further arguments
# Of the trainer, where there is no GPU.
ON_A_CPU = ["--use_cpu", "true", "--bf16", "false"]
# Named in the text, without their arguments.
NAMES_OF_COMMANDS = {"trl-april serve", "trl-april report", "accelerate launch"}
# Programs whose arguments are not parsed here, and why.
UNPARSED = {
    "ruff": "make lint runs it with these arguments",
    "mypy": "make lint runs it with these arguments",
    "pytest": "make test runs it",
}


class Parsed(Exception):
    """The arguments were parsed; the program ends here."""


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block, each as its words, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        words = [word for word in shlex.split(line, comments=True) if word != PLACEHOLDER]
        if words:
            yield words


def is_command(code: str) -> bool:
    """Whether inline code is a command with arguments."""
    head, _, rest = code.partition(" ")
    return bool(rest) and code not in NAMES_OF_COMMANDS and (head in PROGRAMS or head.startswith("scripts/"))


def check(words: list[str]) -> None:
    """Fails unless the program that is called takes these arguments. The current folder is the root."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *arguments = words
    if program.startswith(("scripts/", ".ci/")):
        _check_shell_script(program, arguments)
    elif program in UNPARSED:
        return
    else:
        assert program in PROGRAMS, f"{program} is a program that the tests of the documentation do not know"
        PROGRAMS[program](arguments)


def simulates_without_files(words: list[str]) -> bool:
    """Whether this is a simulation that needs no file, and so can be run as it is."""
    return words[:2] == ["trl-april", "simulate"] and not any(Path(word).suffix == ".json" for word in words)


def _check_trl_april(arguments: list[str]) -> None:
    from trl_april.cli import build_parser
    from trl_april.server_command import server_command

    if arguments[0] == "demo":
        from trl_april.demo import main

        with pytest.raises(Parsed), _ends_when_parsed():
            main(arguments[1:])
        return
    if arguments[0] == "simulate":
        from trl_april.simulator.options import build_parser as build_simulator
        from trl_april.simulator.options import scenario_of

        options = build_simulator().parse_args(arguments[1:])
        # The values themselves, where no file has to be read for them.
        if options.doctor is None and options.log is None and options.histogram is None:
            scenario_of(options)
        return
    if arguments[0] == "report":
        from trl_april.report.command import build_parser as build_report

        build_report().parse_args(arguments[1:])
        return
    options, rest = build_parser().parse_known_args(arguments)
    if options.command == "serve":
        server_command(options.model, options.host, options.port, rest, platform="cpu")
    else:
        assert not rest, f"trl-april {options.command} does not know {rest}"


def _check_python(arguments: list[str]) -> None:
    if arguments[:1] == ["-m"]:
        check(arguments[1:])
        return
    path = ROOT / arguments[0]
    assert path.is_file(), f"there is no {arguments[0]}"
    if path.parent.name == "scripts":
        arguments = [*arguments, *ON_A_CPU]
    with pytest.raises(Parsed), _ends_when_parsed(), patch.object(sys, "argv", [str(path), *arguments[1:]]):
        load(path).main()


def load(path: Path) -> ModuleType:
    """A program of this repository as a module."""
    if path.parent.name == "benchmarks":  # which find each other by their names
        return importlib.import_module(path.stem)
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


@contextmanager
def _ends_when_parsed() -> Iterator[None]:
    """A program that parses its arguments does so, and goes no further."""
    from trl import TrlParser

    def ending(parse: Callable) -> Callable:
        def parse_and_end(self, *args, **kwargs):
            raise Parsed(parse(self, *args, **kwargs))

        return parse_and_end

    with (
        patch.object(argparse.ArgumentParser, "parse_args", ending(argparse.ArgumentParser.parse_args)),
        patch.object(TrlParser, "parse_args_and_config", ending(TrlParser.parse_args_and_config)),
    ):
        yield


def _check_shell_script(path: str, arguments: list[str]) -> None:
    assert os.access(ROOT / path, os.X_OK), f"{path} is no program"
    subprocess.run(["bash", "-n", ROOT / path], check=True)
    if path.startswith(".ci/"):
        assert not arguments
        return
    help_text = subprocess.run([ROOT / path, "--help"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"^  (--[a-z-]+)", help_text, re.MULTILINE))
    own, trainers, vllms = _three_parts(arguments)
    model, options = own[0], own[1:]
    assert not model.startswith("-"), "the model comes first"
    for option, value in zip(options[::2], options[1::2], strict=True):
        assert option in known, f"{path} has no {option}, only {sorted(known)}"
        if option == "--config":
            assert (ROOT / value).is_file(), f"there is no {value}"
    _check_python(["scripts/grpo.py", "--model_name_or_path", model, *trainers])
    _check_trl_april(["serve", model, *vllms])


def _three_parts(arguments: list[str]) -> list[list[str]]:
    """What is before the first `--`, between the two, and behind the second."""
    parts: list[list[str]] = [[]]
    for argument in arguments:
        if argument == "--" and len(parts) < 3:
            parts.append([])
        else:
            parts[-1].append(argument)
    return parts + [[]] * (3 - len(parts))


def _check_accelerate(arguments: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert arguments[0] == "launch"
    options = launch_command_parser().parse_args(arguments[1:])
    assert (ROOT / options.config_file).is_file(), f"there is no {options.config_file}"
    _check_python([options.training_script, *options.training_script_args])


def _check_sbatch(arguments: list[str]) -> None:
    while arguments[0].startswith("--"):
        option, *arguments = arguments
        assert "=" in option or option == "--requeue", f"write the option of sbatch as one word: {option}"
    _check_shell_script(arguments[0], arguments[1:])


def _check_make(arguments: list[str]) -> None:
    """What `make` would run is checked in its turn."""
    # As if everything was installed: what installs it is no concern here.
    command = ["make", "--no-print-directory", "-n", "-o", ".venv/.installed", "-o", "chromium", *arguments]
    # Nor what this very run of make was called with.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "ARGS")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for words in commands(done.stdout):
        check([words[0].removeprefix(".venv/bin/"), *words[1:]])


def _check_pip(arguments: list[str]) -> None:
    command, *rest = arguments
    assert command in ("install", "uninstall", "config")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in rest if command == "install" else []:
        name, _, extra = word.removesuffix("]").partition("[")
        if name == project["name"]:
            assert not extra or extra in project["optional-dependencies"], f"there is no extra {extra}"


def _check_vllm(arguments: list[str]) -> None:
    """A server that others start is started with the flags that ours has."""
    from trl_april.server_command import flag_name, server_command

    assert arguments[0] == "serve"
    with patch("trl_april.server_command.version", lambda name: "0.31.0"):
        ours = {flag_name(word) for word in server_command("m", "127.0.0.1", 8000, platform="gpu")}
    theirs = {flag_name(word) for word in arguments[1:]} - {None}
    assert theirs <= ours, f"trl-april serve does not set {theirs - ours}"


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "trl-april": _check_trl_april,
    "python": _check_python,
    "accelerate": _check_accelerate,
    "sbatch": _check_sbatch,
    "make": _check_make,
    "pip": _check_pip,
    "vllm": _check_vllm,
}
