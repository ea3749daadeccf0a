"""The package as a whole: loaded modules, exported names, and files of the wheel."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import trl_april


ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

HEAVY = (
    *("torch", "trl", "transformers", "datasets", "accelerate", "vllm", "aiohttp", "requests", "numpy", "pandas"),
    *("matplotlib", "tensorboard"),
)


def fresh_interpreter(program: str, *, path: Path = ROOT) -> str:
    """Run a program in a new interpreter, with warnings as errors, and return what it printed."""
    result = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", program],
        cwd=path,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


COMMAND = """from contextlib import suppress
from trl_april.cli import main
with suppress(SystemExit):
    main({arguments})
"""
FIRST_USE = """import rlcompleter, trl_april
trl_april.Pool, trl_april.Group, trl_april.ConfigError
assert rlcompleter.Completer({'trl_april': trl_april}).complete('trl_april.Lo', 0) == 'trl_april.LocalServer('
"""


@pytest.mark.parametrize(
    ("program", "others"),
    [
        ("import trl_april.pool.pool, trl_april.pool.state", ("asyncio", "socket", "http", "psutil")),
        ("import trl_april.server.local, trl_april.tuning.simulated_clock, trl_april.commands.doctor", ()),
        (COMMAND.format(arguments=["--version"]), ()),
        (COMMAND.format(arguments=["serve", "--help"]), ()),
        (FIRST_USE, ()),
    ],
)
def test_light_modules_import_no_heavy_library(program, others):
    program += f"\nimport sys; print([name for name in {(*HEAVY, *others)} if name in sys.modules])"
    assert fresh_interpreter(program).splitlines()[-1] == "[]"


def test_all_exported_names_exist():
    names: dict = {}
    exec("from trl_april import *", names)
    assert names.keys() - {"__builtins__"} == set(trl_april.__all__) <= set(dir(trl_april))
    assert names["APRILGRPOTrainer"] is trl_april.APRILGRPOTrainer
    assert not hasattr(trl_april, "no_such_name")


def test_project_has_one_version():
    assert PROJECT["version"] == trl_april.__version__
    assert f"## [{trl_april.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_pin_every_direct_dependency():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    # A line other than `name==version`, such as an address or a path, does not unpack.
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    extras = [entry for extra in ("cpu", "peft", "plots", "test") for entry in PROJECT["optional-dependencies"][extra]]
    assert {entry.split(">")[0] for entry in [*PROJECT["dependencies"], *extras]} <= pins.keys()
    assert pins["trl"].startswith("1.16.")


def test_wheel_is_complete_and_works_without_the_clone(tmp_path):
    source, unpacked = tmp_path / "source", tmp_path / "unpacked"
    shutil.copytree(ROOT / "trl_april", source / "trl_april", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    packaged = {path.relative_to(unpacked) for path in (unpacked / "trl_april").rglob("*") if path.is_file()}
    written = (path.relative_to(source) for path in (source / "trl_april").rglob("*") if path.is_file())
    assert packaged == set(written)
    assert {Path("trl_april/py.typed"), Path("trl_april/commands/report.html")} <= packaged
    program = (
        "import trl_april; from trl_april.cli import main; print(trl_april.__file__)\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0"
    )
    path, *answer = fresh_interpreter(program, path=unpacked).splitlines()
    assert Path(path).is_relative_to(unpacked) and answer[0].startswith("usage: trl-april")
