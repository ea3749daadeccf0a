"""Writes the measured tables of README.md, docs/benchmarks.md, docs/internals.md and benchmarks/README.md.

    python benchmarks/measured_tables.py            # write
    python benchmarks/measured_tables.py --check    # exit with 1 if a page is out of date

A page has a table between `<!-- measured: NAME -->` and `<!-- end -->`; NAME is a function of `TABLES`. All figures
come from `docs/measured`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import drafts
import learning_comparison
import overhead
import peers
import rollout_report
import scale
import stress
from intervals import interval, lower_bound
from learning_comparison import SYNCHRONOUS, compare, pairs_of
from peers_tools import SAMPLES
from report import markdown, read_json


ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "measured"
PAGES = ("README.md", "docs/benchmarks.md", "docs/internals.md", "benchmarks/README.md")
BLOCK = re.compile(r"(<!-- measured: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def results(name: str) -> list[dict[str, Any]]:
    return read_json(MEASURED / f"{name}.json")[1]


def trainings(name: str) -> list[learning_comparison.Run]:
    return [learning_comparison.Run.from_dict(result) for result in results(name)]


def signed(values: Sequence[float]) -> str:
    """Mean and 95 % interval of differences."""
    mean, half = interval(values)
    return f"{mean:+.3f} ± {half:.3f}"


def spread(values: Sequence[float], form: str = "{:,.0f}") -> str:
    """Median and range."""
    return f"{form.format(statistics.median(values))} ({form.format(min(values))} to {form.format(max(values))})"


# TRL's async trainer


def contestants(*files: str) -> dict[str, dict[int, peers.Run]]:
    """Trainings by contestant and seed."""
    found: dict[str, dict[int, peers.Run]] = {}
    for result in (result for name in files for result in results(name)):
        run = peers.Run(**result)
        found.setdefault(run.contestant, {})[run.seed] = run
    return found


def final_reward(run: peers.Run) -> float:
    return peers.smooth(run)[2][-1]


def rate(run: peers.Run) -> float:
    return run.trained_tokens / run.seconds


def compared_rows(found: dict[str, dict[int, peers.Run]], reference: str) -> list[list[str]]:
    """A row per contestant; ratios and differences are to the reference's training of the same seed."""
    rows = []
    for name, by_seed in found.items():
        runs = list(by_seed.values())
        pairs = [(run, found[reference][seed]) for seed, run in by_seed.items() if seed in found[reference]]
        differences = [final_reward(run) - final_reward(other) for run, other in pairs]
        dropped = [run.dropped_tokens / (run.trained_tokens + run.dropped_tokens) for run in runs]
        rows.append([
            name, str(len(runs)), spread([run.seconds for run in runs]), spread([rate(run) for run in runs]),
            "1" if name == reference else spread([rate(run) / rate(other) for run, other in pairs], "{:.2f}"),
            f"{statistics.median(dropped):.0%}", f"{statistics.fmean(run.mean_length for run in runs):.0f}",
            str(max(run.oldest for run in runs)), f"{statistics.fmean(map(final_reward, runs)):.3f}",
            signed(differences) if len(differences) > 1 and name != reference else "",
        ])  # fmt: skip
    return rows


def compared_header(reference: str) -> list[str]:
    return [
        "trainer", "seeds", "seconds", "trained tok/s (range)", f"by {reference} (range)", "tokens dropped",
        "mean length", "oldest token", "final reward", f"minus {reference} (95 %)",
    ]  # fmt: skip


def headline() -> str:
    found = contestants("peers")
    names = {
        "synchronous": "synchronous (`over_provisioning=1.0`)",
        "default": "trl-april, default options",
        "trl-16-96": "TRL `AsyncGRPOTrainer`, bound 16",
    }
    chosen = {name: found[name] for name in names}
    columns = [0, 1, 2, 3, 5, 8, 9]
    header = compared_header("synchronous")
    rows = [[names[row[0]], *row[1:]] for row in compared_rows(chosen, "synchronous")]
    return markdown([header[n] for n in columns], [[row[n] for n in columns] for row in rows])


def peers_table() -> str:
    return markdown(compared_header("synchronous"), compared_rows(contestants("peers"), "synchronous"))


def split_devices() -> str:
    found = {name: runs for name, runs in contestants("peers_split").items() if not name.endswith("-192")}
    ordered = {name: found[name] for name in sorted(found, key=lambda name: list(map(int, re.findall(r"\d+", name))))}
    return markdown(compared_header("synchronous"), compared_rows(ordered, "synchronous"))


def best_at(
    found: dict[str, dict[int, peers.Run]], bound: int, *, own: bool = False
) -> tuple[dict[int, peers.Run], dict[int, peers.Run]]:
    """Our trainings and TRL's at a staleness bound, each with the setting of the highest median rate.

    Batches are equal, or of the size of TRL's `own`.
    """
    of_size = [name for name in found if name.endswith("-own") == own]
    ours = [name for name in of_size if name.startswith(f"ours-{bound}-") or (name == "default" and bound == 8)]
    theirs = [name for name in of_size if name.startswith(f"trl-{bound}-")]
    best = [max((found[name] for name in names), key=lambda runs: statistics.median(map(rate, runs.values())))
            for names in (ours, theirs)]  # fmt: skip
    return best[0], best[1]


def by_theirs(found: dict[str, dict[int, peers.Run]], bound: int, *, own: bool = False) -> str:
    """Our trained tokens per second by TRL's, each seed by itself."""
    ours, theirs = best_at(found, bound, own=own)
    return spread([rate(ours[seed]) / rate(run) for seed, run in theirs.items() if seed in ours], "{:.2f}")


def dropped(found: dict[str, dict[int, peers.Run]], bound: int) -> str:
    """The share of tokens that TRL's trainer drops."""
    runs = best_at(found, bound)[1].values()
    return f"{statistics.median(run.dropped_tokens / (run.dropped_tokens + run.trained_tokens) for run in runs):.0%}"


def in_flight() -> str:
    found = contestants("peers_in_flight_4_16", "peers_in_flight_8")
    at_8, others = contestants("peers_in_flight_8"), contestants("peers_in_flight_4_16")
    # The two files were measured one after the other, so each has its own reference.
    rows = [*compared_rows(at_8, "default"), *compared_rows(others, "default")]
    assert len(found) == len({row[0] for row in rows})
    return markdown(compared_header("default"), rows)


def peers_long() -> str:
    return markdown(compared_header("default"), compared_rows(contestants("peers_long"), "default"))


def slow_rewards() -> str:
    return markdown(compared_header("default"), compared_rows(contestants("peers_slow_rewards"), "default"))


def tools(name: str = "peers_tools") -> str:
    runs = results(name)
    reference = {run["seed"]: run for run in runs if run["contestant"] == "default"}
    rows = []
    for name in dict.fromkeys(run["contestant"] for run in runs):
        mine = [run for run in runs if run["contestant"] == name]
        rates = [run["trained_tokens"] / run["seconds"] for run in mine]
        ratios = [
            mine_rate / (reference[run["seed"]]["trained_tokens"] / reference[run["seed"]]["seconds"])
            for run, mine_rate in zip(mine, rates, strict=True)
        ]
        halves = [statistics.fmean(run["rewards"][len(run["rewards"]) // 2 :]) for run in mine]
        rows.append([
            name, str(len(mine)), spread([run["seconds"] for run in mine]), spread(rates),
            "1" if name == "default" else spread(ratios, "{:.2f}"),
            f"{statistics.median(run['dropped_tokens'] for run in mine):,.0f}",
            f"{statistics.fmean(run['trained_tokens'] / len(run['rewards']) / SAMPLES for run in mine):.0f}",
            f"{max(run['oldest'] for run in mine):.0f}", spread(halves, "{:.3f}"),
        ])  # fmt: skip
    header = (
        "trainer", "seeds", "seconds", "trained tok/s (range)", "by default (range)", "tokens dropped", "mean length",
        "oldest token", "reward of the second half of the batches (range)",
    )  # fmt: skip
    return markdown(header, rows)


def tools_split() -> str:
    return tools("peers_tools_split")


def turns() -> str:
    (measured,) = json.loads((MEASURED / "turns.json").read_text())["measured"]
    names = {
        "lockstep": "lockstep: each turn waits for the slowest sample and tool of the batch",
        "per-sample": "each sample proceeds alone, `over_provisioning=1.0`",
        "default": "default options",
    }
    first = measured["lockstep"]
    return markdown(
        ("schedule", "trained tok/s", "by lockstep"),
        [[text, f"{measured[name]:,.0f}", f"{measured[name] / first:.1f}"] for name, text in names.items()],
    )


def kills_agent() -> str:
    (found,) = results("kills_agent")
    settings = json.loads((MEASURED / "kills_agent.json").read_text())["settings"]
    return markdown(
        (
            "kills of the trainer, of the server", "steps, trained again", "rows, more than once",
            "unfinished samples resumed and trained, their tokens", "of these generated again", "samples restored",
            "samples that lost tokens",
        ),
        [[
            f"{settings['kills']}, {settings['server_kills']}", f"{settings['steps']}, {found['steps_trained_again']}",
            f"{found['rows']}, {found['rows_more_than_once']}",
            f"{found['resumed_samples']}, {found['resumed_tokens']:,}", str(found["tokens_generated_again"]),
            f"{found['restored_samples']:.0f}", f"{found['restarted_samples']:.0f}",
        ]],
    )  # fmt: skip


def agents() -> str:
    runs = results("peers_agents")
    names = {
        "agent-synchronous": "agent by address, `over_provisioning=1.0`", "agent": "agent by address, default options",
        "default": "environment, default options", "trl-8-96": "TRL's async trainer, environment, bound 8",
    }  # fmt: skip
    rates = {(run["contestant"], run["seed"]): run["trained_tokens"] / run["seconds"] for run in runs}
    rows = []
    for name, title in names.items():
        mine = [run for run in runs if run["contestant"] == name]
        ratios = [rates[name, run["seed"]] / rates["agent-synchronous", run["seed"]] for run in mine]
        rows.append([
            title, str(len(mine)), spread([run["seconds"] for run in mine]),
            spread([rates[name, run["seed"]] for run in mine]), spread(ratios, "{:.2f}"),
            f"{statistics.median(run['dropped_tokens'] for run in mine):,.0f}",
        ])  # fmt: skip
    header = ("trainer", "seeds", "seconds", "trained tok/s (range)", "by the first row (range)", "tokens dropped")
    return markdown(header, rows)


# Rollouts


def _rollout_rows(
    name: str, columns: Sequence[str], shown: Callable[[dict[str, str]], bool] = lambda row: True
) -> str:
    rows = rollout_report.rows(rollout_report.Report.read(MEASURED / f"{name}.json").measurements)
    return markdown(columns, [[row[column] for column in columns] for row in rows if shown(row)])


ROLLOUT = (
    "sigma", "mode", "factor", "trained tok/s", "ratio (range)", "share of the limit", "carried", "age mean", "oldest",
)  # fmt: skip


def rollout_limit() -> str:
    def shown(row: dict[str, str]) -> bool:
        return row["sigma"] != "0" and row["mode"] != "overlap and reuse"

    return _rollout_rows("rollout_limit", ROLLOUT, shown)


def rollout_small_cache() -> str:
    return _rollout_rows("rollout_small_cache", (*ROLLOUT[:5], "generated tok/s", *ROLLOUT[6:]))


def rollout_limit_all() -> str:
    return _rollout_rows("rollout_limit", ROLLOUT)


def rollout_defaults() -> str:
    return _rollout_rows("rollout_defaults", [name for name in ROLLOUT if name != "share of the limit"])


# Learning

LEARNED = (
    "synchronous, after 40 steps", "APRIL, after 40 steps", "difference (95 %)", "at least (one-sided 95 %)",
    "speed-up of 40 steps", "difference at equal wall-clock",
)  # fmt: skip


def learned(found: learning_comparison.Comparison) -> list[str]:
    return [
        *(f"{statistics.fmean(rewards):.3f}" for rewards in found.reward), signed(found.differences),
        f"{lower_bound(found.differences):+.3f}", "{:.2f} ± {:.2f}".format(*interval(found.faster)),
        signed(found.at_equal_time),
    ]  # fmt: skip


def tasks() -> str:
    rows = []
    for task in ("gcd", "countdown"):
        pairs = pairs_of(trainings(f"tasks_{task}"), task)
        found = compare(pairs)
        rows.append([
            task, str(len(pairs)), f"{pairs[0][0].curve[0][2]:.3f}", *learned(found),
        ])  # fmt: skip
    return markdown(("task", "seeds", "reward before", *LEARNED), rows)


STRESSED = (
    ("2e-4", "8 token_truncate"), ("4e-4", "8 none"), ("4e-4", "2 token_truncate"), ("4e-4", "8 token_truncate"),
    ("4e-4", "8 sequence_mask"), ("4e-4", "8 opsm"), ("4e-4", "8 dppo"), ("7e-4", "8 token_truncate"),
    ("7e-4", "8 sequence_mask"), ("7e-4", "8 opsm"), ("7e-4", "8 dppo"),
)  # fmt: skip


def off_policy(cells: Sequence[tuple[str, str]] = STRESSED) -> str:
    runs = trainings("stress")
    synchronous = {(run.recipe, run.seed): run for run in runs if run.mode == SYNCHRONOUS}
    rows = []
    for recipe, mode in cells:
        cell = [run for run in runs if (run.recipe, run.mode) == (recipe, mode)]
        pairs = [(run, synchronous[recipe, run.seed]) for run in cell]
        warned = sorted(step for run in cell if (step := stress.warned_at(run)) is not None)
        when = f" (steps {warned[0]} to {warned[-1]})" if warned else ""
        bound, _, correction = mode.partition(" ")
        rows.append([
            recipe, bound, correction, str(len(cell)),
            *(f"{statistics.fmean(one[n].rewards[-1] for one in pairs):.3f}" for n in (1, 0)),
            signed([run.rewards[-1] - other.rewards[-1] for run, other in pairs]),
            signed(stress.ahead_in_time(pairs)), f"{len(warned)}{when}",
        ])  # fmt: skip
    header = (
        "learning rate", "bound", "correction", "seeds", "synchronous", "APRIL", "difference (95 %)",
        "difference at equal wall-clock", "trainings with a warning",
    )  # fmt: skip
    return markdown(header, rows)


def off_policy_all() -> str:
    return stress.table(trainings("stress"))


def recipes() -> str:
    rows = []
    cells = (("learning", "grpo"), ("learning", "dapo"), ("learning", "gspo"), ("learning_dapo_keep", "dapo"))
    for name, recipe in cells:
        pairs = pairs_of(trainings(name), recipe)
        found = compare(pairs)
        rows.append([
            f"{recipe}{', keep' * (name != 'learning')}", str(len(pairs)), *learned(found),
        ])  # fmt: skip
    return markdown(("loss", "seeds", *LEARNED), rows)


# Claims


def claims() -> str:
    """The main results, each with its interval, command and file."""
    found, split = contestants("peers"), contestants("peers_split")
    synchronous, default = found["synchronous"], found["default"]
    speed = spread([rate(run) / rate(synchronous[seed]) for seed, run in default.items()], "{:.2f}")
    change = signed([final_reward(run) - final_reward(synchronous[seed]) for seed, run in default.items()])
    seconds = [statistics.median(run.seconds for run in runs.values()) for runs in (default, synchronous)]
    rolled = rollout_report.rows(rollout_report.Report.read(MEASURED / "rollout_defaults.json").measurements)
    limit = rollout_report.rows(rollout_report.Report.read(MEASURED / "rollout_limit.json").measurements)
    kept = next(row for row in limit if (row["sigma"], row["mode"]) == ("1", "overlap and keep"))
    gcd, countdown = (compare(pairs_of(trainings(f"tasks_{task}"), task)) for task in ("gcd", "countdown"))
    runs = trainings("stress")
    at_rate = {
        recipe: signed([
            run.rewards[-1] - other.rewards[-1]
            for other, run in pairs_of(runs, recipe, "8 token_truncate")
        ])
        for recipe in ("2e-4", "4e-4", "7e-4")
    }  # fmt: skip
    rows = [
        (
            f"Default options train {speed} times the tokens per second of synchronous training: 40 steps take "
            f"{seconds[0]:.0f} s instead of {seconds[1]:.0f} s. The final reward differs by {change}.",
            "`peers.py --contestants synchronous default --seeds 10`", "peers.json",
        ),
        (
            "With engine and trainer on separate cores and equal batches, trl-april trains "
            f"{by_theirs(split, 4)} times the tokens per second of TRL's async trainer at a staleness bound of 4, "
            f"{by_theirs(split, 8)} times at 8, and {by_theirs(split, 16)} times at 16, with TRL's best number of "
            f"requests in flight. TRL's drops {dropped(split, 4)}, {dropped(split, 8)} and {dropped(split, 16)} of "
            "its tokens, the long completions, trl-april none. Rewards cannot be told apart. With TRL's own token "
            f"budget, and as many tokens per batch, the ratios are {by_theirs(split, 4, own=True)}, "
            f"{by_theirs(split, 8, own=True)} and {by_theirs(split, 16, own=True)}; TRL's ends with a higher reward.",
            "`peers.py --split` as below", "peers_split.json",
        ),
        (
            f"In rollouts alone, at sigma 1, default options train {rolled[1]['ratio (range)']} times the tokens of "
            "synchronous rollouts. Without a staleness bound, at factor 4, "
            f"{kept['share of the limit']} of the tokens of an engine that is never interrupted are generated.",
            "`rollout.py` as below", "rollout_defaults.json, rollout_limit.json",
        ),
        (
            "On two tasks of reasoning-gym, default options finish 40 steps in "
            f"1/{statistics.fmean(gcd.faster):.2f} (gcd) and 1/{statistics.fmean(countdown.faster):.2f} (countdown) "
            "of the synchronous time. Final rewards differ by "
            f"{signed(gcd.differences)} and {signed(countdown.differences)}.",
            "`tasks.py gcd --april-steps 50 --seeds 10`, `tasks.py countdown --april-steps 50`",
            "tasks_gcd.json, tasks_countdown.json",
        ),
        (
            "High learning rates cost reward. At a bound of 8, factor 4 and the default correction, the final reward "
            f"differs by {at_rate['2e-4']} at twice the rate, {at_rate['4e-4']} at four times and {at_rate['7e-4']} "
            "at seven times, where three of five trainings collapse.",
            "`stress.py` as below", "stress.json",
        ),
    ]  # fmt: skip
    header = ("claim (median and range, or mean ± 95 % interval)", "command in benchmarks/", "file")
    return markdown(header, [list(row) for row in rows])


# Weight sync


def weight_sync() -> str:
    by_way = {result["way"]: result for result in results("adapters")}
    rows = []
    for title, key, form, unit in (
        ("megabytes sent", "bytes", "{:,.0f}", 1e-6),
        ("seconds of the trainer", "seconds", "{:.2f}", 1.0),
        ("seconds without tokens", "standstill", "{:.3f}", 1.0),
    ):
        merged, adapter = ([one[key] * unit for one in by_way[way]["syncs"]] for way in ("filesystem", "adapter"))
        ratio = statistics.median(merged) / statistics.median(adapter)
        rows.append([title, spread(merged, form), spread(adapter, form), f"{ratio:.1f}"])
    merged, adapter = (by_way[way]["tokens_per_second"] for way in ("filesystem", "adapter"))
    rows.append(["generated tok/s, 16 requests", f"{merged:.0f}", f"{adapter:.0f}", f"{merged / adapter:.1f}"])
    return markdown(("", "merged weights", "adapter alone", "ratio"), rows)


def files() -> str:
    """Where and when each file was measured."""
    rows = []
    for path in sorted(MEASURED.glob("*.json")):
        machine = json.loads(path.read_text()).get("machine") or {}
        date, load = machine.get("date", "")[:10], machine.get("load_average")
        versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
        rows.append([
            f"[{path.name}](../docs/measured/{path.name})", date, machine.get("commit", ""),
            "" if load is None else f"{load:.1f}", versions,
        ])  # fmt: skip
    return markdown(("file", "date", "commit", "load at the end", "versions"), rows)


def costs() -> str:
    return overhead.table([overhead.Measurement(**result) for result in results("overhead")])


def draft_methods() -> str:
    return drafts.table(results("drafts"))


def scales() -> str:
    return scale.table([scale.Cell(**result) for result in results("scale")])


TABLES: dict[str, Callable[[], str]] = {
    name.__name__.replace("_", "-"): name
    for name in (
        headline, claims, peers_table, split_devices, in_flight, peers_long, slow_rewards, tools, tools_split, turns,
        kills_agent, agents, costs, scales, draft_methods, rollout_limit, rollout_limit_all, rollout_small_cache,
        rollout_defaults, tasks, off_policy, off_policy_all, recipes, weight_sync, files,
    )
}  # fmt: skip


def written(text: str) -> str:
    """A page with its tables made from the files."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block[2]]()}\n\n{block[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if a page is out of date")
    check = parser.parse_args().check
    for name in PAGES:
        path = ROOT / name
        text = path.read_text()
        if (new := written(text)) != text:
            if check:
                raise SystemExit(f"{name} is out of date: run python benchmarks/measured_tables.py")
            path.write_text(new)
            print(f"{name} is written.")


if __name__ == "__main__":
    main()
