"""Runs checks in their order, prints a line for each, and keeps what they found.

The invariant owned here: every check gives exactly one finding, whatever it raises and however long it hangs.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ..errors import AprilError
from .finding import Finding, Mark


NAME_WIDTH = 17  # of the longest name, so that what was found stands in one column


class Examination:
    """The checks of one run and their findings, by name."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}

    @property
    def failed(self) -> bool:
        """Whether something was found that training cannot live with."""
        return any(finding.mark is Mark.FAIL for finding in self.findings.values())

    def check(self, name: str, check: Callable[[], Finding], *, seconds: float, after: Sequence[str] = ()) -> None:
        """Run one check and print its line.

        Args:
            name (`str`):
                What is checked.
            check (`Callable[[], Finding]`):
                The check. What it raises becomes its finding.
            seconds (`float`):
                How long it may take altogether.
            after (`Sequence[str]`, *optional*):
                Earlier checks without which this one makes no sense: if one of them has failed, or was skipped, this
                one is skipped.
        """
        missing = [other for other in after if self.findings[other].mark in (Mark.FAIL, Mark.SKIP)]
        if missing:
            self.add(name, Finding(Mark.SKIP, f"not checked, because of: {', '.join(missing)}"))
            return
        try:
            with redirect_stdout(sys.stderr):  # for what libraries print: stdout has a line per check, and no more
                finding = within(seconds, check)
        except AprilError as error:  # a sentence with its remedy
            finding = Finding(Mark.FAIL, str(error))
        except Exception as error:  # whatever a library raises: the other checks go on
            finding = Finding(Mark.FAIL, f"{type(error).__name__}: {error}")
        self.add(name, finding)

    def add(self, name: str, finding: Finding) -> None:
        """Keep a finding and print its line."""
        self.findings[name] = finding
        print(finding.line(name, NAME_WIDTH), flush=True)

    def as_json(self) -> dict[str, Any]:
        """Everything that was found: the lines under `findings`, and what programs read beside them."""
        lines = [
            {"name": name, "mark": finding.mark.value, "found": finding.found, "remedy": finding.remedy}
            for name, finding in self.findings.items()
        ]
        report: dict[str, Any] = {"findings": lines}
        for finding in self.findings.values():
            report.update(finding.data)
        return report

    def write(self, path: Path, **head: Any) -> None:
        """Write `head` and [`~Examination.as_json`] to a file."""
        path.write_text(json.dumps({**head, **self.as_json()}, indent=2) + "\n")


def within(seconds: float, function: Callable[[], Finding]) -> Finding:
    """Returns what `function` returns, or raises `TimeoutError` when it takes longer.

    Time-outs of sockets are for silence: neither a name that does not resolve nor an answer that trickles in ends by
    them. The thread of a function that is given up on ends with this process, which it does not keep alive.
    """
    outcome: queue.SimpleQueue[tuple[Finding | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put((function(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=work, name="doctor", daemon=True).start()
    try:
        finding, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"not done after {seconds:g} s. A larger --timeout gives it longer.") from None
    if error is not None:
        raise error
    assert finding is not None
    return finding
