"""The findings of checks: a line for each check, with a remedy if something is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from enum import StrEnum

from ..errors import AprilError


class Mark(StrEnum):
    """Outcome of a check. Only `FAIL` prevents training."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check: a sentence, and a remedy if something is wrong."""

    mark: Mark
    text: str
    remedy: str | None = None

    def line(self, name: str) -> str:
        text = self.text
        if self.remedy is not None:
            text += f"{'' if text.endswith('.') else '.'} Remedy: {self.remedy}."
        return f"{self.mark:<4}  {name:<17}  {' '.join(text.split())}"


class Examination:
    """The checks that were run, and their findings by name."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}
        self.suffix = ""  # of the names: the position of a server among several

    def check(self, name: str, check: Callable[[], Finding], *, after: Sequence[str] = ()) -> None:
        """Run a check and print its line. It is skipped if a check in `after` failed or was skipped."""
        missing = [other for other in after if self.findings[other + self.suffix].mark in (Mark.FAIL, Mark.SKIP)]
        try:
            with redirect_stdout(sys.stderr):  # libraries print, but stdout has one line per check
                skipped = Finding(Mark.SKIP, f"not checked, because of: {', '.join(missing)}")
                finding = skipped if missing else check()
        except AprilError as error:
            finding = Finding(Mark.FAIL, str(error))
        except OSError as error:  # such as errors of requests
            remedy = "start a server with `trl-april serve MODEL`, correct --base-url, see its log, or raise --timeout"
            finding = Finding(Mark.FAIL, f"no answer: {error}", remedy)
        except Exception as error:  # the other checks still run
            remedy = "correct --base-url, and check that TRL supports the server's version of vLLM"
            finding = Finding(Mark.FAIL, f"{type(error).__name__}: {error}", remedy)
        self.findings[name + self.suffix] = finding
        print(finding.line(name + self.suffix), flush=True)
