"""What the documentation says, held against the code: commands, snippets, links, options, metrics, files."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Self

import pytest
import trl
import yaml
from datasets import Dataset

import trl_april
from tests import docs_commands
from tests.docs_pages import ROOT, Block, page_names, read_page
from tests.docs_snippets import NEEDS_A_SERVER, Checker, names_in, source_of
from tests.serverless import ServerlessTrainer
from tests.test_batch import round_of_a_small_pool
from tests.test_correction import batch, group, sample
from trl_april import APRILGRPOConfig, APRILGRPOTrainer, LocalServer
from trl_april.batch import round_metrics
from trl_april.config import AprilOptions
from trl_april.correction import AGES, correction_metrics
from trl_april.round import Round
from trl_april.simulator.command import run as simulate
from trl_april.types import FinishReason, Group, SampleState


PAGES = page_names()
BLOCKS = [block for name in PAGES for block in read_page(name).blocks]
CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}

# Blocks that are neither run nor parsed, by page and language, and why.
NOT_CHECKED = {
    ("README.md", "bibtex"): "a citation",
    ("README.md", "mermaid"): "a picture",
    ("docs/internals.md", "mermaid"): "a picture; the files that it names are checked",
    ("docs/servers.md", "text"): "what `trl-april doctor` printed for one server",
}


def in_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def name_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


# Code


def test_every_block_is_checked_or_said_not_to_be():
    checked = {"bash", "", "python", "diff", "yaml"}
    outputs = {name_of(output) for _, output in SIMULATED if output is not None}
    rest = {
        (block.page, block.language)
        for block in BLOCKS
        if block.language not in checked and name_of(block) not in outputs and block.text != file_tree()
    }
    assert rest == set(NOT_CHECKED)


@pytest.mark.parametrize("block", in_language("bash", ""), ids=name_of)
def test_commands_are_those_that_the_programs_take(block):
    if block.text == file_tree():
        return
    for words in docs_commands.commands(block.text):
        docs_commands.check(words)


@pytest.mark.parametrize("name", PAGES)
def test_commands_within_the_text(name):
    for code in read_page(name).inline_code:
        if docs_commands.is_command(code):
            for words in docs_commands.commands(code):
                docs_commands.check(words)


def simulated() -> list[tuple[list[str], Block | None]]:
    """Simulations that need no file, each with the block behind it if that is its output."""
    found = []
    for block, following in zip(BLOCKS, [*BLOCKS[1:], None], strict=True):
        for words in docs_commands.commands(block.text) if block.language == "bash" else []:
            if docs_commands.simulates_without_files(words):
                is_output = following is not None and (following.page, following.language) == (block.page, "text")
                found.append((words, following if is_output else None))
    return found


SIMULATED = simulated()


def test_simulations_print_what_is_shown(capsys):
    assert len(SIMULATED) >= 2
    for words, output in SIMULATED:
        assert simulate(words[2:]) == 0
        printed = capsys.readouterr().out
        assert output is None or set(output.text.splitlines()) <= set(printed.splitlines()), shlex.join(words)


@pytest.mark.parametrize("block", in_language("python"), ids=name_of)
def test_python_runs_or_calls_what_there_is(block, monkeypatch):
    source = source_of(block.text)
    Checker({"trainer": APRILGRPOTrainer, "server": LocalServer}).check(source)
    if not names_in(ast.parse(source)) & NEEDS_A_SERVER:
        monkeypatch.setattr(trl_april, "APRILGRPOConfig", partial(APRILGRPOConfig, **CPU))
        exec(compile(source, name_of(block), "exec"), {})


@pytest.mark.parametrize("block", in_language("diff"), ids=name_of)
def test_a_migration_goes_from_what_there_is_to_what_there_is(block):
    for sign in "-+":
        lines = [line[1:] for line in block.text.splitlines() if line.startswith(sign)]
        assert len(lines) == 3
        Checker({}).check("\n".join(lines))


@pytest.mark.parametrize("block", in_language("yaml"), ids=name_of)
def test_yaml_is_a_recipe(block):
    APRILGRPOConfig("out", **CPU, **yaml.safe_load(block.text))


class Trainer(ServerlessTrainer):
    """Whose completions are there already."""

    def _run_round(self) -> Round:
        self._last_loaded_step = self.state.global_step
        group = Group.fresh(0, {"prompt": "1+1="}, [5, 6], self.args.generation_batch_size, 8, 0)
        for made in group.samples:
            made.append([7 + made.index, 8], [-1.0, -2.0], 0)
            made.state, made.finish_reason = SampleState.FINISHED, FinishReason.STOP
        return Round(0, groups=[group])


class RunningServer:
    """Nobody asks it for anything but its address."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, model: str, *, vllm_args: Sequence[str] = ()) -> None:
        self.model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_the_script_of_the_readme_trains(tiny_model_dir, tmp_path, monkeypatch, one_thread):
    """The very block, for one step; tests/test_scripts.py has the same on a server."""
    (block,) = [block for block in read_page("README.md").blocks if block.language == "python"]
    given = {**CPU, "max_steps": 1, "save_strategy": "no"}
    monkeypatch.setattr(trl_april, "LocalServer", RunningServer)
    monkeypatch.setattr(trl_april, "APRILGRPOTrainer", Trainer)
    monkeypatch.setattr(trl_april, "APRILGRPOConfig", partial(APRILGRPOConfig, **given))
    monkeypatch.chdir(tmp_path)
    names = {
        "dataset": Dataset.from_list([{"prompt": f"{number}+1="} for number in range(4)]),
        "my_reward": lambda completions, **columns: [float(len(set(text))) for text in completions],
    }
    exec(compile(block.text.replace("path/or/model-id", tiny_model_dir), name_of(block), "exec"), names)
    trainer = names["trainer"]
    assert trainer.april_enabled and trainer.state.global_step == 1
    assert trainer.args.vllm_server_base_url == RunningServer.base_url


# Links and names


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = read_page(name)
    for link in page.links:
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in read_page(str(path.relative_to(ROOT))).anchors, f"{name}: {link}"


@pytest.mark.parametrize("name", PAGES)
def test_files_that_are_named_exist(name):
    files = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    named = set(re.findall(r"(?<![\w/.])((?:[\w-]+/)*\w+\.py)\b", (ROOT / name).read_text()))
    for wanted in named - {"my_rewards.py"}:
        assert any(file == wanted or file.endswith(f"/{wanted}") for file in files), f"{name}: {wanted}"


def test_tests_that_are_named_exist():
    named = re.findall(r"`(tests/\w+\.py)((?:::\w+)+)`", (ROOT / "docs/internals.md").read_text())
    assert len(named) > 20
    for file, path in named:
        scope: ast.AST = ast.parse((ROOT / file).read_text())
        for name in path.split("::")[1:]:
            found = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name]
            assert found, f"{file}{path}"
            scope = found[0]


def test_overridden_methods_are_those_that_there_are():
    text = (ROOT / "docs/internals.md").read_text()
    (sentence,) = re.findall(r"\w+ methods, marked .*?`super\(\)`", text, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", sentence))
    overridden = {
        name
        for name, value in vars(APRILGRPOTrainer).items()
        if callable(value) and name != "__init__" and hasattr(trl.GRPOTrainer, name)
    }
    assert named == overridden


# Options, metrics, figures


def test_every_option_has_a_row_with_its_default():
    rows = {cells[0].strip("`"): cells[1].strip("`") for cells in read_page("README.md").table("field")}
    defaults = AprilOptions()
    expected = {option.name: repr(getattr(defaults, option.name)).replace("'", '"') for option in fields(AprilOptions)}
    assert rows == expected


def metric_names() -> set[str]:
    """Every metric that a round can log; ages and lengths of the correction by `*`."""
    done, pool = round_of_a_small_pool()
    names = set(round_metrics(replace(done, seconds=2.0), pool, sync_seconds=0.0, max_staleness=5))
    samples = [sample(index, (index, 1)) for index in range(4)]
    figures, _ = correction_metrics(batch([[1.0]] * 4), [group(*samples)], version=3)
    ages_and_lengths = "|".join([*(re.escape(name) for name, _, _ in AGES), *(f"length_q{n}" for n in range(1, 5))])
    return names | {re.sub(f"/({ages_and_lengths})/", "/*/", name) for name in figures}


def test_every_metric_has_a_row_with_its_unit():
    tables = [table for table in read_page("docs/tuning.md").tables if table[0] == ["metric", "unit", "meaning"]]
    rows = [cells for table in tables for cells in table[1:]]
    names = [cells[0].strip("`") for cells in rows]
    assert len(names) == len(set(names))
    assert set(names) == metric_names()
    assert all(unit and meaning for _, unit, meaning in rows)


def test_metrics_that_are_named_elsewhere_exist():
    patterns = {re.escape(name).replace(r"\*", r"(age_[0-3]\+?|length_q[1-4])") for name in metric_names()}
    for name in PAGES:
        for metric in re.findall(r"`april/([\w/+]+)`", (ROOT / name).read_text()):
            if metric != "correction/":
                assert any(re.fullmatch(pattern, metric) for pattern in patterns), f"{name}: april/{metric}"


def test_measured_figures_are_those_of_the_benchmarks():
    lines = read_page("README.md").lines
    measured = lines[lines.index("## Measured") : lines.index("## Compared")]
    rows = [line for line in measured if line.startswith("|")]
    assert len(rows) > 3
    assert set(rows) <= set(read_page("docs/benchmarks.md").lines)


def file_tree() -> str:
    (tree,) = [block.text for block in read_page("README.md").blocks if block.text.startswith("trl_april/\n")]
    return tree


def test_the_file_tree_is_that_of_the_repository():
    named: set[str] = set()
    folders: list[str] = []
    for line in file_tree().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        entries = re.match(r"\w+(?:\.py|/)(?:, \w+\.py)*", line.strip())[0].split(", ")
        folders = folders[:depth]
        if entries[0].endswith("/"):
            folders.append(entries[0].rstrip("/"))
            assert (ROOT / "/".join(folders)).is_dir(), line
        else:
            named |= {"/".join([*folders, entry]) for entry in entries}
    there = [path for folder in ("trl_april", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert named == {str(path.relative_to(ROOT)) for path in there if path.name != "__init__.py"}


# What is generated


def test_the_reference_is_up_to_date():
    reference = docs_commands.load(ROOT / "docs" / "reference.py")
    assert reference.PAGE.read_text() == reference.page(), "run `make docs`"


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs/api.md").read_text()
    for name in set(trl_april.__all__) - {"__version__"}:
        assert f"### `{name}`\n" in text


def test_the_picture_shows_what_is_said_of_it(tmp_path):
    picture = docs_commands.load(ROOT / "docs" / "picture.py")
    picture.draw(tmp_path / "april.svg")
    for path in (tmp_path / "april.svg", ROOT / "docs" / "april.svg"):
        assert b"<svg" in path.read_bytes()[:1000]
        assert path.stat().st_size < 150_000
    synchronous = picture.tell(1.0, steps=picture.SYNCHRONOUS_STEPS)
    end = synchronous.updates[-1][1]
    april = picture.tell(picture.FACTOR, until=end)
    (alt,) = re.findall(r"!\[(.*?)\]", (ROOT / "README.md").read_text(), re.DOTALL)
    assert f"trains {picture.SYNCHRONOUS_STEPS} batches in {end:.0f} simulated seconds" in alt
    assert f"the same time has {sum(stop <= end for _, stop in april.updates)} batches" in alt
