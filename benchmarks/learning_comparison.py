"""Tables and a picture of synchronous GRPO and APRIL over several seeds, from the runs of `benchmarks/learning.py`.

The two runs of one seed are compared as a pair, so an easy or hard seed does not matter.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from intervals import at, effective_share, first_reached, interval, lower_bound, smoothed
from report import markdown, new_figure


SYNCHRONOUS, APRIL, PAPER = "synchronous", "APRIL", "paper's schedule"
COLORS = {SYNCHRONOUS: "#c8691c", APRIL: "#1f6fb4"}  # told apart with any colour vision
SMOOTHED_STEPS = 10  # over which a reward is averaged
MARGIN = 0.02  # acceptable loss of reward
POINTS_DRAWN = 60


@dataclass(slots=True)
class Run:
    """
    One training.

    Args:
        recipe (`str`):
            Name of the recipe.
        seed (`int`):
            Selects prompts and their order.
        mode (`str`):
            `"synchronous"`, `"APRIL"` or `"paper's schedule"`.
        seconds (`float`):
            Wall-clock of the training.
        rollout_seconds (`float`):
            Time of its rounds.
        trained_tokens (`int`):
            Tokens of the trained completions.
        carried_tokens (`int`):
            Trained tokens that were sampled in an earlier round.
        staleness_mean (`float`):
            Mean age of a trained token in policy versions.
        staleness_max (`int`):
            Age of the oldest trained token.
        reward_after (`float`):
            Reward on held-out prompts at the end.
        solved_after (`float`):
            Share of the prompts answered without a mistake.
        curve (`list[tuple[int, float, float]]`):
            Steps done, seconds since the start, and reward on held-out prompts.
        lengths (`list[tuple[int, float]]`):
            For every batch, the first step that trains it, and the mean length of its completions.
        weights (`list[tuple[int, float, float, float]]`):
            Age, number of tokens, sum of their importance weights, sum of the squares.
        old_tokens (`list[tuple[int, float, float]]`):
            For every batch with tokens of at least three versions, the step, and the mean and effective sample size of
            their importance ratios. Empty in older files.
    """

    recipe: str
    seed: int
    mode: str
    seconds: float
    rollout_seconds: float
    trained_tokens: int
    carried_tokens: int
    staleness_mean: float
    staleness_max: int
    reward_after: float
    solved_after: float
    curve: list[tuple[int, float, float]]
    lengths: list[tuple[int, float]]
    weights: list[tuple[int, float, float, float]]
    old_tokens: list[tuple[int, float, float]] = field(default_factory=list)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`, also after a round trip through JSON."""
        names = ("curve", "lengths", "weights", "old_tokens")
        lists = {name: [tuple(entry) for entry in values.get(name, [])] for name in names}
        return cls(**{**values, **lists})

    @property
    def steps(self) -> list[int]:
        return [step for step, _, _ in self.curve]

    @property
    def times(self) -> list[float]:
        return [seconds for _, seconds, _ in self.curve]

    @property
    def rewards(self) -> list[float]:
        """Each the mean of the last ten steps, as far as the curve has points in them."""
        every = self.steps[1] - self.steps[0]
        return smoothed([reward for _, _, reward in self.curve], max(1, SMOOTHED_STEPS // every))


def pairs_of(runs: Iterable[Run], recipe: str, mode: str = APRIL) -> list[tuple[Run, Run]]:
    """The synchronous run and the run of this mode of every seed that has both."""
    by_seed: dict[int, dict[str, Run]] = {}
    for run in runs:
        if run.recipe == recipe:
            by_seed.setdefault(run.seed, {})[run.mode] = run
    return [(by[SYNCHRONOUS], by[mode]) for _, by in sorted(by_seed.items()) if {SYNCHRONOUS, mode} <= by.keys()]


def recipes_of(runs: Iterable[Run]) -> list[str]:
    """Recipes with a pair of runs, in order."""
    runs = list(runs)
    return [recipe for recipe in dict.fromkeys(run.recipe for run in runs) if pairs_of(runs, recipe)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    The pairs of one recipe.

    Args:
        reward (`tuple[list[float], list[float]]`):
            Rewards after as many steps as the synchronous run has, synchronous and APRIL.
        faster (`list[float]`):
            Wall-clock of the synchronous run by that of APRIL, for as many steps.
        at_equal_time (`list[float]`):
            Reward of APRIL minus that of the synchronous run when the first of the two ends.
        reached (`list[float]`):
            When APRIL first has the reward that the synchronous run ends with, as a share of that run's wall-clock.
            Infinite if never.
        reached_itself (`list[float]`):
            The same for the synchronous run: a noisy curve is at its last value before its end. What is below it is
            APRIL's doing.
    """

    reward: tuple[list[float], list[float]]
    faster: list[float]
    at_equal_time: list[float]
    reached: list[float]
    reached_itself: list[float]

    @property
    def differences(self) -> list[float]:
        return [april - synchronous for synchronous, april in zip(*self.reward, strict=True)]


def compare(pairs: Sequence[tuple[Run, Run]]) -> Comparison:
    """Compare the pairs of one recipe."""
    at_equal_time, reached, reached_itself = [], [], []
    rewards: tuple[list[float], list[float]] = ([], [])
    faster = []
    for synchronous, april in pairs:
        steps = synchronous.steps[-1]
        for run, values in zip((synchronous, april), rewards, strict=True):
            values.append(at(run.steps, run.rewards, steps))
        faster.append(synchronous.times[-1] / at(april.steps, april.times, steps))
        end = min(synchronous.times[-1], april.times[-1])
        at_equal_time.append(
            at(april.times, april.rewards, end) - at(synchronous.times, synchronous.rewards, end),
        )
        target = synchronous.rewards[-1]
        reached.append(first_reached(april.times, april.rewards, target) / synchronous.times[-1])
        reached_itself.append(
            first_reached(synchronous.times, synchronous.rewards, target) / synchronous.times[-1],
        )
    return Comparison(
        reward=rewards,
        faster=faster,
        at_equal_time=at_equal_time,
        reached=reached,
        reached_itself=reached_itself,
    )


def pooled_weights(runs: Iterable[Run]) -> dict[int, tuple[float, float, float]]:
    """Number, sum and sum of squares of the importance weights by age, over all runs."""
    pooled: dict[int, tuple[float, float, float]] = {}
    for run in runs:
        for age, *sums in run.weights:
            known = pooled.get(age, (0.0, 0.0, 0.0))
            pooled[age] = (known[0] + sums[0], known[1] + sums[1], known[2] + sums[2])
    return dict(sorted(pooled.items()))


def length_by_third(run: Run, steps: float = math.inf) -> list[float]:
    """Mean trained length in the first, second and last third of the batches of so many steps."""
    lengths = [length for step, length in run.lengths if step < steps]
    cuts = [round(len(lengths) * third / 3) for third in range(4)]
    return [statistics.fmean(lengths[a:b]) if b > a else math.nan for a, b in zip(cuts, cuts[1:], strict=False)]


# Tables


def _with_interval(values: Sequence[float], form: str = "{:.3f}") -> str:
    mean, half = interval(values)
    return form.format(mean) + ("" if math.isnan(half) else f" ± {form.format(half)}")


def _share(values: Sequence[float]) -> str:
    median = statistics.median(values)
    return "never" if math.isinf(median) else f"{median:.0%}"


def learned(runs: Sequence[Run]) -> str:
    """Table of rewards and times."""
    rows = []
    for recipe, mode in itertools.product(recipes_of(runs), (APRIL, PAPER)):
        pairs = pairs_of(runs, recipe, mode)
        if not pairs:
            continue
        found = compare(pairs)
        bound = lower_bound(found.differences)
        rows.append(
            [
                recipe,
                mode,
                str(len(pairs)),
                _with_interval(found.reward[0]),
                _with_interval(found.reward[1]),
                _with_interval(found.differences, "{:+.3f}").replace("± +", "± "),
                "one seed" if math.isnan(bound) else f"{bound:+.3f}" + ("" if bound >= -MARGIN else " (not shown)"),
                f"x {_with_interval(found.faster, '{:.2f}')}",
                _with_interval(found.at_equal_time, "{:+.3f}").replace("± +", "± "),
                _share(found.reached),
                _share(found.reached_itself),
            ]
        )
    header = (
        "recipe", "mode", "seeds", "reward after, synchronous", "reward after", "difference",
        f"not worse than (95 %; must be above -{MARGIN:g})", "faster for as many steps",
        "difference at equal wall-clock", "synchronous result reached after", "by synchronous itself",
    )  # fmt: skip
    return markdown(header, rows)


def lengths(runs: Sequence[Run]) -> str:
    """Table of trained lengths. A bias towards short completions would show as a drift."""
    rows = []
    for recipe in recipes_of(runs):
        pairs = pairs_of(runs, recipe)
        steps = min(one.steps[-1] for one, _ in pairs)
        chosen_of = {
            SYNCHRONOUS: [one for one, _ in pairs],
            **{mode: [other for _, other in pairs_of(runs, recipe, mode)] for mode in (APRIL, PAPER)},
        }
        for mode, chosen in chosen_of.items():
            if not chosen:
                continue
            thirds = zip(*(length_by_third(run, steps) for run in chosen), strict=True)
            every = [statistics.fmean(length for step, length in run.lengths if step < steps) for run in chosen]
            rows.append([recipe, mode, *(_with_interval(third, "{:.0f}") for third in (*thirds, every))])
    return markdown(("recipe", "mode", "first third of the steps", "second", "last", "all"), rows)


def effective_sizes(runs: Sequence[Run]) -> str:
    """Table of the APRIL runs' effective sample sizes by age."""
    rows = []
    for recipe in recipes_of(runs):
        pooled = pooled_weights(run for run in runs if run.recipe == recipe and run.mode == APRIL)
        total = sum(count for count, _, _ in pooled.values())
        rows += [
            [
                recipe,
                str(age),
                f"{count / total:.1%}",
                f"{weights / count:.3f}",
                f"{effective_share(count, weights, squares):.3f}",
            ]
            for age, (count, weights, squares) in pooled.items()
        ]
    header = ("recipe", "age in policy versions", "share of the tokens", "mean weight", "effective sample size")
    return markdown(header, rows)


def tables(runs: Sequence[Run]) -> str:
    """All tables."""
    if not recipes_of(runs):
        return "No seed has both runs yet."
    return (
        f"Rewards on held-out prompts: mean over seeds with the 95 % interval. Times: medians.\n\n{learned(runs)}\n\n"
        f"Mean length of the trained completions, in tokens:\n\n{lengths(runs)}\n\n"
        f"Importance weights of APRIL's tokens by age, all seeds together:\n\n{effective_sizes(runs)}"
    )


# Picture


def _draw_band(axes: Any, curves: Sequence[tuple[Sequence[float], Sequence[float]]], mode: str) -> None:
    """Plot the mean of the curves with its 95 % interval, up to the end of the shortest."""
    end = min(positions[-1] for positions, _ in curves)
    grid = [end * i / (POINTS_DRAWN - 1) for i in range(POINTS_DRAWN)]
    bands = [interval([at(*curve, position) for curve in curves]) for position in grid]
    axes.plot(grid, [mean for mean, _ in bands], color=COLORS[mode], linewidth=2, label=mode)
    axes.fill_between(
        grid,
        [mean - half for mean, half in bands],
        [mean + half for mean, half in bands],
        color=COLORS[mode],
        alpha=0.2,
        linewidth=0,
    )


def _draw_sizes(axes: Any, runs: Sequence[Run]) -> None:
    pooled = pooled_weights(run for run in runs if run.mode == APRIL)
    axes.bar(
        [str(age) for age in pooled],
        [effective_share(*sums) for sums in pooled.values()],
        color=COLORS[APRIL],
        width=0.7,
    )
    total = sum(count for count, _, _ in pooled.values())
    for position, (count, _, _) in enumerate(pooled.values()):
        axes.annotate(f"{count / total:.0%}", (position, 0.02), ha="center", fontsize=8, color="white")
    axes.set_ylim(0, 1)
    axes.set_xlabel("age of tokens in policy versions (in the bars: share of the tokens)")


def draw(runs: Sequence[Run], path: Path) -> None:
    """
    Draws the picture: a column per recipe.

    Args:
        runs (`Sequence[Run]`):
            All runs so far.
        path (`Path`):
            File to write; its suffix decides on the format.
    """
    recipes = recipes_of(runs)
    if not recipes:
        return
    figure = new_figure(5.2 * len(recipes), 12.5)
    grid = figure.subplots(4, len(recipes), squeeze=False, sharey="row")
    for column, recipe in enumerate(recipes):
        pairs = pairs_of(runs, recipe)
        over_time, over_steps, lengths_axes, sizes = grid[:, column]
        for mode, chosen in ((SYNCHRONOUS, [one for one, _ in pairs]), (APRIL, [other for _, other in pairs])):
            _draw_band(over_time, [(run.times, run.rewards) for run in chosen], mode)
            _draw_band(over_steps, [(run.steps, run.rewards) for run in chosen], mode)
            trained = [
                ([step for step, _ in run.lengths], smoothed([n for _, n in run.lengths], SMOOTHED_STEPS // 2))
                for run in chosen
            ]
            _draw_band(lengths_axes, trained, mode)
        _draw_sizes(sizes, [run for run in runs if run.recipe == recipe])
        over_time.set_title(f"{recipe}, {len(pairs)} seeds", loc="left", fontsize=11)
        over_time.set_xlabel("seconds of training")
        over_steps.set_xlabel("optimizer steps")
        lengths_axes.set_xlabel("optimizer steps")
        lengths_axes.set_ylim(bottom=0)
    for axes, label in zip(
        grid[:, 0],
        ("reward, held out", "reward, held out", "mean trained length", "effective sample size"),
        strict=True,
    ):
        axes.set_ylabel(label)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[0]:
        axes.legend(loc="lower right", fontsize=9)
    figure.savefig(path)
