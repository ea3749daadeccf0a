"""Rollout throughput by over-provisioning factor: pool, driver and engine against a real vLLM server, no training.

    python benchmarks/rollout.py                        # sigma 0, 0.5 and 1.0 at factors 1.0, 1.5, 2.0, 3.0
    python benchmarks/rollout.py --sigma 1.0 --factors 1.0 2.0 --json result.json
    python benchmarks/rollout.py --useless 0.4          # 40 % of the groups rejected and replaced: dynamic sampling
    python benchmarks/rollout.py --base-url http://127.0.0.1:8000    # a server that runs already

Completion lengths are forced: lognormal around `--median`, the same for every factor. Each factor has a pool of its
own, and they take turns on one server round by round; what is compared are the measurements of one turn. The first
rounds are left out (`--warmup`), so a figure is that of the steady state; generated and trained tokens are counted
apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import tempfile
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

import requests

from trl_april.admission import NewGroup
from trl_april.dynamic_sampling import DynamicSampling
from trl_april.engine import Chunk, GenerationRequest
from trl_april.pool import Pool
from trl_april.rollout import RolloutDriver
from trl_april.sampling import sampling_options
from trl_april.server import LocalServer
from trl_april.types import Score
from trl_april.vllm_engine import VLLMEngine


SHORTEST, LONGEST = 8, 3500
PROMPT_LENGTH = 16


class ForcedLengths:
    """A vLLM engine whose samples end where `lengths` says, by asking for no more tokens than that."""

    def __init__(self, engine: VLLMEngine, sigma: float, median: int, seed: int) -> None:
        self._engine = engine
        self._sigma, self._median, self._seed = sigma, median, seed

    def length(self, group_id: int, index: int) -> int:
        """Length of a sample in tokens; the same in every run with the same seed."""
        drawn = random.Random(f"{self._seed}/{group_id}/{index}").lognormvariate(0.0, self._sigma)
        return round(min(LONGEST, max(SHORTEST, self._median * drawn)))

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        _, group_id, index, _ = request.request_id.split("-")
        length = self.length(int(group_id), int(index))
        return self._engine.generate(replace(request, max_tokens=length - request.generated))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._engine.abort(request_ids)

    async def holds(self, version: int) -> bool:
        return True  # nothing is trained, so nothing is lost by a restart

    async def close(self) -> None:
        await self._engine.close()


def forced_engine(
    base_url: str, model: str, stream_interval: int, sigma: float, median: int, seed: int
) -> ForcedLengths:
    """An engine for samples of forced lengths, which do not end by themselves."""
    sampling = sampling_options(
        temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
        stop_token_ids=(), generation_kwargs={"ignore_eos": True},
    )  # fmt: skip
    return ForcedLengths(VLLMEngine(base_url, model, sampling, stream_interval=stream_interval), sigma, median, seed)


@dataclass(slots=True)
class Measurement:
    """The steady state of one factor in one turn."""

    sigma: float
    factor: float
    turn: int
    seconds: float = 0.0
    trained_tokens: int = 0
    generated_tokens: int = 0
    carried_tokens: int = 0
    groups: int = 0
    rejected_groups: int = 0
    staleness_max: int = 0
    request_seconds: float = 0.0

    @property
    def trained_per_second(self) -> float:
        return self.trained_tokens / self.seconds

    @property
    def generated_per_second(self) -> float:
        return self.generated_tokens / self.seconds

    @property
    def carried_fraction(self) -> float:
        return self.carried_tokens / self.trained_tokens

    @property
    def groups_per_second(self) -> float:
        return self.groups / self.seconds

    @property
    def in_flight_mean(self) -> float:
        return self.request_seconds / self.seconds


class Contestant:
    """One factor: a pool of its own, and rounds on a server that it shares with the other factors."""

    def __init__(
        self, options: argparse.Namespace, base_url: str, model: str, sigma: float, factor: float, turn: int
    ) -> None:
        # Another seed per turn, the same for all factors of a turn.
        self.engine = forced_engine(
            base_url, model, options.stream_interval, sigma, options.median, options.seed + turn
        )
        self.pool = Pool(
            options.quota, over_provisioning=factor, max_staleness=options.max_staleness,
            dynamic_sampling=options.useless > 0,
        )  # fmt: skip
        self.dynamic = None
        if options.useless:
            self.dynamic = DynamicSampling(
                lambda groups: [Score(self._rewards(group.group_id)) for group in groups],
                lambda score: score.rewards[0] != score.rewards[-1],
                self._next,
                max_rejected=10**6,
            )
        self.driver = RolloutDriver(self.pool, self.engine, run_id=uuid.uuid4().hex, dynamic_sampling=self.dynamic)
        self.measurement = Measurement(sigma, factor, turn)
        self._group_size = options.group_size
        self._useless = options.useless
        self._prompts, self._verdicts = random.Random(options.seed), options.seed + turn
        self._rows = count()

    def _rewards(self, group_id: int) -> list[list[float]]:
        """Equal for the useless share of the groups, which are the same for every factor."""
        useless = random.Random(f"{self._verdicts}/{group_id}").random() < self._useless
        return [[0.0 if useless else float(index)] for index in range(self._group_size)]

    def _next(self, wanted: int) -> list[NewGroup]:
        return [
            NewGroup(
                next(self._rows), {}, [self._prompts.randrange(3, 13) for _ in range(PROMPT_LENGTH)],
                self._group_size, LONGEST,
            )
            for _ in range(wanted)
        ]  # fmt: skip

    async def run_round(self, version: int, *, counts: bool) -> None:
        """Fill the pool, run a round, and add it to the measurement if it counts."""
        self.pool.begin_round(version)
        for group in self._next(self.pool.room):
            group.admit_to(self.pool)
        done = await self.driver.run_round()
        samples = [sample for group in done.groups for sample in group.samples]
        assert all(len(sample) == self.engine.length(sample.group_id, sample.index) for sample in samples)
        if not counts:
            return
        total = self.measurement
        total.seconds += done.seconds
        total.generated_tokens += done.generated_tokens
        total.groups += len(done.groups)
        total.rejected_groups += done.rejected_groups
        total.trained_tokens += sum(len(sample) for sample in samples)
        total.carried_tokens += done.carried_tokens
        oldest = min(segment.version for sample in samples for segment in sample.segments)
        total.staleness_max = max(total.staleness_max, version - oldest)
        total.request_seconds += done.in_flight_mean * done.seconds


async def measure(
    options: argparse.Namespace, base_url: str, model: str, sigma: float, factors: Sequence[float], turn: int
) -> list[Measurement]:
    """Let the factors take turns round by round, and measure all but the first `warmup` rounds of each.

    A shared machine's speed drifts within seconds by more than what is to be measured. What is compared was therefore
    measured as close together as can be: a round of each factor, then the next of each, in alternating order.
    """
    contestants = [Contestant(options, base_url, model, sigma, factor, turn) for factor in factors]
    try:
        for version in range(options.warmup + options.rounds):
            for contestant in contestants if version % 2 == 0 else reversed(contestants):
                await contestant.run_round(version, counts=version >= options.warmup)
    finally:
        for contestant in contestants:
            await contestant.engine.close()
            if contestant.dynamic is not None:
                contestant.dynamic.close()
    return [contestant.measurement for contestant in contestants]


def ratios(measurements: list[Measurement], first: list[Measurement], rate: str) -> str:
    """Median, and in brackets the range, of each turn's ratio to the first factor."""
    values = [getattr(one, rate) / getattr(other, rate) for one, other in zip(measurements, first, strict=True)]
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(measurements: list[Measurement], factors: list[float]) -> str:
    """Medians over the turns, and the median of each turn's ratio to the first factor."""
    lines = [
        f"| sigma | factor | trained tok/s | ratio to {factors[0]:g} (range) | generated tok/s | trained groups/s "
        f"| ratio to {factors[0]:g} (range) | in flight | carried | rejected | oldest token |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for sigma in dict.fromkeys(m.sigma for m in measurements):
        by_factor = {f: [m for m in measurements if (m.sigma, m.factor) == (sigma, f)] for f in factors}
        first = by_factor[factors[0]]
        for factor, cell in by_factor.items():
            rejected = sum(m.rejected_groups for m in cell)
            lines.append(
                f"| {sigma:g} | {factor:g} | {statistics.median(m.trained_per_second for m in cell):,.0f} "
                f"| {ratios(cell, first, 'trained_per_second')} "
                f"| {statistics.median(m.generated_per_second for m in cell):,.0f} "
                f"| {statistics.median(m.groups_per_second for m in cell):.2f} "
                f"| {ratios(cell, first, 'groups_per_second')} "
                f"| {statistics.median(m.in_flight_mean for m in cell):.0f} "
                f"| {statistics.median(m.carried_fraction for m in cell):.0%} "
                f"| {rejected / (rejected + sum(m.groups for m in cell)):.0%} "
                f"| {max(m.staleness_max for m in cell)} |"
            )
    return "\n".join(lines)


@contextmanager
def server(base_url: str | None):
    """Base URL of the server to measure: the one given, or one of our own with a small random model."""
    if base_url is not None:
        yield base_url.rstrip("/")
        return
    import torch

    from trl_april.demo.model import build_model, build_tokenizer, save

    with tempfile.TemporaryDirectory(prefix="trl_april_bench_") as folder:
        torch.manual_seed(0)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        model.config.max_position_embeddings = 4096
        save(model, tokenizer, Path(folder))
        vllm_args = ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"]
        with LocalServer(folder, vllm_args=vllm_args) as running:
            yield running.base_url


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="spread of log lengths")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 1.5, 2.0, 3.0], help="over_provisioning")
    parser.add_argument(
        "--turns", type=int, default=3, help="measurements of every factor, with other lengths in each"
    )
    parser.add_argument("--quota", type=int, default=8, help="groups per batch")
    parser.add_argument("--group-size", type=int, default=4, help="samples per group")
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds per run")
    parser.add_argument("--warmup", type=int, default=4, help="rounds before them")
    parser.add_argument("--median", type=int, default=150, help="median length in tokens")
    parser.add_argument("--max-staleness", type=int, default=5, help="bound in policy versions (one per round)")
    parser.add_argument("--useless", type=float, default=0.0, help="share of groups that dynamic sampling rejects")
    parser.add_argument("--stream-interval", type=int, default=64, help="tokens per streamed chunk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-url", help="a server that runs already (default: start one)")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    options = parser.parse_args()

    measurements: list[Measurement] = []
    with server(options.base_url) as base_url:
        model = requests.get(f"{base_url}/v1/models", timeout=30).json()["data"][0]["id"]
        warm = argparse.Namespace(**{**vars(options), "rounds": 1, "warmup": 0})
        asyncio.run(measure(warm, base_url, model, 0.0, [1.0], -1))  # the server compiles at its first requests
        for sigma in options.sigma:
            for turn in range(options.turns):
                for done in asyncio.run(measure(options, base_url, model, sigma, options.factors, turn)):
                    measurements.append(done)
                    print(
                        f"sigma {sigma:g} turn {turn} factor {done.factor:g}: {done.trained_per_second:,.0f} trained "
                        f"tok/s, {done.generated_per_second:,.0f} generated tok/s in {done.seconds:.1f} s",
                        flush=True,
                    )
    print()
    print(table(measurements, options.factors))
    if options.json:
        rows = [
            {
                **asdict(m),
                "trained_groups_per_second": m.groups_per_second,
                "trained_tokens_per_second": m.trained_per_second,
                "generated_tokens_per_second": m.generated_per_second,
            }
            for m in measurements
        ]
        settings = {name: value for name, value in vars(options).items() if name not in ("json", "base_url")}
        options.json.write_text(
            json.dumps({"machine": platform.processor(), "settings": settings, "measurements": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
