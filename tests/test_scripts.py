"""The scripts and notebooks, run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient


pytestmark = pytest.mark.server

ROOT = Path(__file__).parent.parent


def test_quickstart_script(server, tiny_model_dir, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(8)))
    output = tmp_path / "out"
    options = {
        "model": tiny_model_dir, "dataset": data, "output_dir": output, "vllm_server_base_url": server.base_url,
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 20, "max_steps": 2,
        "logging_steps": 1, "report_to": "none", "bf16": "false", "over_provisioning": 1.5,
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "scripts" / "quickstart.py")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "april/round_seconds" in done.stdout
    assert (output / "model.safetensors").exists()


def test_quickstart_notebook(server, tmp_path):
    """From start to end, in a kernel, whose cells run inside an event loop."""
    path = ROOT / "notebooks" / "quickstart.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "stored without outputs"
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **os.environ}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute(env=environment)
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    )
    assert "tokens carried over" in printed
    assert "the pool holds 0 groups" in printed
