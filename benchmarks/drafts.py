"""Speculative decoding by drafts without weights: synchronous rounds and the default mode, with and without drafts.

    python benchmarks/drafts.py --json drafts.json
    python benchmarks/drafts.py --methods none ngram suffix    # suffix needs the package arctic-inference

Rounds, forced lengths (sigma 1) and the trainer's pause are those of rollout.py. A server for each method serves the
same model, whose embeddings outweigh its layers: repeated tokens are likely, but drafts were seldom accepted. Methods
take turns in changing order, each turn with other lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import requests
import torch
from countdown import build_model, build_tokenizer
from report import earlier_results, markdown, write_json
from rollout import CONTEXT, measure, serve


DRAFTED = 4  # tokens
METHODS = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": DRAFTED},
}
CONTESTANTS = [("abort", 1.0), ("keep", 3.0)]


def repeating_model(tokenizer: Any) -> Any:
    """A model whose tokens often predict themselves."""
    torch.manual_seed(0)
    model = build_model(tokenizer)
    model.config.max_position_embeddings = CONTEXT
    with torch.no_grad():
        embedded = model.get_input_embeddings().weight
        model.lm_head.weight.copy_(0.6 * embedded)
        embedded.mul_(40)
    return model


def accepted_and_drafted(base_url: str) -> tuple[float, float]:
    """Tokens so far."""
    names = ("accepted", "draft")
    lines = requests.get(f"{base_url}/metrics", timeout=30).text.splitlines()
    found = [
        sum(float(line.rsplit(" ", 1)[1]) for line in lines
            if line.startswith(f"vllm:spec_decode_num_{name}_tokens_total{{"))
        for name in names
    ]  # fmt: skip
    return found[0], found[1]


def take_turn(options: argparse.Namespace, base_url: str, turn: int) -> list[dict[str, Any]]:
    """All contestants on one server."""
    model = requests.get(f"{base_url}/v1/models", timeout=30).json()["data"][0]["id"]
    before = accepted_and_drafted(base_url)
    measured = asyncio.run(measure(options, base_url, model, 1.0, CONTESTANTS, turn))
    accepted, drafted = (after - was for after, was in zip(accepted_and_drafted(base_url), before, strict=True))
    return [
        {**{name: value for name, value in asdict(one).items() if name != "blocks"}, "accepted": accepted,
         "drafted": drafted, "in_flight": one.in_flight_mean}
        for one in measured
    ]  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    """Medians over the turns, and ratios to the same mode and batch of the same turn without drafts."""
    cells: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = {}
    for one in results:
        mode = "synchronous" if one["mode"] == "abort" else "default"
        cells.setdefault((mode, one["quota"], one["drafts"]), {})[one["turn"]] = one
    rows = []
    for (mode, quota, drafts), turns in sorted(cells.items(), reverse=True):
        paces = {turn: one["generated_tokens"] / one["seconds"] for turn, one in turns.items()}
        without = cells[mode, quota, "none"]
        ratios = [pace / without[turn]["generated_tokens"] * without[turn]["seconds"] for turn, pace in paces.items()]
        drafted, accepted = (sum(one[name] for one in turns.values()) for name in ("drafted", "accepted"))
        rows.append([
            mode, str(quota), f"{statistics.median(one['in_flight'] for one in turns.values()):.0f}", drafts,
            f"{accepted / drafted:.0%}" if drafted else "", f"{statistics.median(paces.values()):,.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if drafted else "",
        ])  # fmt: skip
    header = ("mode", "groups per batch", "in flight", "drafts", "accepted", "generated tok/s", "by no drafts (range)")
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["none", "ngram"])
    parser.add_argument("--quotas", nargs="+", type=int, default=[1, 8], help="groups per batch")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds of a turn")
    parser.add_argument("--json", type=Path, default=Path("benchmark_output/drafts.json"))
    options = parser.parse_args()
    settings = {"rounds": options.rounds}
    results = earlier_results(options.json, settings)
    done = {(one["turn"], one["quota"], one["drafts"]) for one in results}
    tokenizer = build_tokenizer()
    model = repeating_model(tokenizer)
    with ExitStack() as servers:
        addresses = {}
        for method in options.methods:
            flags = ["--speculative-config", json.dumps(METHODS[method])] if METHODS[method] else []
            addresses[method] = servers.enter_context(serve(model, tokenizer, CONTEXT, flags))
        rounds = argparse.Namespace(
            group_size=4, rounds=options.rounds, block=4, warmup=4, median=150, max_staleness=8, useless=0.0,
            stream_interval=64, seed=0, train_seconds=0.3,
        )  # fmt: skip
        for method in options.methods:  # a server compiles at its first requests
            rounds.quota = 1
            take_turn(argparse.Namespace(**{**vars(rounds), "rounds": 1, "warmup": 0}), addresses[method], -1)
        for turn in range(options.turns):
            order = [(quota, method) for quota in options.quotas for method in options.methods]
            random.Random(turn).shuffle(order)
            for quota, method in order:
                if (turn, quota, method) in done:
                    continue
                rounds.quota = quota
                results += [
                    {"quota": quota, "drafts": method, **one} for one in take_turn(rounds, addresses[method], turn)
                ]
                write_json(options.json, settings, results)
                print(f"turn {turn}: {quota} groups, {method}", flush=True)
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
