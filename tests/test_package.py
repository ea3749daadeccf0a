"""The package as a whole: what importing it loads, what it exports, and what its files promise."""

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


HEAVY = ("torch", "trl", "transformers", "datasets", "accelerate", "vllm", "aiohttp", "requests", "numpy")


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
