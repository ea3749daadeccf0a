"""The notebooks, run completely in a kernel."""

import ast
import base64
import os
import re
import statistics
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from trl_april import APRILGRPOConfig


ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(name: str, folder: Path, changes: dict[str, str] | None = None) -> tuple[str, int]:
    """Run a notebook, with smaller numbers for instance; returns what it prints and the number of its pictures."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    for before, after in (changes or {}).items():
        (cell,) = [cell for cell in notebook.cells if before in cell.source]
        cell.source = cell.source.replace(before, after)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}})
    client.execute(env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **os.environ})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert all(len(base64.b64decode(picture)) > 10_000 for picture in pictures)
    return "".join(output.text for output in outputs if output.get("name") == "stdout"), len(pictures)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_stored_without_outputs_and_its_imports_exist(path):
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)
    for cell in code:
        tree = compile(cell.source, path.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("trl_april"):
                exec(ast.unparse(node), {})


@pytest.mark.long
@pytest.mark.server
def test_quickstart_trains(tmp_path):
    printed, pictures = execute("quickstart.ipynb", tmp_path, {"max_steps=8": "max_steps=4"})
    assert "tokens carried over" in printed
    assert "the pool holds 0 groups" in printed
    assert pictures == 1
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.long
@pytest.mark.server
def test_long_tail_recommends_settings(tmp_path):
    printed, pictures = execute(
        "long_tail.ipynb",
        tmp_path,
        {"training_dataset(32": "training_dataset(8", "bound in (2, 8)": "bound in (8,)", "[1.5, 2.0, 3.0]": "[2.0]"},
    )
    assert pictures == 2  # the lengths, the gains
    assert re.search(r"64 completions, \d+% of them cut at the limit", printed)
    assert re.search(r"^16 sequences: \d+\.\d+ ms per step", printed, re.MULTILINE)
    recommended = printed[printed.index("APRILGRPOConfig(\n") :]
    # One optimizer step per batch, as simulated.
    (call,) = ast.parse(recommended.strip()).body
    settings = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.value.keywords}
    args = APRILGRPOConfig(str(tmp_path), bf16=False, **settings)
    assert args.max_staleness == 8
    assert args.steps_per_generation * args.num_iterations == args.gradient_accumulation_steps


@pytest.mark.long
@pytest.mark.server
def test_tools_trains_with_a_tool_in_an_environment_and_by_an_address(tmp_path):
    printed, _ = execute("tools.ipynb", tmp_path, {"max_steps=16": "max_steps=4", "steps=120": "steps=90"})
    assert int(re.search(r"^(\d+) tokens carried over$", printed, re.MULTILINE)[1]) > 0
    assert "the pool holds 0 groups" in printed
    rows = [line.split() for line in printed.splitlines() if re.match(r" *\d+ .* s$", line)]
    assert len(rows) == 8
    # Without working tools both would be 0. Single steps say little: the last ones train the longest samples.
    for steps in (rows[:4], rows[4:]):  # of the tool, of the environment
        rewards, calls = [float(row[1]) for row in steps], [float(row[2]) for row in steps]
        assert 0.1 < statistics.mean(rewards) < 1 and statistics.mean(calls) > 0.2, printed
    assert len(re.findall(r"^(?:first|last) 1 steps: reward \d\.\d\d$", printed, re.MULTILINE)) == 4
    assert len(re.findall(r"^agent, step \d: reward 0\.[1-9]\d$", printed, re.MULTILINE)) >= 3, printed
