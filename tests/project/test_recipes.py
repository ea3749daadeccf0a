"""Recipes of `trl-april grpo`: values of the papers with their sources."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.docs_pages import ROOT
from trl_april.commands.grpo import RECIPES, make_parser
from trl_april.config import AprilOptions
from trl_april.pool.staleness import check_bound


NAMES = list(RECIPES)
REQUIRED = ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]
SOURCE = re.compile(
    r"section \d|eq\. \d|github\.com/|TRL's default|APRIL's (scripts|paper)|trl-april's choice, because "
)
UPDATES = {"grpo": 1, "dapo": 16, "gspo": 4}  # per round


def recipe(name: str, *options: str):
    """Script arguments and config of a recipe."""
    arguments = [*REQUIRED, "--recipe", name, *options]
    return make_parser(arguments).parse_args_and_config(arguments)[:2]


@pytest.mark.parametrize("path", RECIPES.values(), ids=NAMES)
def test_values_are_read_as_written_and_have_a_source(path):
    script, config = recipe(path.stem)
    written = yaml.safe_load(path.read_text())
    for option, value in written.items():
        read = {**vars(script), **vars(config)}[option]
        assert read == value, option
        assert isinstance(value, str) == isinstance(read, str), option  # YAML reads 1e-6 as a string
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(written)
    for line in lines:
        assert SOURCE.search(line.partition("  # ")[2]), line


@pytest.mark.parametrize("name", NAMES)
def test_staleness_bound_is_five_rounds_and_keeps_the_factor(name):
    _, config = recipe(name)
    updates = config.steps_per_generation * config.num_iterations // config.gradient_accumulation_steps
    assert updates == UPDATES[name]
    assert config.max_staleness == 5 * UPDATES[name]
    factor = AprilOptions.of(config).with_schedule().over_provisioning
    check_bound(factor, config.max_staleness, config.staleness_policy, UPDATES[name])


def train_on_a_server(name: str, options: dict[str, object], folder: Path) -> None:
    """Run a script in a folder for two steps, with 8 rows, and see that it uses APRIL."""
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    options = {
        "output_dir": "out", "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 20,
        "max_steps": 2, "logging_steps": 1, "report_to": "none", "bf16": "false", "over_provisioning": 1.5, **options,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / name, *(word for n, v in options.items() for word in (f"--{n}", str(v)))],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"APRIL: .* tok/s, .*mean age", done.stdout)
