"""Rollout throughput by mode and over-provisioning factor: pool, driver and engine on a real vLLM server.

    python benchmarks/rollout.py                        # sigma 0, 0.5 and 1.0 at factors 1.0, 1.5, 2.0, 3.0
    python benchmarks/rollout.py --modes abort reuse overlap both discard uninterrupted --train-seconds 0.3
    python benchmarks/rollout.py --sigma 1.0 --factors 1.0 2.0 --json result.json
    python benchmarks/rollout.py --useless 0.4          # dynamic sampling rejects and replaces 40 % of the groups
    python benchmarks/rollout.py --modes abort priority --max-sequences 16    # a server with a queue
    python benchmarks/rollout.py --modes keep --factors 1.0 2.0 3.0 6.0 auto --kv-blocks 60   # a small KV cache
    python benchmarks/rollout.py --base-url http://127.0.0.1:8000    # a running server

Modes:
- `abort` and `reuse` set `resume_kv`; `overlap` and `both` are these two with `overlap_generation`.
- `keep` is `resume_kv="keep"` with `overlap_generation`: requests are held on a paused server while weights change.
- `priority` is `abort`, and the server schedules older groups first.
- `discard` over-provisions and throws unfinished groups away.
- `uninterrupted` never cuts a request and never waits for the trainer: the limit for so many requests in flight.
Factor 1.0 is synchronous in every mode and runs once. Factor `auto` is chosen as in training, after ten rounds, in the
modes that training has.

Nothing is trained: the trainer is a pause of `--train-seconds` between two rounds, as on a device of its own.
Completion lengths are forced: lognormal around `--median`, the same for every contestant. Each contestant has its own
pool, and they alternate on one server, block by block. Only measurements of one turn are compared. The first rounds of
a run and the first round of each block do not count; pauses do. Generated and trained tokens are counted apart. The
share of the limit is of generated tokens: within a few rounds a pool may deliver more or less than it generates. With
even lengths a pool of factor 3 generates in every third round only. With `--block 4` every fifth round does not count,
so each round of such patterns is left out equally often after 6 blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import requests
from calibration import Calibrator, pause_of
from rollout_report import AUTO, NOT_OF_TRAINING, Measurement, Report, auto_by_best, draw, rows, table

from trl_april.data.admission import NewGroup
from trl_april.engine.protocol import Chunk, GenerationRequest, ServerLoad
from trl_april.engine.sampling import sampling_options
from trl_april.engine.vllm import VLLMEngine
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Score
from trl_april.rollout.driver import RolloutDriver
from trl_april.rollout.dynamic_sampling import DynamicSampling
from trl_april.rollout.loop import RoundLoop, RoundSteps
from trl_april.rollout.record import Round
from trl_april.server.local import LocalServer
from trl_april.server.traffic import TimedRequests, server_load
from trl_april.tuning.admission_control import AdmissionControl


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHORTEST, LONGEST = 8, 3500
CONTEXT = 4096  # of the server's model
PROMPT_LENGTH = 16
ROUNDS_TO_CHOOSE = 20
PIECES = 1  # of a calibration, after every block


def sample_of(request: GenerationRequest) -> tuple[int, int]:
    """Group and index of a request."""
    _, group_id, index, _ = request.request_id.split("-")
    return int(group_id), int(index)


class PrioritisedEngine(VLLMEngine):
    """A vLLM engine that prefers older groups, for a server with `--scheduling-policy priority`.

    In training requests have no priority: they are sent oldest first, and a server that takes them as they come does
    the same without being asked. docs/benchmarks.md has what was measured.
    """

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self._open_session()  # before it is copied
        prioritised = copy(self)
        prioritised._body = {**self._body, "priority": sample_of(request)[0]}
        return VLLMEngine.generate(prioritised, request)


class ForcedLengths:
    """A vLLM engine with forced lengths, by `max_tokens`."""

    def __init__(self, engine: VLLMEngine, sigma: float, median: int, seed: int) -> None:
        self._engine = engine
        self._sigma, self._median, self._seed = sigma, median, seed

    def length(self, group_id: int, index: int) -> int:
        """Length of a sample in tokens, by seed."""
        drawn = random.Random(f"{self._seed}/{group_id}/{index}").lognormvariate(0.0, self._sigma)
        return round(min(LONGEST, max(SHORTEST, self._median * drawn)))

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        group_id, index = sample_of(request)
        return self._engine.generate(replace(request, max_tokens=self.length(group_id, index) - request.generated))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._engine.abort(request_ids)

    async def generated(self, request_ids: Sequence[str]) -> dict[str, int]:
        return await self._engine.generated(request_ids)

    async def holds(self, version: int) -> bool:
        return True  # the weights never change

    async def close(self) -> None:
        await self._engine.close()


def forced_engine(
    base_url: str, model: str, stream_interval: int, sigma: float, median: int, seed: int,
    make: type[VLLMEngine] = VLLMEngine,
) -> ForcedLengths:  # fmt: skip
    """An engine for samples of forced lengths, without a stop token."""
    sampling = sampling_options(generation_kwargs={"ignore_eos": True})
    return ForcedLengths(make(base_url, model, sampling, stream_interval=stream_interval), sigma, median, seed)


MODES = ("abort", "reuse", "overlap", "both", "keep", "discard", "uninterrupted", "priority")
RESUME_KV = {"reuse": "reuse", "both": "reuse", "keep": "keep"}


class Contestant(RoundSteps):
    """One mode and factor: its pool, and its rounds on the shared server."""

    def __init__(
        self, options: argparse.Namespace, base_url: str, model: str, sigma: float, mode: str, factor: float | str,
        turn: int,
    ) -> None:  # fmt: skip
        # One seed per turn, for all contestants.
        self.engine = forced_engine(
            base_url, model, options.stream_interval, sigma, options.median, options.seed + turn,
            PrioritisedEngine if mode == "priority" else VLLMEngine,
        )  # fmt: skip
        self._discards, self._uninterrupted = mode == "discard", mode == "uninterrupted"
        self._overlaps = mode in ("overlap", "both", "keep", "uninterrupted")
        self._keeps = mode == "keep"
        self._pause, self._base_url, self._session = pause_of(base_url), base_url, TimedRequests(10.0)
        self.pool = Pool(
            options.quota, over_provisioning=1.0 if isinstance(factor, str) else factor,
            # Without cuts there is no sync, so nothing gets stale.
            max_staleness=None if self._uninterrupted else options.max_staleness,
            dynamic_sampling=options.useless > 0,
        )  # fmt: skip
        self.dynamic = None
        if options.useless:
            self.dynamic = DynamicSampling(
                lambda groups: [Score(self._rewards(group.group_id)) for group in groups],
                lambda score: score.rewards[0] != score.rewards[-1],
                self.next_groups,
                max_rejected=10**6,
            )
        self.driver = RolloutDriver(
            self.pool, self.engine, run_id=uuid.uuid4().hex, dynamic_sampling=self.dynamic,
            overlap=self._overlaps, resume_kv=RESUME_KV.get(mode, "recompute"),
        )  # fmt: skip
        self.loop = RoundLoop(
            self.pool, self.driver, self, dynamic=self.dynamic, overlap=self._overlaps, keeps=self._keeps
        )
        self._control = AdmissionControl(self.pool) if factor == AUTO else None
        self.measurement = Measurement(sigma, mode, factor, turn)
        self._train_seconds = 0.0 if self._uninterrupted else options.train_seconds
        self._group_size = options.group_size
        self._useless = options.useless
        self._prompts, self._reward_seed = random.Random(options.seed), options.seed + turn
        self._rows = count()
        self._version = 0
        self._is_paused = False
        self._warmup = max(options.warmup, ROUNDS_TO_CHOOSE if factor == AUTO else 0)

    def _rewards(self, group_id: int) -> list[list[float]]:
        """Equal rewards for the useless share of the groups, the same ones for every contestant."""
        useless = random.Random(f"{self._reward_seed}/{group_id}").random() < self._useless
        return [[0.0 if useless else float(index)] for index in range(self._group_size)]

    async def warm_up(self) -> None:
        """Fill the pool, and choose the factor if it is `auto`."""
        await self.run_block(self._warmup, self._warmup)

    async def run_block(self, rounds: int, warmup: int) -> None:
        """Run a block of rounds. The first `warmup` do not count."""
        total = self.measurement
        tokens, seconds = total.generated_tokens, total.seconds
        for number in range(rounds):
            began = time.perf_counter()
            done = await self._run_round()
            self._count(done, time.perf_counter() - began, counts=number >= warmup)
        if rounds > warmup:
            total.blocks.append((total.generated_tokens - tokens, total.seconds - seconds))
        await self.driver.cut()

    async def _run_round(self) -> Round:
        """Run a training step as the server sees it: sync, round, and a pause for the training."""
        if not self._uninterrupted:
            await self.loop.sync(self._version)
        version = self._version
        self._version += not self._uninterrupted
        done = await self.loop.run(version)
        if self._control is not None:
            load = await asyncio.to_thread(server_load, self._session, self._base_url)
            self._control.observe(done, [load or ServerLoad()])
        await self._train()
        return done

    async def _train(self) -> None:
        await asyncio.sleep(self._train_seconds)

    # Steps of the loop. The weights are not sent: that takes the same time in all modes.

    async def pause(self, *, keeps_weights: bool) -> bool:
        if not self.driver.in_flight:
            return False
        await self.driver.stop_asking()
        await asyncio.to_thread(self._pause.begin)
        self._is_paused = True
        return True

    async def load(self) -> None:
        if self._is_paused:
            self._is_paused = False
            await asyncio.to_thread(self._pause.end)

    def begin(self, version: int) -> None:
        if self._control is not None:
            self._control.choose()

    def next_groups(self, count: int) -> list[NewGroup]:
        return [
            NewGroup(
                next(self._rows), {},
                [self._prompts.randrange(3, 13) for _ in range(PROMPT_LENGTH)],
                self._group_size, LONGEST,
            )
            for _ in range(count)
        ]  # fmt: skip

    def taken(self, done: Round) -> None:
        if self._discards:
            self._discard()

    def _discard(self) -> None:
        """Discard unfinished groups and finished surplus."""
        self.measurement.discarded_tokens += self.pool.counters.tokens_held
        self.pool.withdraw(len(self.pool))

    def _count(self, done: Round, seconds: float, *, counts: bool) -> None:
        samples = [sample for group in done.groups for sample in group.samples]
        assert all(len(sample) == self.engine.length(sample.group_id, sample.index) for sample in samples)
        if not counts:
            return
        total = self.measurement
        total.rounds += 1
        total.factors += done.over_provisioning
        total.seconds += seconds
        total.generated_tokens += done.generated_tokens + done.overlap_tokens
        total.groups += len(done.groups)
        total.rejected_groups += done.rejected_groups
        total.trained_tokens += sum(len(sample) for sample in samples)
        total.carried_tokens += done.carried_tokens
        ages = [(done.version - s.version, s.length) for sample in samples for s in sample.segments]
        total.staleness_max = max(total.staleness_max, *(age for age, _ in ages))
        total.staleness_tokens += sum(age * length for age, length in ages)
        total.request_seconds += done.in_flight_mean * done.seconds
        total.round_seconds += done.seconds

    async def close(self) -> None:
        """Leave nothing running."""
        await self.driver.close()
        await self.engine.close()
        if self.dynamic is not None:
            self.dynamic.close()


def bound(text: str) -> int | None:
    """Parse a staleness bound."""
    return None if text == "none" else int(text)


def factor(text: str) -> float | str:
    """Parse an over-provisioning factor."""
    return text if text == AUTO else float(text)


def grid(options: argparse.Namespace) -> list[tuple[str, float | str]]:
    """The contestants, synchronous first: it is the same in all modes and runs once."""
    return [("abort", 1.0)] * (1.0 in options.factors) + [
        (mode, factor)
        for mode in options.modes
        for factor in options.factors
        if factor != 1.0 and not (factor == AUTO and mode in NOT_OF_TRAINING)
    ]


async def measure(
    options: argparse.Namespace, base_url: str, model: str, sigma: float,
    contestants: Sequence[tuple[str, float | str]],
    turn: int, calibrator: Calibrator | None = None, make: Callable[..., Contestant] = Contestant,
) -> list[Measurement]:  # fmt: skip
    """Let the contestants alternate block by block, and measure all but the first rounds of each.

    The speed of a shared machine drifts within seconds by more than the differences of interest. So one block of each
    contestant follows the other. Every second order is the reverse of the one before, the others are random: with a
    fixed order, contestants in the middle would always be measured at the same time.
    """
    runners = [make(options, base_url, model, sigma, mode, factor, turn) for mode, factor in contestants]
    try:
        for runner in runners:
            await runner.warm_up()
        order = list(runners)
        for block in range(-(-options.rounds // options.block)):
            if block % 2 == 0:
                random.Random(f"{options.seed}/{turn}/{block}").shuffle(order)
            else:
                order.reverse()
            for runner in order:
                await runner.run_block(options.block + 1, 1)
                for _ in range(PIECES if calibrator is not None else 0):
                    await calibrator.next()
    finally:
        for runner in runners:
            await runner.close()
    return [runner.measurement for runner in runners]


async def take_turn(
    options: argparse.Namespace, base_url: str, model: str, sigma: float, turn: int,
    calibrations: dict[str, dict[str, object]],
) -> list[Measurement]:  # fmt: skip
    """A turn of all contestants, and the server's speed between their blocks if calibration is on."""
    calibrator = None
    if options.calibrate:
        calibrator = Calibrator(base_url, model, prompt_tokens=PROMPT_LENGTH, sequences=[1, 4, 16, 32, 64, 128])
    measurements = await measure(options, base_url, model, sigma, grid(options), turn, calibrator)
    if calibrator is not None:
        calibrations[f"{sigma:g}/{turn}"] = (await calibrator.finish()).described()
    return measurements


@contextmanager
def serve(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: int, more_args: Sequence[str] = ()
) -> Iterator[str]:
    """Start a server with this model and yield its base URL."""
    from countdown import save

    with tempfile.TemporaryDirectory(prefix="trl_april_bench_") as folder:
        save(model, tokenizer, Path(folder))
        vllm_args = ["--dtype", "float32", "--max-model-len", str(context), "--enforce-eager", *more_args]
        with LocalServer(folder, vllm_args=vllm_args) as running:
            yield running.base_url


@contextmanager
def server(base_url: str | None, more_args: Sequence[str] = ()) -> Iterator[str]:
    """Base URL of the server to measure: the given one, or an own server with a small random model."""
    if base_url is not None:
        yield base_url.rstrip("/")
        return
    import torch
    from countdown import build_model, build_tokenizer

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    model.config.max_position_embeddings = CONTEXT
    with serve(model, tokenizer, CONTEXT, more_args) as url:
        yield url


def run(options: argparse.Namespace, report: Report, left: Sequence[tuple[float, int]]) -> None:
    """Measure turns that are not in the file, and write it after every turn: a grid takes hours."""
    limits = {"--max-num-seqs": options.max_sequences, "--num-gpu-blocks-override": options.kv_blocks}
    server_args = [text for flag, value in limits.items() if value is not None for text in (flag, str(value))]
    if "priority" in options.modes:
        server_args += ["--scheduling-policy", "priority"]
    with server(options.base_url, server_args) as base_url:
        model = requests.get(f"{base_url}/v1/models", timeout=30).json()["data"][0]["id"]
        warm = argparse.Namespace(**{**vars(options), "rounds": 1, "warmup": 0, "train_seconds": 0.0})
        # The server compiles at its first requests.
        asyncio.run(measure(warm, base_url, model, 0.0, [("abort", 1.0)], -1))
        for sigma, turn in left:
            measured = asyncio.run(take_turn(options, base_url, model, sigma, turn, report.calibrations))
            report.measurements += measured
            for done in measured:
                print(
                    f"sigma {sigma:g} turn {turn} {done.mode} {done.factor}: {done.trained_per_second:,.0f} "
                    f"trained tok/s, {done.generated_per_second:,.0f} generated tok/s in {done.seconds:.1f} s",
                    flush=True,
                )
            if options.json:
                report.write(options.json)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="spread of log lengths")
    parser.add_argument(
        "--factors", type=factor, nargs="+", default=[1.0, 1.5, 2.0, 3.0], help="over_provisioning, or auto"
    )
    parser.add_argument("--turns", type=int, default=3, help="measurements of every factor, each with other lengths")
    parser.add_argument("--quota", type=int, default=8, help="groups per batch")
    parser.add_argument("--group-size", type=int, default=4, help="samples per group")
    parser.add_argument("--modes", nargs="+", default=["abort"], choices=MODES, help="see above")
    parser.add_argument("--train-seconds", type=float, default=0.0, help="pause of the trainer between two rounds")
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds per run")
    parser.add_argument("--block", type=int, default=4, help="measured rounds per block; see above")
    parser.add_argument("--warmup", type=int, default=4, help="rounds before them")
    parser.add_argument("--median", type=int, default=150, help="median length in tokens")
    parser.add_argument(
        "--max-staleness", type=bound, default=5, help="bound in policy versions (one per round), or none"
    )
    parser.add_argument("--useless", type=float, default=0.0, help="share of groups that dynamic sampling rejects")
    parser.add_argument("--stream-interval", type=int, default=64, help="tokens per streamed chunk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-sequences", type=int, help="concurrent requests of our own server")
    parser.add_argument("--kv-blocks", type=int, help="blocks in the KV cache of our server (128 tokens on a CPU)")
    parser.add_argument("--base-url", help="a running server (default: start one)")
    parser.add_argument("--json", type=Path, help="also write every measurement here, and resume from this file")
    parser.add_argument("--plot", type=Path, help="also plot the medians here")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure the server's speed between the blocks, for the simulator"
    )
    options = parser.parse_args()

    if options.useless and "discard" in options.modes:
        parser.error("--useless: discarded groups are not scored. Leave out --modes discard.")
    report = Report.of(vars(options), options.json)
    left = [(sigma, turn) for sigma in options.sigma for turn in range(options.turns) if not report.has(sigma, turn)]
    if report.measurements:
        print(f"{options.json} holds {len(report.measurements)} measurements already.")
    if left:
        run(options, report, left)
    print()
    print(table(rows(report.measurements)))
    if auto := auto_by_best(report.measurements):
        print(f"\n{table(auto)}")
    if options.plot:
        draw(report.measurements, options.plot)


if __name__ == "__main__":
    main()
