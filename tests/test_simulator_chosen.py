"""`over_provisioning="auto"` in a simulation: it chooses by what training would tell it, and is held to the best."""

import re
from dataclasses import replace

import pytest

from trl_april import cli
from trl_april.errors import ConfigError
from trl_april.simulator.clock import simulate
from trl_april.simulator.grid import Grid, simulate_grid
from trl_april.simulator.lengths import Lognormal
from trl_april.simulator.recommend import recommend
from trl_april.simulator.result import Mode, Result
from trl_april.simulator.run import _Simulation, run
from trl_april.simulator.scenario import Scenario
from trl_april.simulator.step_time import EXAMPLE, parse_step_time


CPU = parse_step_time(EXAMPLE, 2e-5)


def scenario(sigma=0.5, **settings):
    """The server of docs/benchmarks.md, where engine, API server and client share two cores."""
    costs = dict(request_stall_seconds=0.0012, request_seconds=0.0012, train_seconds=0.2, max_sequences=128)
    return Scenario(CPU, Lognormal(100, sigma, 8, 1000), **{**costs, "max_staleness": 10, **settings})


@pytest.mark.parametrize(
    ("sigma", "mode"),
    [
        (0.5, Mode.ABORT), (0.0, Mode.BOTH), (0.5, Mode.REUSE), (0.5, Mode.KEEP), (1.0, Mode.OVERLAP),
        (0.0, Mode.ABORT), (0.01, Mode.ABORT), (0.0, Mode.REUSE), (0.0, Mode.OVERLAP), (1.0, Mode.KEEP),
    ],
)  # fmt: skip
def test_after_ten_rounds_no_factor_is_faster_by_more_than_a_twentieth(sigma, mode):
    """Tokens generated, all of which are trained: which of them are within so few rounds is chance."""
    grid = simulate_grid(scenario(sigma, rounds=40), [mode], [1.5, 2.0, 3.0, 4.0, 6.0, "auto"])
    chosen = grid.results[-1]
    assert chosen.is_chosen
    fixed = {result.factor: result.generated_per_second for result in grid.results[:-1]}
    assert chosen.generated_per_second >= 0.95 * max(fixed.values()), (chosen.factor, fixed)


@pytest.mark.parametrize("quantum", [1, 4])
def test_the_first_token_of_a_request_comes_when_its_prefill_is_done(quantum):
    """Requests come every 0.1 s, each with 10 tokens to prefill for 1 s each, beside steps of 2 s."""
    settings = scenario(
        0.0, quota=1, group_size=2, prompt_tokens=10, request_seconds=0.1, request_stall_seconds=0.0, kv_block=10,
        warmup=0, rounds=1, quantum=quantum, train_seconds=0.0,
    )  # fmt: skip
    settings = replace(settings, step_time=parse_step_time("1:2,8:2", 1.0))
    simulation = _Simulation(settings, Mode.ABORT, "auto")
    seen = []
    simulation._chosen._chooser.observe = lambda done, groups, **times: seen.append(done)
    simulate(simulation.run())
    spans = {(span.group_id, span.index): span for span in seen[0].spans}
    assert len(spans) == 4
    for sample, span in spans.items():
        # The first is alone in its step, and the other three are prefilled in the next.
        first = 0.1 + 2 + 10 + (0 if sample == (0, 0) else 2 + 30)
        assert span.first == pytest.approx(first)
        assert span.head == (1 if quantum == 1 else 0)
        if span.finished:
            assert span.ended >= first + 99 * 2 - 1e-6


@pytest.mark.parametrize(("prompt_tokens", "quantum"), [(16, 1), (100, 1), (100, 16)])
def test_the_prompt_is_as_long_as_what_is_prefilled(prompt_tokens, quantum):
    """What one token of it costs is learned from its length."""
    settings = scenario(0.0, prompt_tokens=prompt_tokens, quantum=quantum, warmup=0, rounds=3)
    simulation = _Simulation(settings, Mode.ABORT, "auto")
    simulate(simulation.run())
    assert simulation._chosen._chooser._prompts.value == pytest.approx(settings.units(prompt_tokens))


def test_only_what_is_measured_counts_for_the_factor_that_is_shown():
    short, long = (run(scenario(warmup=warmup, rounds=1), Mode.BOTH, "auto") for warmup in (0, 12))
    assert short.factor == 2.0  # what it begins with
    assert long.factor > 2.0
    assert short.is_chosen and long.is_chosen


def test_nobody_is_told_what_training_would_not_tell():
    """The lengths of what is not finished are drawn, and known to the simulation alone."""
    simulation = _Simulation(scenario(1.0, warmup=0, rounds=3), Mode.ABORT, "auto")
    simulate(simulation.run())
    known = simulation._chosen._chooser._lengths.groups()
    assert known
    admitted = {tuple(simulation.engine.lengths(group_id)) for group_id in range(simulation._next_id)}
    assert not {tuple(lengths) for lengths in known} <= admitted, "some are not finished, and estimated"


def test_with_auto_all_configurations_have_ten_rounds_before():
    grids = [simulate_grid(scenario(warmup=2, rounds=2), [Mode.ABORT], factors) for factors in ([2.0], [2.0, "auto"])]
    assert [grid.scenario.warmup for grid in grids] == [2, 10]
    later = run(scenario(warmup=10, rounds=2), Mode.ABORT, 2.0)
    assert grids[1].results[1] == later
    assert simulate_grid(scenario(warmup=12), [], ["auto"]).scenario.warmup == 12


def test_what_cannot_be_trained_has_nothing_to_choose():
    grid = simulate_grid(scenario(rounds=2), [Mode.DISCARD, Mode.UNINTERRUPTED, Mode.REUSE], [1.5, "auto"])
    assert [result.mode for result in grid.results if result.is_chosen] == [Mode.REUSE]
    assert [reason.split(":")[0] for reason in grid.left_out] == [
        "discard with factor auto is left out", "uninterrupted with factor auto is left out",
    ]  # fmt: skip


def test_the_table_holds_it_against_the_best_fixed_factor(capsys):
    arguments = "--modes abort both discard --factors 1.5 3 auto --rounds 2 --warmup 2 --train-seconds 0.2"
    assert cli.main(["simulate", *arguments.split()]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[:2] for line in printed.splitlines() if " auto " in line[:22]] == [
        ["abort", "auto"], ["both", "auto"],
    ]  # fmt: skip
    _, explained = printed.split("as a share of the best fixed factor's:\n")
    for line, mode in zip(explained.splitlines(), ("abort", "both"), strict=False):
        assert re.fullmatch(rf"\s+{mode}\s+\d\.\d\d   [01]\.\d\d of factor (1\.5|3)", line), line


def test_what_is_neither_a_number_nor_auto_is_refused():
    with pytest.raises(ConfigError, match="over_provisioning is 'best'; it must be a number .* or 'auto'"):
        simulate_grid(scenario(), [Mode.ABORT], [2.0, "best"])


def test_the_bound_is_kept():
    result = run(scenario(max_staleness=1, warmup=10), Mode.BOTH, "auto")
    assert result.factor <= 2.0
    assert result.staleness_max <= 1


def test_it_can_be_recommended():
    grid = Grid(scenario(max_staleness=5))
    grid.results += [
        Result(Mode.SYNCHRONOUS, 1.0, seconds=1.0, trained_tokens=10, ages={0: 10}),
        Result(Mode.ABORT, 2.0, seconds=1.0, trained_tokens=12, ages={0: 10}),
        Result(Mode.ABORT, 2.9, True, seconds=1.0, trained_tokens=20, ages={0: 10}),
    ]
    assert recommend(grid).settings == {"over_provisioning": "auto", "max_staleness": 5}


def test_the_pool_begins_with_what_the_chooser_begins_with():
    simulation = _Simulation(replace(scenario(), max_staleness=0), Mode.ABORT, "auto")
    assert simulation.pool.over_provisioning == 1.0
    assert _Simulation(scenario(), Mode.ABORT, "auto").pool.over_provisioning == 2.0
