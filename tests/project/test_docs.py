"""The documentation agrees with the code: commands, snippets, links, options, metrics, names of tests and rooms."""

import ast
import doctest
import re
import shlex
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import measured_tables
import pytest
import report
import trl
import yaml

import trl_april
from tests.support import docs_commands
from tests.support.docs_pages import ROOT, Block, page_names, read_page
from tests.support.serverless import ServerlessTrainer
from tests.training.test_batch import round_with_tools
from tests.training.test_correction import batch, group, sample
from trl_april import APRILGRPOConfig, APRILGRPOTrainer, LocalServer
from trl_april.cli import COMMANDS
from trl_april.commands.simulate import main as simulate
from trl_april.config import AprilOptions
from trl_april.engine.servers import Traffic
from trl_april.rollout.record import Round
from trl_april.training.batch import round_metrics, server_metrics
from trl_april.training.correction import AGES, MASKED_FRACTION, correction_metrics


PAGES = page_names()
BLOCKS = [block for name in PAGES for block in read_page(name).blocks]
INTERNALS = read_page("docs/internals.md")
CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}
NEEDS_A_SERVER = {"LocalServer", "APRILGRPOTrainer", "trainer", "server"}


def blocks(*languages: str) -> list[Block]:
    """Code blocks in these languages, except file trees."""
    return [block for block in BLOCKS if block.language in languages and not block.text.startswith("trl_april/\n")]


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


# Code


@pytest.mark.parametrize("name", PAGES)
def test_commands_are_accepted_by_their_programs(name):
    shell = [block.text for block in blocks("bash", "") if block.page == name]
    for code in [*shell, *filter(docs_commands.is_command, read_page(name).inline_code)]:
        for words in docs_commands.commands(code):
            docs_commands.check(words)


def test_simulations_print_the_output_shown_after_them(capsys):
    shown = 0
    for block, following in pairwise(BLOCKS):
        for words in docs_commands.commands(block.text) if block.language == "bash" else []:
            if words[:2] == ["trl-april", "simulate"] and not any(word.endswith(".json") for word in words):
                assert simulate(words[2:]) == 0
                printed = capsys.readouterr().out.splitlines()
                if (following.page, following.language) == (block.page, "text"):
                    assert set(following.text.splitlines()) <= set(printed), shlex.join(words)
                    shown += 1
    assert shown


@pytest.mark.parametrize("block", [one for one in blocks("python") if one.page != "CONTRIBUTING.md"], ids=str)
def test_python_runs_or_uses_existing_names(block, monkeypatch):
    source = doctest.script_from_examples(block.text) if block.text.startswith(">>>") else block.text
    docs_commands.check_names(source, {"trainer": APRILGRPOTrainer, "server": LocalServer})
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    if not names & NEEDS_A_SERVER:
        monkeypatch.setattr(trl_april, "APRILGRPOConfig", partial(APRILGRPOConfig, **CPU))
        exec(compile(source, str(block), "exec"), {})


@pytest.mark.parametrize("block", blocks("diff"), ids=str)
def test_both_sides_of_a_diff_use_existing_names(block):
    for sign in "-+":
        lines = [line[1:] for line in block.text.splitlines() if line.startswith(sign)]
        assert len(lines) == 3
        docs_commands.check_names("\n".join(lines), {})


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_is_a_valid_recipe(block):
    APRILGRPOConfig("out", **CPU, **yaml.safe_load(block.text))


class GivenCompletions(ServerlessTrainer):
    """Trains on completions of two tokens."""

    def _april_run_round(self) -> Round:
        samples = [sample(index, (0, 2)) for index in range(self.args.num_generations)]
        self.groups = [group(*samples) for _ in range(self.args.generation_batch_size // len(samples))]
        for one in self.groups:
            one.row = {"prompt": "1+1=", "answer": "2"}
        return super()._april_run_round()


def test_script_of_the_readme_trains_for_a_step(tiny_model_dir, tmp_path, monkeypatch, one_thread):
    """tests/project/test_recipes.py trains on a real server."""
    (block,) = [block for block in blocks("python") if block.page == "README.md"]
    given = {**CPU, "max_steps": 1, "save_strategy": "no", "vllm_server_base_url": "http://127.0.0.1:1"}
    monkeypatch.setattr(trl_april, "APRILGRPOTrainer", GivenCompletions)
    monkeypatch.setattr(trl_april, "APRILGRPOConfig", partial(APRILGRPOConfig, **given))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block.text.replace("Qwen/Qwen3-0.6B", tiny_model_dir), str(block), "exec"), names)
    trainer = names["trainer"]
    assert trainer.april_enabled and trainer.state.global_step == 1
    assert len(trainer.groups) == 8  # N, as the text says


# Links and names


@pytest.mark.parametrize("name", PAGES)
def test_links_resolve(name):
    for link in read_page(name).links:
        target, _, anchor = link.partition("#")
        path = ((ROOT / name).parent / target).resolve() if target else ROOT / name
        if not re.match(r"https?://", link):
            assert path.exists(), link
            assert not anchor or anchor in read_page(str(path.relative_to(ROOT))).anchors, link


@pytest.mark.parametrize("name", PAGES)
def test_named_python_files_exist(name):
    files = {f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py") if ".venv" not in path.parts}
    named = set(re.findall(r"(?<![\w/.])((?:[\w-]+/)*\w+\.py)\b", read_page(name).text)) - {"my_rewards.py"}
    assert [wanted for wanted in named if not any(file.endswith(f"/{wanted}") for file in files)] == []


def test_named_tests_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)+)`", INTERNALS.text)
    assert len(named) > 20
    for file, path in named:
        scope: ast.AST = ast.parse((ROOT / file).read_text())
        for name in path.split("::")[1:]:
            found = [node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name]
            assert found, f"{file}{path}"
            scope = found[0]


def test_overridden_methods_of_trl_are_listed():
    (table,) = [table for table in INTERNALS.tables if table[0][0] == "method"]
    overridden = {
        name
        for name, value in vars(APRILGRPOTrainer).items()
        if callable(value) and name != "__init__" and hasattr(trl.GRPOTrainer, name)
    }
    assert {cells[0].strip("`") for cells in table[1:]} == overridden


def test_tour_names_every_room():
    rooms = {path.parent.name for path in (ROOT / "trl_april").glob("*/*.py")}
    assert rooms <= set(re.findall(r"`(\w+)/`", read_page("CONTRIBUTING.md").text))


# Options, metrics, figures


def test_options_of_the_readme_exist():
    (table,) = [table for table in read_page("README.md").tables if table[0][0] == "option"]
    assert {cells[0].strip("`") for cells in table[1:]} <= {option.name for option in fields(AprilOptions)}


def metric_names() -> set[str]:
    """Metrics that a round can log, with `*` for a server, and for the ages and lengths of the correction."""
    done, pool = round_with_tools()
    names = set(round_metrics(replace(done, seconds=2.0), pool, sync_seconds=0.0, max_staleness=5))
    samples = [sample(index, (index, 1)) for index in range(4)]
    correction = correction_metrics(batch([[1.0]] * 4), [group(*samples)], version=3)
    ages_and_lengths = "|".join([*map(re.escape, AGES), *(f"length_q{n}" for n in range(1, 5))])
    servers = server_metrics([Traffic(), Traffic()], 1.0, lost=0)
    names |= {re.sub(r"/\d+/", "/*/", name) for name in servers} | {MASKED_FRACTION}
    return names | {re.sub(f"/({ages_and_lengths})/", "/*/", name) for name in correction}


def test_every_metric_is_listed_once_with_its_unit():
    tables = [table for table in read_page("docs/tuning.md").tables if table[0] == ["metric", "unit", "meaning"]]
    rows = [cells for table in tables for cells in table[1:]]
    assert sorted(cells[0].strip("`") for cells in rows) == sorted(metric_names())
    assert all(unit and meaning for _, unit, meaning in rows)


@pytest.mark.parametrize("name", PAGES)
def test_named_metrics_exist(name):
    patterns = [re.escape(metric).replace(r"\*", r"(age_[0-3]\+?|length_q[1-4]|\d+|N)") for metric in metric_names()]
    for metric in re.findall(r"`april/([\w/+]*[\w+])`", read_page(name).text):
        assert any(re.fullmatch(pattern, metric) for pattern in patterns), metric


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md", "benchmarks/README.md"])
def test_measured_tables_are_those_of_the_files(name):
    text = (ROOT / name).read_text()
    assert measured_tables.written(text) == text, "run `python benchmarks/measured_tables.py`"


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md"])
def test_results_stand_in_measured_tables_only(name):
    """A ratio or a share in other text could not be compared with a file."""
    text = measured_tables.BLOCK.sub("", re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL))
    assert re.findall(r"\d+\.\d+ times|\d+ ?%|\d tok/s|±", text) == []


def test_results_name_the_versions_that_they_were_measured_with():
    assert set(report.machine()["versions"]) == {"trl", "transformers", "torch", "vllm"}


# Generated files


def test_reference_is_up_to_date():
    reference = docs_commands.load(ROOT / "docs/reference.py")
    pages = reference.pages()
    assert {name: (ROOT / "docs" / name).read_text() for name in pages} == pages, "run `make docs`"
    headings = re.findall(r"^### `(\w+)`$", "\n".join(pages.values()), re.MULTILINE)
    assert set(trl_april.__all__) - {"__version__"} <= set(headings)
    assert {f"## `trl-april {name}`" for name in COMMANDS if name != "grpo"} <= set(
        pages["command_line.md"].splitlines()
    )


def test_picture_shows_the_numbers_of_its_description(tmp_path):
    picture = docs_commands.load(ROOT / "docs/picture.py")
    picture.draw(tmp_path / "april.svg")
    assert b"<svg" in (tmp_path / "april.svg").read_bytes()[:1000]
    end = picture.tell(1.0, steps=picture.SYNCHRONOUS_STEPS).updates[-1][1]
    april = picture.tell(picture.FACTOR, until=end)
    (alt,) = re.findall(r"!\[(.*?)\]", read_page("README.md").text, re.DOTALL)
    assert f"trains {picture.SYNCHRONOUS_STEPS} batches in {end:.0f} simulated seconds" in alt
    assert f"the same time has {sum(stop <= end for _, stop in april.updates)} batches" in alt
