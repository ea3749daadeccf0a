"""The demo: a quick run."""

import json

import pytest
from demo import main

from trl_april.commands.report_run import read_run


@pytest.mark.long
@pytest.mark.server
def test_quick_demo_from_start_to_end(tmp_path, capsys, one_thread):
    """On its own server, which serves the demo's model."""
    main(["--quick", "--output-dir", str(tmp_path)])
    shown = capsys.readouterr().out
    for row in ("wall-clock per optimizer step", "trained tokens carried over", "reward on held-out prompts, after"):
        assert row in shown
    assert "synchronous and APRIL" in (tmp_path / "report.html").read_text()
    synchronous, april = json.loads((tmp_path / "recordings.json").read_text())
    assert synchronous["staleness_max"] == 0 and synchronous["carried_tokens"] == 0
    assert [read_run(tmp_path / name).options["resume_kv"] for name in ("synchronous", "APRIL")] == ["reuse", "keep"]
    assert april["generated_tokens"] == april["trained_tokens"]  # the pool is empty at the end
