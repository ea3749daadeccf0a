"""`trl-april report`: its figures, its advice, and the page as a browser shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.browser import MISSING, Browser, chromium
from tests.simulated_rounds import lognormal
from tests.written_run import WrittenRun
from trl_april import cli
from trl_april.report import Run, RunRound, Step, advice, read_run
from trl_april.report.figures import pictures
from trl_april.report.layout import NARROW, shortened
from trl_april.report.page import names_of, render
from trl_april.report.plots import step_curve, window_of
from trl_april.report.prediction import Prediction, predict
from trl_april.report.summary import Summary, phases, quantile, summarise
from trl_april.report.table import duration, rows
from trl_april.run_log import FILE


ROOT = Path(__file__).parent.parent
NAME = "run <b>&amp; $x_1$ & 'more' of a name that is too long for a figure"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Runs of every kind."""
    base = tmp_path_factory.mktemp("runs")
    WrittenRun(base / "synchronous", 1.0).go(14)
    WrittenRun(base / "april", 2.0).go(14)
    WrittenRun(base / "one", 2.0).go(1)
    WrittenRun(base / NAME, 2.0, lengths=lognormal(0.0), training_seconds=400.0).go(90)
    rounds = [json.loads(line) for line in (base / "april" / FILE).read_bytes().splitlines()]
    history = [
        {"step": one["version"] + 1, "loss": 0.1, **one["rewards"]}
        | {f"april/{name}": value for name, value in one["metrics"].items()}
        for one in rounds
        if one["kind"] == "round"
    ]
    checkpoint = base / "without" / "checkpoint-14"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return {path.name: path for path in base.iterdir()}


@pytest.fixture(scope="module")
def page_of(folders):
    """The page of some runs, which is not made twice."""
    return cache(lambda *names: render([read_run(folders[name]) for name in names]))


class TestSummary:
    def test_the_phases_of_a_round_are_those_that_it_had(self, folders):
        run = read_run(folders["april"])
        assert len(phases(run)) == 14
        for one, had in zip(phases(run)[:-1], run.rounds, strict=False):
            assert one["sync"] == pytest.approx(0.05, abs=1e-4)
            assert one["scoring"] == pytest.approx(0.02, abs=1e-4)
            assert one["training"] == pytest.approx(0.3, abs=1e-4)
            assert one["other"] == pytest.approx(0.03, abs=1e-4)
            assert one["generation"] + one["abort"] == pytest.approx(had.generation[1] - had.generation[0], abs=1e-5)
        summary = summarise(run)
        assert sum(summary.shares.values()) == pytest.approx(1.0)
        assert sum(sum(one.values()) for one in phases(run)) == pytest.approx(run.seconds)

    def test_by_hand(self):
        """Two rounds of 4 s in 12 s, with 2 requests that become 1, and steps of 1 s."""
        rounds = [
            RunRound(
                version=number,
                sync=(6.0 * number, 6.0 * number + 0.5),
                generation=(6.0 * number + 0.5, 6.0 * number + 4.5),
                scoring=(6.0 * number + 4.5, 6.0 * number + 5.0),
                abort_seconds=1.0,
                in_flight=[(6.0 * number + 0.5, 4.0), (6.0 * number + 1.5, 1.0), (6.0 * number + 4.5, 0.0)],
                ages={0: 6, 5: 4},
                trained_lengths={0: 1, 8: 3},
                rewards={"reward": 0.1 + number},
                metrics={"generated_tokens": 12.0, "overlap_tokens": 3.0, "trained_tokens": 10.0 + number},
            )
            for number in range(2)
        ]
        steps = [Step(1, [(5.0, 6.0)]), Step(2, [(11.0, 12.0)])]
        summary = summarise(Run(Path("x"), rounds, steps, {"max_staleness": 5, "max_completion_length": 3}))
        assert summary.seconds == 12.0 and summary.rounds == summary.steps == 2
        assert summary.shares == pytest.approx(
            {"sync": 1 / 12, "generation": 6 / 12, "abort": 2 / 12, "scoring": 1 / 12, "training": 2 / 12, "other": 0}
        )
        assert summary.engine_idle == pytest.approx(4 / 12)
        assert summary.half_empty == pytest.approx(6 / 12)
        assert summary.in_flight_mean == pytest.approx(14 / 12) and summary.in_flight_max == 4
        assert summary.generated_tokens == 30 and summary.trained_tokens == 21
        assert summary.trained_per_second == pytest.approx(21 / 12)
        assert summary.at_bound == pytest.approx(0.4) and summary.staleness_mean == pytest.approx(2.0)
        assert summary.lengths == {0.5: 3.0, 0.9: 3.0, 0.99: 3.0}  # the bin of 4, and no longer than can be
        assert (summary.reward_first, summary.reward_last) == (0.1, 1.1)

    def test_what_the_trainers_log_does_not_tell_is_unknown(self, folders):
        summary = summarise(read_run(folders["without"]))
        assert summary.seconds is summary.engine_idle is summary.trained_tokens is summary.at_bound is None
        assert summary.staleness_max is None and summary.staleness_mean is not None
        assert summary.shares == {}
        assert summary.lengths[0.99] > summary.lengths[0.5] > 0
        assert summary.sample_sizes["age_0"] == 1.0 and summary.reward_last > summary.reward_first

    def test_quantiles(self):
        assert quantile({0: 1, 4: 98, 12: 1}, 0.5) == 2.0
        assert quantile({0: 1, 4: 98, 12: 1}, 1.0) == 8.0
        with pytest.raises(ValueError, match="No completions"):
            quantile({}, 0.5)


# A run in which no rule has anything to say.
FINE = Summary(
    rounds=20,
    seconds=100.0,
    shares={"sync": 0.02, "generation": 0.9, "abort": 0.01, "scoring": 0.02, "training": 0.05},
    engine_idle=0.1,
    half_empty=0.1,
    at_bound=0.01,
    lengths={0.5: 100.0, 0.9: 400.0, 0.99: 1000.0},
    sample_sizes={"age_0": 1.0, "age_1": 0.95, "age_2": 0.9, "age_3+": 0.8},
    sync_seconds=0.5,
    abort_seconds=0.1,
    over_provisioning=2.0,
    options={"max_staleness": 5, "staleness_policy": "wait", "over_provisioning": 2.0},
)


def shares(**changed: float) -> dict[str, dict[str, float]]:
    return {"shares": {**FINE.shares, **changed}}


# Rules, what makes them speak, and what they say.
BAD = [
    (advice.at_the_bound, {"at_bound": 0.6}, "60% of the trained tokens are 5 versions old"),
    (advice.trainer_is_slow, {"engine_idle": 0.38}, "for 38% of the time.*set overlap_generation=True"),
    (
        advice.trainer_is_slow,
        {"engine_idle": 0.38, "options": {"overlap_generation": True}},
        "although overlap_generation is on: the trainer is the bottleneck",
    ),
    (advice.even_lengths, {"lengths": {0.5: 100.0, 0.99: 120.0}}, "Lengths are even.*over_provisioning=1.0"),
    (
        advice.even_lengths,
        {"lengths": {0.5: 100.0, 0.99: 120.0}, "over_provisioning": 1.0},
        "APRIL gains little here.$",
    ),
    (advice.sync_is_slow, shares(sync=0.2), 'took 20% of the time .0.5 s each.*weight_sync="nccl"'),
    (
        advice.sync_is_slow,
        {**shares(sync=0.2), "options": {"weight_sync": "nccl"}},
        "each.: a larger generation batch",
    ),
    (advice.scoring_is_slow, shares(scoring=0.3), "took 30% of the time: make the slowest reward function"),
    (advice.abort_is_slow, shares(abort=0.08), "took 0.1 s to end .8% of the time.*doctor"),
    (advice.stale_tokens_are_lost, {"sample_sizes": {"age_1": 0.5}}, "1 version old.*lower over_provisioning"),
    (
        advice.stale_tokens_are_lost,
        {"sample_sizes": {"age_1": 0.9, "age_2": 0.7, "age_3+": 0.41}},
        "3 versions old and older have.*0.41: of ten, 4 teach.*lower max_staleness to 2",
    ),
    (  # a bound of two versions would leave nothing to carry over from one round to the next
        advice.stale_tokens_are_lost,
        {"sample_sizes": {"age_3+": 0.41}, "options": {"versions_per_round": 16}},
        "3 versions old and older have.*lower over_provisioning",
    ),
    (advice.most_are_rejected, {"rejected": 0.7}, "rejected 70%"),
    (advice.connection_is_bad, {"outage_seconds": 12.0}, "away for 12 s"),
    (advice.connection_is_bad, {"broken_streams": 3.0}, "3 streams broke"),
]


class TestAdvice:
    def test_there_may_be_nothing_to_change(self):
        assert advice.advice(FINE) == [
            "Nothing to change: the engine was well used, and what was trained was young enough."
        ]

    @pytest.mark.parametrize("rounds, words", [(1, "1 round is too few"), (3, "3 rounds are too few")])
    def test_too_few_rounds_say_nothing_else(self, rounds, words):
        (sentence,) = advice.advice(replace(FINE, rounds=rounds, engine_idle=0.9))
        assert sentence.startswith(words)
        assert advice.too_few_rounds(replace(FINE, rounds=advice.FEW_ROUNDS)) is None

    @pytest.mark.parametrize(
        "changed, prediction, words",
        [
            ({"over_provisioning": 1.0}, None, "raise over_provisioning from 1 to 2, "),
            ({"over_provisioning": 1.0}, Prediction(2.5, 1.4), "from 1 to 2.5 (about 1.40 times the trained tokens"),
            ({"over_provisioning": 2.0}, None, "from 2 to 3, "),
            ({"over_provisioning": 6.0}, None, "the most that max_staleness=5 allows: raise max_staleness"),
            ({"over_provisioning": 5.5}, None, "from 5.5 to 6, "),
            ({"over_provisioning": 7.0, "options": {"max_staleness": None}}, None, "from 7 to 8, "),
            ({"over_provisioning": 1.0}, Prediction(1.0, 1.0), None),
            ({"over_provisioning": 1.0}, Prediction(2.0, 1.02), None),
            ({"options": {"over_provisioning": "auto"}}, None, None),
            ({"half_empty": 0.19}, None, None),
            ({"half_empty": None}, None, None),
        ],
    )
    def test_a_long_tail(self, changed, prediction, words):
        sentence = advice.long_tail(replace(FINE, **{"half_empty": 0.38, **changed}), prediction)
        if words is None:
            assert sentence is None
        else:
            assert sentence.startswith("For 38% of the time a round ran with less than half of its requests in flight")
            assert words in sentence

    @pytest.mark.parametrize("rule, changed, words", BAD)
    def test_every_rule_speaks_and_is_silent(self, rule, changed, words):
        bad = replace(FINE, **changed)
        assert re.search(words, rule(bad))
        assert rule(bad) in advice.advice(bad)
        assert rule(FINE) is None

    def test_no_rule_speaks_of_what_is_not_known(self):
        assert [rule(Summary(rounds=20)) for rule in advice.RULES] == [None] * len(advice.RULES)
        assert "log alone" in advice.advice(Summary(rounds=20))[0]

    def test_every_option_that_is_named_exists(self):
        """Whatever has an underscore in a sentence is a field of the config."""
        from trl_april.config import APRILGRPOConfig

        sentences = [rule(replace(FINE, **changed)) for rule, changed, _ in BAD]
        sentences.append(advice.long_tail(replace(FINE, half_empty=0.5)))
        named = set(re.findall(r"[a-z]+_[a-z_]+", " ".join(sentences)))
        assert "over_provisioning" in named and named <= set(APRILGRPOConfig.__dataclass_fields__)

    def test_a_synchronous_run_with_a_long_tail_is_told_its_factor(self, folders):
        run = read_run(folders["synchronous"])
        summary = summarise(run)
        prediction = predict(run, summary)
        assert prediction.factor > 1.5
        (sentence,) = advice.advice(summary, prediction)
        assert f"from 1 to {prediction.factor:g}" in sentence

    def test_the_prediction_is_what_happens(self, folders, tmp_path):
        """The same lengths under the factor that is named: as much faster as was said, within 15 %."""
        run = read_run(folders["synchronous"])
        before = summarise(run)
        prediction = predict(run, before)
        assert prediction.gain > 1.3
        WrittenRun(tmp_path, prediction.factor).go(60)
        after = summarise(read_run(tmp_path))
        assert after.trained_per_second / before.trained_per_second == pytest.approx(prediction.gain, rel=0.15)

    def test_with_overlap_the_time_of_training_is_one_to_generate_in(self, tmp_path):
        """So a batch is finished by the time that the last one is trained, whatever the factor."""
        gains = {}
        for seconds in (60.0, 0.1):
            folder = tmp_path / f"{seconds:g}"
            WrittenRun(folder, 1.0, training_seconds=seconds, overlap_generation=True).go(14)
            run = read_run(folder)
            gains[seconds] = predict(run, summarise(run)).gain
        assert gains[60.0] < 1.02 and gains[0.1] > 1.2

    def test_only_as_a_guarantee_the_bound_holds_rounds_open(self, folders):
        run = read_run(folders["synchronous"])
        gains = {}
        for policy in ("wait", "mask", "ignore"):
            options = {**run.options, "max_staleness": 1, "staleness_policy": policy}
            gains[policy] = predict(replace(run, options=options), summarise(run)).gain
        assert gains["mask"] == gains["ignore"] > gains["wait"]

    def test_requests_that_the_server_has_no_places_for_gain_less(self, folders):
        run = read_run(folders["synchronous"])
        gains = [
            predict(replace(run, options={**run.options, "max_sequences": places}), summarise(run)).gain
            for places in (32, 48, None)
        ]
        assert gains[0] < gains[1] < gains[2]

    def test_too_little_is_known_for_a_prediction(self, folders):
        run = read_run(folders["without"])
        assert predict(run, summarise(run)) is None
        run = read_run(folders["synchronous"])
        summary = summarise(run)
        for change in ({"quota": "8"}, {"group_size": 0}, {"max_staleness": -1}, {"quota": None}):
            strange = replace(run, options={**run.options, **change})
            assert predict(strange, summary) is None
        for points in ([], [(2.0, 0.1), (1.0, 0.2)], [(0.0, 0.1)], [(1.0, -1.0)]):
            rounds = [replace(one, step_times=points) for one in run.rounds]
            assert predict(replace(run, rounds=rounds), summary) is None


class TestTable:
    def test_two_runs_and_what_changes(self, folders):
        summaries = [summarise(read_run(folders[name])) for name in ("synchronous", "april")]
        found = {row.name: row for row in rows(summaries)}
        ratio = summaries[1].trained_per_second / summaries[0].trained_per_second
        assert found["trained tokens per second"].change == f"× {ratio:.2f}"
        assert found["staleness, mean"].values[0] == "0.00 versions"
        assert re.fullmatch(r"[+-]\d+ points", found["engine without requests"].change)
        assert found["rounds"] == ("rounds", ["14", "14"], "")
        assert "server away" not in found and "entries of the trainer's log" not in found

    def test_one_of_them_unknown(self, folders):
        summaries = [summarise(read_run(folders[name])) for name in ("without", "april")]
        found = {row.name: row for row in rows(summaries)}
        assert found["wall-clock"].values[0] == "–" and found["wall-clock"].change == ""
        assert found["entries of the trainer's log"].values == ["14", "–"]

    @pytest.mark.parametrize(
        "seconds, words",
        [(0.05, "50 ms"), (2.345, "2.35 s"), (119.0, "119 s"), (600.0, "10 min"), (7500.0, "2 h 05 min")],
    )
    def test_time_in_its_unit(self, seconds, words):
        assert duration(seconds) == words


class TestPlots:
    def test_a_step_curve_begins_with_what_holds(self):
        points = [(1.0, 5.0), (2.0, 4.0), (9.0, 0.0)]
        assert step_curve(points, 1.5, 4.0) == ([0.0, 0.5, 2.5], [5.0, 4.0, 4.0])
        assert step_curve(points, 0.0, 1.0) == ([0.0, 1.0], [0.0, 0.0])

    def test_two_runs_have_one_width_of_window(self, folders):
        runs = [read_run(folders[name]) for name in ("synchronous", "april", "one")]
        begins, width = window_of(runs[:2])
        assert begins == [run.rounds[3].generation[0] for run in runs[:2]]
        assert width == pytest.approx(runs[0].rounds[11].generation[0] - begins[0])
        assert window_of(runs[2:]) == ([0.0], runs[2].seconds)


class TestPage:
    def test_every_figure_can_do_without_data(self):
        """A run of which every batch was filled by what had been finished before, say."""
        one = RunRound(
            0, (0.0, 0.0), (0.0, 0.0), (0.0, 1.0), ages={0: 1}, trained_lengths={0: 1}, rewards={"reward": 1}
        )
        one.metrics = {"correction/age_0/effective_sample_size": 0.0}
        bare = RunRound(0, (0.0, 0.0), (0.0, 0.0), (0.0, 2.0))
        runs = [Run(Path("x"), [one]), Run(Path("y"), [bare])]
        found = pictures(runs, ["x", "y"])
        assert len(found) == 8
        for picture in found:
            assert picture.draw(NARROW).axes

    def test_a_long_name_is_shortened_in_figures(self):
        assert shortened("out") == "out"
        assert shortened("$x_1$") == r"\$x_1\$"
        for letter in "iMw$":
            short = shortened(f"begin-{60 * letter}-end")
            assert short.startswith("be") and "…" in short and short.endswith("nd")
            assert len(short) < 60

    def test_names_are_as_long_as_it_takes_to_tell_runs_apart(self):
        assert names_of([Path("/a/x/out"), Path("/a/y/out")]) == ["x/out", "y/out"]
        assert names_of([Path("/a/x"), Path("/b/y")]) == ["x", "y"]
        assert names_of([Path("/a/x"), Path("/a/x")]) == ["/a/x (1)", "/a/x (2)"]

    def test_whatever_comes_from_a_file_is_escaped(self, tmp_path):
        """Also what no XML and no UTF-8 can hold: control characters, and bytes of a name that are no text."""
        evil = "<script>alert(1)</script>"
        folder = tmp_path / "<img src=x> $\n\x01\udcff\N{CJK UNIFIED IDEOGRAPH-4E00}"
        WrittenRun(folder, 2.0, resume_kv=f"{evil}\ud800").go(1)
        run = read_run(folder)
        run.notes.append(evil)
        page = render([run, run])
        assert "<script" not in page and "<img" not in page
        assert page.count("&lt;script&gt;") == 4
        assert "$???\N{CJK UNIFIED IDEOGRAPH-4E00}" in page
        page.encode("utf-8")

    def test_it_asks_for_nothing_from_outside(self, page_of):
        class Addresses(HTMLParser):
            found: list[str] = []

            def handle_starttag(self, tag, attributes):
                assert tag not in ("script", "link", "iframe", "object", "embed", "img", "base", "form"), tag
                for name, value in attributes:
                    if name in ("src", "href", "xlink:href", "action", "data", "srcset") or "url(" in (value or ""):
                        self.found.append(value)

        page = page_of("april")
        parser = Addresses()
        parser.feed(page)
        assert parser.found and all(re.search(r"^#|url\(#", value) for value in parser.found)
        assert "@import" not in page and "url(http" not in page
        assert "default-src 'none'" in page

    def test_ids_are_unique_and_every_reference_has_one(self, page_of):
        page = page_of("synchronous", "april")
        ids = re.findall(r'\sid="([^"]+)"', page)
        assert len(ids) == len(set(ids)) > 100
        assert {*re.findall(r'href="#([^"]+)"', page), *re.findall(r"url\(#([^)]+)\)", page)} <= set(ids)
        for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
            assert ElementTree.fromstring(svg).get("aria-label")

    def test_the_command(self, folders, tmp_path, capsys):
        output = tmp_path / "page.html"
        assert cli.main(["report", str(folders["without"]), "--output", str(output)]) == 0
        said = capsys.readouterr().out
        assert f"Written to {output}" in said and f"There is no {FILE}" in said
        assert output.read_text().startswith("<!DOCTYPE html>")

    @pytest.mark.parametrize(
        "arguments, words",
        [
            (["nowhere"], "There is no folder 'nowhere'"),
            (["{april}", "nowhere"], "There is no folder 'nowhere'"),
            (["{april}", "--output", "{april}/not/there.html"], "there is no folder"),
            (["{april}", "--output", "{april}"], "cannot be written"),
        ],
    )
    def test_what_cannot_be_is_a_sentence(self, folders, arguments, words, capsys, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("trl_april.report.page.render", lambda runs: "page")
        assert cli.main(["report", *(one.format(april=folders["april"]) for one in arguments)]) == 1
        assert words in capsys.readouterr().err

    def test_without_matplotlib_it_says_how_to_get_it(self, folders, monkeypatch, capsys):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else object())
        assert cli.main(["report", str(folders["april"])]) == 1
        assert "pip install 'trl-april[plots]'" in capsys.readouterr().err


# For every visible figure: labels that overlap another, stick out of the figure, or are too small to be read. For the
# page: what is wider than it is shown.
LOOK = """(() => {
  const wrong = [];
  const visible = [...document.querySelectorAll("figure")].map(figure => {
    const shown = [...figure.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width > 0);
    const title = figure.querySelector("h3").textContent;
    if (shown.length !== 1) wrong.push(`${title}: ${shown.length} pictures are shown`);
    return [title, shown[0]];
  });
  for (const [title, svg] of visible) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(text => {
      const size = parseFloat(getComputedStyle(text).fontSize) * frame.width / svg.viewBox.baseVal.width;
      if (size < 10) wrong.push(`${title}: '${text.textContent}' has ${size.toFixed(1)} px`);
      return [text.textContent.trim(), text.getBoundingClientRect()];
    }).filter(([text]) => text);
    if (!texts.length) wrong.push(`${title}: no labels`);
    texts.forEach(([text, a], i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 || a.bottom > frame.bottom + 1)
        wrong.push(`${title}: '${text}' is cut`);
      for (const [other, b] of texts.slice(i + 1)) {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 1 && down > 1) wrong.push(`${title}: '${text}' and '${other}' overlap`);
      }
    });
  }
  for (const element of document.querySelectorAll("h1, h2, h3, p, li, th, td, figcaption, footer"))
    if (element.scrollWidth > element.clientWidth + 1) wrong.push(`'${element.textContent}' is cut`);
  const page = document.scrollingElement;
  if (page.scrollWidth > innerWidth) wrong.push(`the page is ${page.scrollWidth} px wide`);
  return wrong;
})()"""


@pytest.fixture(scope="module")
def browser():
    if chromium() is None:
        if os.environ.get("CI") == "true":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    with Browser() as running:
        yield running


PAGES = [["synchronous", "april"], ["april"], ["one"], ["without"], [NAME, "without"]]


@pytest.mark.parametrize("names", PAGES, ids=lambda names: "-".join(name[:11] for name in names))
def test_no_label_is_cut_or_overlaps_and_nothing_is_asked_for(browser, page_of, tmp_path, names):
    """At the width of a screen and of a telephone."""
    page = tmp_path / "report.html"
    page.write_text(page_of(*names), encoding="utf-8")
    for width in (1280, 400):
        assert browser.open(page, width) == [page.as_uri()]
        assert browser.evaluate("innerWidth") == width
        assert browser.evaluate(LOOK) == []
        assert browser.evaluate("document.querySelectorAll('figure').length") >= 3


@pytest.mark.parametrize(
    "content, words",
    [
        ('<text x="10" y="30">label</text><text x="12" y="32">other</text>', "'label' and 'other' overlap"),
        ('<text x="80" y="30">a long label</text>', "'a long label' is cut"),
        ('<text x="10" y="30" style="font-size: 7px">label</text>', "has 7.0 px"),
        ('</svg><svg viewBox="0 0 100 50" width="100" height="50"><text x="1" y="20">a</text>', "2 pictures"),
        ('<text x="1" y="20">a</text></svg><p style="width: 2000px">wide', "the page is 20"),
    ],
)
def test_the_look_sees_what_is_wrong(browser, tmp_path, content, words):
    page = tmp_path / "wrong.html"
    svg = f'<svg viewBox="0 0 100 50" width="100" height="50" style="font-size: 12px">{content}</svg>'
    page.write_text(f"<!DOCTYPE html><body><figure><h3>A</h3>{svg}</figure>")
    browser.open(page, 400)
    assert any(words in one for one in browser.evaluate(LOOK))


def test_the_browser_sees_requests(browser, tmp_path):
    """Otherwise the test above would prove nothing."""
    page = tmp_path / "asks.html"
    page.write_text('<!DOCTYPE html><img src="other.png">')
    assert len(browser.open(page, 400)) == 2


class TestMakeChromium:
    """`make chromium`, where only some programs are found."""

    APT = 'echo "$@" >>"{folder}/asked"'

    def make(self, folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
        make = shutil.which("make")
        assert make is not None
        for name, script in {"id": "echo 1000", **programs}.items():
            path = folder / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{script.format(folder=folder)}\n")
            path.chmod(0o755)
        done = subprocess.run(
            [make, "chromium"], cwd=ROOT, env={"PATH": str(folder)}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done

    def test_where_there_is_one_nothing_is_done(self, tmp_path):
        done = self.make(tmp_path, id="echo 0", chromium="", apt_get=self.APT)
        assert done.stdout == done.stderr == "" and not (tmp_path / "asked").exists()

    @pytest.mark.parametrize(
        "programs", [{"id": "echo 0"}, {"sudo": '[ "$2" = true ] && exit 0; shift; exec "$@"'}], ids=["root", "sudo"]
    )
    def test_it_is_installed_by_apt(self, tmp_path, programs):
        done = self.make(tmp_path, apt_get=self.APT, **programs)
        assert done.stderr == ""
        update, install = (tmp_path / "asked").read_text().splitlines()
        assert update.startswith("update") and install.endswith("--no-install-recommends chromium")

    @pytest.mark.parametrize(
        "programs",
        [{}, {"apt_get": "exit 0"}, {"apt_get": "exit 0", "sudo": "exit 1"}, {"id": "echo 0", "apt_get": "exit 1"}],
        ids=["no apt", "no sudo", "no password", "no network"],
    )
    def test_otherwise_it_says_what_to_install(self, tmp_path, programs):
        (line,) = self.make(tmp_path, **programs).stderr.splitlines()
        assert 'install the package "chromium"' in line
