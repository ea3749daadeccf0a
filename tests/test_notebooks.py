"""The notebooks, run from start to end in a kernel of their own, whose cells run inside an event loop."""

from __future__ import annotations

import ast
import base64
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from trl_april import APRILGRPOConfig
from trl_april.row_order import optimiser_steps_per_round


ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


class Execution(NotebookClient):
    """A notebook as it runs: what it shows meanwhile, and the servers that it starts."""

    def __init__(self, name: str, folder: Path) -> None:
        self.shown: list[str] = []  # every state of what is displayed as HTML
        self.servers: set[psutil.Process] = set()
        self.servers_left: set[psutil.Process] = set()
        notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
        super().__init__(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}})
        self.on_cell_executed = self._look_for_servers
        self.on_notebook_complete = self._look_for_what_is_left  # before the kernel ends, and all else with it

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.shown.append(msg["content"]["data"].get("text/html", ""))
        return super().process_message(msg, cell, cell_index)

    def _look_for_servers(self, **kwargs: Any) -> None:
        for process in psutil.Process(self.km.provisioner.pid).children(recursive=True):
            if "vllm" in " ".join([process.name(), *process.cmdline()]).lower():
                self.servers.add(process)

    def _look_for_what_is_left(self, **kwargs: Any) -> None:
        self.servers_left = {
            process for process in self.servers if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        }

    @property
    def outputs(self) -> list[Any]:
        return [output for cell in self.nb.cells for output in cell.get("outputs", [])]

    @property
    def printed(self) -> str:
        return "".join(output.text for output in self.outputs if output.get("name") == "stdout")

    @property
    def pictures(self) -> list[bytes]:
        data = [output.data["image/png"] for output in self.outputs if "image/png" in output.get("data", {})]
        return [base64.b64decode(picture) for picture in data]


def execute(name: str, folder: Path) -> Execution:
    execution = Execution(name, folder)
    execution.execute(env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **os.environ})
    assert execution.servers and not execution.servers_left
    for picture in execution.pictures:
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    return execution


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_without_outputs(path):
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.server
def test_quickstart(tmp_path):
    done = execute("quickstart.ipynb", tmp_path)
    assert "tokens carried over" in done.printed
    assert "the pool holds 0 groups" in done.printed
    assert len(done.pictures) == 1
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    bars = [html for html in done.shown if "Rollout" in html]
    assert re.search(r"<progress value='4' max='4'.*4/4 groups, \d+ in flight, [\d,]+ tok/s", bars[-1], re.DOTALL)
    assert not any("Rollout" in str(output.get("data")) for output in done.outputs)  # gone in the end


@pytest.mark.server
def test_long_tail(tmp_path):
    done = execute("long_tail.ipynb", tmp_path)
    assert len(done.pictures) == 2  # the lengths, the gains
    assert re.search(r"256 completions, \d+% of them cut at the limit", done.printed)
    waits = re.search(r"A batch waits for \d+ tokens, ([\d.]+) times its median", done.printed)
    assert float(waits[1]) > 2
    assert re.search(r"^(?:ok|warn) +decode speed ", done.printed, re.MULTILINE)
    assert (
        len(re.findall(r"^(?:synchronous|abort|reuse|overlap|both) +[\d.]+ .* x [\d.]+ ", done.printed, re.MULTILINE))
        == 13
    )
    assert [int(bound) for bound in re.findall(r"^x .*max_staleness=(\d)", done.printed, re.MULTILINE)] == [1, 2, 5]
    recommended = done.printed[done.printed.index("APRILGRPOConfig(\n") :]
    assert re.search(r"^    over_provisioning=(1\.0|1\.5|2\.0|3\.0),$", recommended, re.MULTILINE)
    assert "    max_staleness=5,\n" in recommended
    # Trained with them, the factor stays as it was simulated.
    (call,) = ast.parse(recommended.strip()).body
    settings = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.value.keywords}
    args = APRILGRPOConfig(str(tmp_path), bf16=False, **settings)
    assert optimiser_steps_per_round(args) == 1
