"""The package as a whole: what importing it loads, what it exports, and what its files promise."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trl_april


ROOT = Path(__file__).parent.parent


def fresh_interpreter(program: str) -> str:
    """Runs a program where nothing has been imported yet, every warning an error, and returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


HEAVY = (
    *("torch", "trl", "transformers", "datasets", "accelerate", "vllm", "aiohttp", "requests", "numpy", "pandas"),
    *("matplotlib", "tensorboard"),
)


@pytest.mark.parametrize(
    "modules",
    [
        "trl_april",
        "trl_april.types, trl_april.pool",
        "trl_april.errors",
        "trl_april.cli",
        "trl_april.server",
        "trl_april.simulator, trl_april.simulator.command",
        "trl_april.doctor, trl_april.doctor.environment, trl_april.doctor.packages",
    ],
)
def test_light_modules_stay_light(modules):
    program = f"import {modules}, sys; print([name for name in {HEAVY} if name in sys.modules])"
    assert fresh_interpreter(program) == "[]"


@pytest.mark.parametrize("arguments", ["--help", "--version", "serve --help", "doctor --help", "demo --help"])
def test_questions_to_the_command_line_are_answered_without_heavy_modules(arguments):
    program = (
        "import sys\n"
        "from trl_april.cli import main\n"
        "try:\n"
        f"    main({arguments.split()})\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    *answer, loaded = fresh_interpreter(program).splitlines()
    assert answer and loaded == "[]"


def test_the_pure_core_knows_neither_event_loops_nor_clocks():
    program = (
        "import trl_april.pool, trl_april.types, sys;"
        "print([name for name in ('asyncio', 'socket', 'http', 'psutil') if name in sys.modules])"
    )
    assert fresh_interpreter(program) == "[]"


def test_light_names_load_light_modules():
    program = (
        "import sys, trl_april;"
        "trl_april.LocalServer, trl_april.Pool, trl_april.Group, trl_april.ConfigError;"
        "print('torch' in sys.modules or 'trl' in sys.modules)"
    )
    assert fresh_interpreter(program) == "False"


@pytest.mark.parametrize("name", trl_april.__all__)
def test_every_exported_name_is_there(name):
    assert getattr(trl_april, name) is not None
    assert name in dir(trl_april)


def test_all_names_can_be_imported_at_once():
    names: dict = {}
    exec("from trl_april import *", names)
    assert names.keys() - {"__builtins__"} == set(trl_april.__all__)
    assert names["APRILGRPOTrainer"] is trl_april.APRILGRPOTrainer


def test_tab_completion_finds_names_that_are_not_loaded_yet():
    program = (
        "import rlcompleter, sys, trl_april;"
        "completer = rlcompleter.Completer({'trl_april': trl_april});"
        "found = [completer.complete('trl_april.Lo', 0), completer.complete('trl_april.Lo', 1)];"
        "print(found, 'torch' in sys.modules)"
    )
    assert fresh_interpreter(program) == "['trl_april.LocalServer(', None] False"


def test_type_checkers_know_the_names_and_no_others():
    """What is lazy at run time is imported for them; a `__getattr__` that they saw would let every name pass."""
    source = ast.parse(Path(trl_april.__file__).read_text())
    for_checkers = next(node for node in source.body if isinstance(node, ast.If) and not node.orelse)
    assert ast.unparse(for_checkers.test) == "TYPE_CHECKING"
    imported = {alias.name for node in for_checkers.body for alias in node.names}
    assert imported | {"__version__"} == set(trl_april.__all__)
    hidden = next(node for node in source.body if ast.unparse(node).startswith("if not TYPE_CHECKING:"))
    assert [node.name for node in ast.walk(source) if isinstance(node, ast.FunctionDef)] == ["__dir__", "__getattr__"]
    assert [node.name for node in hidden.body] == ["__getattr__"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        trl_april.no_such_name  # noqa: B018


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == trl_april.__version__
    assert f"## [{trl_april.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_pin_every_direct_dependency():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    # A line that is not `name==version` (an address, a path) does not unpack.
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [entry for extra in ("cpu", "peft", "plots", "test") for entry in project["optional-dependencies"][extra]]
    assert {entry.split(">")[0] for entry in [*project["dependencies"], *extras]} <= pins.keys()
    assert pins["trl"].startswith("1.16.")
