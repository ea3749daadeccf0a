"""Writes docs/api.md, the reference of the public names, from their docstrings.

    python docs/reference.py            # writes docs/api.md
    python docs/reference.py --check    # exit code 1 if it is not up to date

Nothing is imported: griffe reads the source, so neither torch nor vLLM is needed.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import textwrap
from pathlib import Path

import griffe
from griffe import Class, DocstringSectionKind, Function, Object, Parameter, ParameterKind


DOCS = Path(__file__).parent
PAGE = DOCS / "api.md"

HEAD = """\
# API reference

Written by `python docs/reference.py` from the docstrings; what is changed here by hand is lost.

Everything under "Training" and "Rollouts" can be imported from `trl_april` itself.
"""

# Title -> the names on the page, as module and object.
CHAPTERS = {
    "Training": ["config.APRILGRPOConfig", "trainer.APRILGRPOTrainer", "server.LocalServer"],
    "Rollouts": ["pool.Pool", "types.Group", "types.Sample", "types.Segment"],
    "Errors": [
        *("errors.AprilError", "errors.ConfigError", "errors.PoolError", "errors.EngineError", "errors.ServerError"),
        *("errors.WeightSyncError", "errors.CheckpointError"),
    ],
    "Simulator": [
        *("simulator.scenario.Scenario", "simulator.lengths.Lognormal", "simulator.step_time.StepTime"),
        *("simulator.result.Mode", "simulator.run.run", "simulator.result.Result"),
        *("simulator.grid.simulate_grid", "simulator.grid.Grid"),
        *("simulator.recommend.recommend", "simulator.recommend.Recommendation"),
    ],
    "Doctor": ["doctor.DoctorOptions", "doctor.run"],
}
TITLES = {
    DocstringSectionKind.parameters: "Parameters",
    DocstringSectionKind.attributes: "Attributes",
    DocstringSectionKind.returns: "Returns",
    DocstringSectionKind.raises: "Raises",
}
REFERENCE = re.compile(r"\[`~?([\w.]+)`\]")
NAMES = {path.rpartition(".")[2]: path for paths in CHAPTERS.values() for path in paths}


def page() -> str:
    """The whole page."""
    logging.getLogger("griffe").setLevel(logging.ERROR)
    package = griffe.load("trl_april", search_paths=[str(DOCS.parent)], allow_inspection=False)
    parts = [HEAD]
    for title, paths in CHAPTERS.items():
        parts.append(f"## {title}\n")
        parts += [entry(package[path], path) for path in paths]
    return "\n".join(parts)


def entry(thing: Object, path: str) -> str:
    """A class with its public methods and properties, or a function."""
    module = path.rpartition(".")[0]
    file = thing.filepath.relative_to(DOCS.parent)
    kind = "Error" if module == "errors" else "Class" if thing.is_class else "Function"
    # Several functions are called `run`.
    title = thing.name if thing.is_class else f"trl_april.{path}"
    lines = [f"### `{title}`\n", f"{kind} of [`trl_april.{module}`](../{file}).\n"]
    if module == "errors":
        lines.append(f"`class {thing.name}({', '.join(str(base) for base in thing.bases)})`\n")
    elif not is_enum(thing):
        lines.append(f"`{signature(thing)}`\n")
    lines += described(thing)
    if isinstance(thing, Class):
        for name, member in thing.members.items():
            if name.startswith("_") or not member.docstring:
                continue
            is_property = "property" in member.labels
            lines.append(f"#### `{thing.name}.{name if is_property else signature(member)}`\n")
            lines += described(member)
    return "\n".join(lines)


def is_enum(thing: Object) -> bool:
    return isinstance(thing, Class) and any("Enum" in str(base) for base in thing.bases)


def signature(thing: Class | Function) -> str:
    """The call, with names and defaults. Types are in the docstring."""
    parameters = [parameter for parameter in thing.parameters if parameter.name not in ("self", "cls")]
    words: list[str] = []
    for parameter in parameters:
        if parameter.kind is ParameterKind.keyword_only and "*" not in words and not any(w[0] == "*" for w in words):
            words.append("*")
        words.append(shown(parameter, thing))
    return f"{thing.name}({', '.join(words)})"


def shown(parameter: Parameter, thing: Object) -> str:
    stars = {ParameterKind.var_positional: "*", ParameterKind.var_keyword: "**"}.get(parameter.kind, "")
    default = str(parameter.default)
    if default in thing.module.members:
        default = str(thing.module[default].value)  # a constant of its module
    if "lambda" in default and default.endswith("()"):
        default = "..."  # a factory of a dataclass, called
    # Those of *args and **kwargs are griffe's own.
    has_default = parameter.default is not None and not stars
    return f"{stars}{parameter.name}{f'={default}' if has_default else ''}"


def described(thing: Object) -> list[str]:
    """The docstring as Markdown."""
    if thing.docstring is None:
        raise SystemExit(f"{thing.path} has no docstring, and is public.")
    lines = []
    sections = thing.docstring.parse("google", warnings=False, returns_named_value=False, returns_multiple_items=False)
    for section in sections:
        if section.kind is DocstringSectionKind.text:
            text = re.sub(r"^Example:$", "**Example**", section.value, flags=re.MULTILINE)
            lines.append(linked(text) + "\n")
        elif section.kind in TITLES:
            lines.append(f"**{TITLES[section.kind]}**\n")
            lines += [item(section.kind, element) for element in section.value]
            lines.append("")
        else:
            raise SystemExit(f"{thing.path} has a section of the kind {section.kind}, which is not known here.")
    return lines


def item(kind: DocstringSectionKind, element: griffe.DocstringElement) -> str:
    """One line of a list, with what belongs to it indented."""
    if kind is DocstringSectionKind.raises:
        # `KeyboardInterrupt, SystemExit` is a tuple to griffe.
        names = str(element.annotation).strip("()").split(", ")
        head = ", ".join(f"[`{name}`]" if name in NAMES else f"`{name}`" for name in names)
    elif kind is DocstringSectionKind.returns:
        head = str(element.annotation or "")
    else:
        names = ", ".join(f"`{name}`" for name in element.name.replace("`", "").split(", "))
        head = f"{names} ({element.annotation})" if element.annotation else names
    text = linked(textwrap.dedent(element.description).strip())
    return textwrap.indent(f"{linked(head)}: {text}" if head else text, "  ").replace("  ", "- ", 1)


def linked(text: str) -> str:
    """References to names of this page as links, others as plain code."""

    def link(match: re.Match[str]) -> str:
        name = match[1].removeprefix("trl_april.")
        short = name.rpartition(".")[2]
        if name.rpartition(".")[0] in ("", NAMES.get(short, "").rpartition(".")[0]) and short in NAMES:
            return f"[`{short}`](#{short.lower()})"
        return f"`{name}`"

    return REFERENCE.sub(link, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and say whether the page is up to date")
    options = parser.parse_args()
    text = page()
    if options.check:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
