"""Rollout throughput with tools: turns through the pool against turns in lockstep, on a real vLLM server.

    python benchmarks/turns.py                              # 8 groups of 4, up to 8 turns, sigma 1
    python benchmarks/turns.py --turns 1 --rounds 4 --json result.json
    python benchmarks/turns.py --contestants default hanging --rounds 20 --block 20 --tool-timeout 6

Contestants:
- `lockstep` is TRL's tool loop on our engine: every turn of the batch waits for its longest completion, and then for
  its slowest tool. Its tools run at once, as TRL's asynchronous ones do; TRL calls others one after the other.
- `per-sample` is the pool with `over_provisioning=1.0`: each sample continues by itself, and the batch is waited for.
- `default` is the schedule of the default options: `overlap_generation`, `resume_kv="keep"`.
- `hanging` is the same, but the first tool of one sample in a hundred sleeps for `--hang` seconds, or
  until `--tool-timeout` ends its call.

Nothing is trained: the trainer is a pause of `--train-seconds` between two rounds, and the weight sync is left out. A
sample has 1 to `--most-turns` turns. Lengths of turns and times of tools are lognormal, the same for every contestant,
and tokens count as trained when their batch is delivered. Contestants alternate on one server, block by block, in
random order. The first rounds of a contestant and the first of each block do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import requests
from calibration import pause_of
from report import machine
from rollout import CONTEXT, PROMPT_LENGTH, server

from trl_april.agents.tools import ToolCalls
from trl_april.config import AprilOptions
from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.engine.sampling import sampling_options
from trl_april.engine.vllm import VLLMEngine
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Group, Sample
from trl_april.rollout.acting import TurnResult
from trl_april.rollout.driver import RolloutDriver
from trl_april.rollout.user_code import UserCode


DEFAULTS = AprilOptions()
CONTESTANTS = ("lockstep", "per-sample", "default", "hanging")
BUDGET = CONTEXT - PROMPT_LENGTH - 1
RESULT = [5] * 12  # token ids of a tool's result


def sleep(seconds: float) -> None:
    time.sleep(seconds)


@dataclass(frozen=True)
class Script:
    """How long turns and tools take, by seed."""

    options: argparse.Namespace
    seed: int
    hang: float = 0.0  # seconds

    def turns(self, key: tuple[int, int]) -> int:
        return random.Random(f"{self.seed}/{key}").randint(1, self.options.most_turns)

    def length(self, key: tuple[int, int], turn: int) -> int:
        drawn = random.Random(f"{self.seed}/{key}/{turn}").lognormvariate(0.0, self.options.sigma)
        longest = BUDGET // self.options.most_turns - len(RESULT)
        return round(min(longest, max(4, self.options.median * drawn)))

    def tool_seconds(self, key: tuple[int, int], turn: int) -> float:
        chance = random.Random(f"{self.seed}/{key}/{turn}/tool")
        if turn == 0 and chance.random() < 0.01 and self.hang:
            return self.hang
        return min(2.0, self.options.tool_median * chance.lognormvariate(0.0, self.options.sigma))


class ScriptedTurns(VLLMEngine):
    """A vLLM engine whose turns have forced lengths, by `max_tokens`."""

    script: Script
    turn_of: dict[tuple[int, int], int]

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        key = request.sample.key if request.sample else (0, 0)
        length = self.script.length(key, self.turn_of.get(key, 0))
        return VLLMEngine.generate(self, replace(request, max_tokens=length - request.generated))

    async def holds(self, version: int) -> bool:
        return True  # the weights never change


class Contestant:
    """One way to run the turns, with its own rows."""

    def __init__(self, name: str, options: argparse.Namespace, base_url: str, model: str, turn: int) -> None:
        self.name, self._options = name, options
        self._script = Script(options, options.seed + turn, options.hang if name == "hanging" else 0.0)
        sampling = sampling_options(generation_kwargs={"ignore_eos": True})
        self._engine = ScriptedTurns(base_url, model, sampling, stream_interval=64)
        self._engine.script, self._engine.turn_of = self._script, {}
        self._tools, _ = ToolCalls(UserCode(), options.tool_timeout).by_kind([sleep])
        self._pause = pause_of(base_url)
        self._prompts, self._rows, self._version = random.Random(options.seed), count(), 0
        self._overlaps = name in ("default", "hanging")
        self.tokens, self.seconds = 0, 0.0
        self._pool = Pool(
            options.quota, over_provisioning=DEFAULTS.bounded_factor(1) if self._overlaps else 1.0,
            max_staleness=DEFAULTS.max_staleness, staleness_policy=options.staleness_policy, has_tools=True,
        )  # fmt: skip
        self._driver = RolloutDriver(
            self._pool, self._engine, run_id=uuid.uuid4().hex, act=self._act, overlap=self._overlaps,
            resume_kv="keep" if self._overlaps else "reuse",
        )  # fmt: skip

    async def run_block(self, rounds: int, *, counts: bool = True) -> None:
        """Run a round that does not count, and then `rounds`."""
        for number in range(rounds + 1):
            began = time.perf_counter()
            tokens = await (self._lockstep() if self.name == "lockstep" else self._round())
            await asyncio.sleep(self._options.train_seconds)
            if counts and number:
                self.tokens, self.seconds = self.tokens + tokens, self.seconds + time.perf_counter() - began
        await self._driver.cut()

    def _act(self, group: Group, sample: Sample) -> TurnResult:
        turn = self._engine.turn_of.get(sample.key, 0)
        if turn + 1 >= self._script.turns(sample.key):
            return TurnResult([], [])
        with contextlib.suppress(TimeoutError):
            self._tools["sleep"](seconds=self._script.tool_seconds(sample.key, turn))
        self._engine.turn_of[sample.key] = turn + 1
        return TurnResult([], RESULT, calls=1, is_complete=False)

    async def _round(self) -> int:
        """A training step as the server sees it, as in rollout.py."""
        if self._driver.in_flight:
            await self._driver.stop_asking()
            await asyncio.to_thread(self._pause.begin)
            await self._driver.hold(self._version)
            await asyncio.to_thread(self._pause.end)
        self._pool.begin_round(self._version)
        self._version += 1
        if self._overlaps:
            self._pool.schedule.withhold()
        self._admit(self._pool.schedule.room)
        done = await self._driver.run_round()
        if self._overlaps:
            self._admit(self._pool.schedule.room_ahead)
            await self._driver.dispatch_ahead()
        return sum(sample.num_generated for group in done.groups for sample in group.samples)

    def _admit(self, number: int) -> None:
        for _ in range(number):
            self._pool.admit(
                next(self._rows), {}, self._prompt(), num_generations=self._options.group_size,
                max_completion_length=BUDGET,
            )  # fmt: skip

    def _prompt(self) -> list[int]:
        return [self._prompts.randrange(3, 13) for _ in range(PROMPT_LENGTH)]

    async def _lockstep(self) -> int:
        """A batch whose samples take every turn together."""
        rows = [next(self._rows) for _ in range(self._options.quota)]
        prompts = {row: self._prompt() for row in rows}
        ids = {(row, index): list(prompts[row]) for row in rows for index in range(self._options.group_size)}
        tokens, left, salt = 0, list(ids), uuid.uuid4().hex
        for turn in range(self._options.most_turns):

            async def generate(key: tuple[int, int]) -> list[int]:
                name = f"{salt}-{key[0]}-{key[1]}-{self._engine.turn_of.get(key, 0)}"
                request = GenerationRequest(name, ids[key], 0, BUDGET, salt, sample=Sample(*key))
                return [token async for chunk in self._engine.generate(request) for token in chunk.token_ids]

            for key, new in zip(left, await asyncio.gather(*map(generate, left)), strict=True):
                ids[key] += [*new, *RESULT]
                tokens += len(new)
            left = [key for key in left if turn + 1 < self._script.turns(key)]
            await asyncio.gather(*(asyncio.sleep(self._script.tool_seconds(key, turn)) for key in left))
            self._engine.turn_of |= dict.fromkeys(left, turn + 1)
        return tokens

    async def close(self) -> None:
        await self._driver.close()
        await self._engine.close()


async def measure(options: argparse.Namespace, base_url: str, model: str, turn: int) -> dict[str, float]:
    """Trained tokens per second of each contestant, in alternating blocks."""
    contestants = [Contestant(name, options, base_url, model, turn) for name in options.contestants]
    try:
        for contestant in contestants:
            await contestant.run_block(options.warmup, counts=False)
        for block in range(-(-options.rounds // options.block)):
            random.Random(f"{options.seed}/{turn}/{block}").shuffle(contestants)
            for contestant in contestants:
                await contestant.run_block(options.block)
    finally:
        for contestant in contestants:
            await contestant.close()
    return {one.name: one.tokens / one.seconds for one in sorted(contestants, key=lambda one: one.name)}


def table(measured: Sequence[dict[str, float]]) -> str:
    """Medians over turns, and their ratio to lockstep within a turn."""
    lines = ["| contestant | trained tok/s | of lockstep |", "|---|---|---|"]
    for name in (name for name in CONTESTANTS if name in measured[0]):
        ratios = [one[name] / one["lockstep"] for one in measured if "lockstep" in one]
        of = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        lines.append(f"| {name} | {statistics.median(one[name] for one in measured):,.0f} | {of} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS[:3]))
    parser.add_argument("--sigma", type=float, default=1.0, help="spread of the logarithms of lengths and tool times")
    parser.add_argument("--median", type=int, default=40, help="median length of a turn in tokens")
    parser.add_argument("--tool-median", type=float, default=0.3, help="median seconds of a tool, at most 2")
    parser.add_argument("--hang", type=float, default=60.0, help="seconds of a tool that hangs")
    parser.add_argument("--staleness-policy", choices=("wait", "mask"), default="wait")
    parser.add_argument("--tool-timeout", type=float, help="seconds after which a tool's call ends")
    parser.add_argument("--most-turns", type=int, default=8)
    parser.add_argument("--quota", type=int, default=8, help="groups per batch")
    parser.add_argument("--group-size", type=int, default=4, help="samples per group")
    parser.add_argument("--train-seconds", type=float, default=0.3, help="pause of the trainer between two rounds")
    parser.add_argument("--turns", type=int, default=3, help="measurements, each with other lengths and times")
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds per contestant and turn")
    parser.add_argument("--block", type=int, default=4, help="measured rounds per block")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-url", help="a running server (default: start one)")
    parser.add_argument("--json", type=Path, help="also write every measurement here, and resume from this file")
    options = parser.parse_args()

    settings = {name: value for name, value in vars(options).items() if name not in ("base_url", "json", "turns")}
    found = {"machine": machine(), "options": settings, "measured": []}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())
        if found["options"] != settings:
            parser.error(f"{options.json} was measured with other options: {found['options']}. Name another file.")
    if len(found["measured"]) < options.turns:
        with server(options.base_url) as base_url:
            model = requests.get(f"{base_url}/v1/models", timeout=30).json()["data"][0]["id"]
            for turn in range(len(found["measured"]), options.turns):
                found["measured"].append(asyncio.run(measure(options, base_url, model, turn)))
                print(f"turn {turn}: {found['measured'][-1]}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{table(found['measured'])}")


if __name__ == "__main__":
    main()
