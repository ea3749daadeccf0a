"""The extreme tail: completions of 100 and of 20,000 tokens in one batch, on a real vLLM server, without training.

    python benchmarks/tail.py                                              # synchronous, 2:5, 2:none and 3:11
    python benchmarks/tail.py --contestants 1 2:5 2:8 --turns 2
    python benchmarks/tail.py --every 4                                    # two long completions per batch
    python benchmarks/tail.py --resume-kv recompute                        # partial samples are prefilled again
    python benchmarks/tail.py --plot-only benchmark_output/tail.json

The first sample of every `--every`-th group is long, all others are short. Lengths are forced. A contestant is an
over-provisioning factor and, after a colon, `max_staleness` in rounds (`none` for no bound). Each has its own pool,
and they alternate on one server. A cycle is the number of rounds that pass while a long completion is generated. The
first cycle fills the pool and does not count.

If every decode step cost the same, a synchronous batch would take as long as a long completion. With a bound of b
versions, a long completion may be b rounds old when it is trained, so at most b + 1 batches are delivered in that
time. Without a bound, long completions can occupy the places beyond the batch. With factor 2, a batch of 8 groups and
one long completion per batch, that is nine batches, the last one 8 versions after the first token was sampled.

The model has one layer with one head, smaller than in the other benchmarks. The KV cache of 20,000 tokens is many
times as large as 0.1 million parameters: reading it would take most of a decode step. For 7 billion parameters on a
GPU it takes a few percent.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import requests
from report import markdown, new_figure, read_json, require_matplotlib, write_json
from rollout import serve

from trl_april.data.admission import NewGroup
from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.engine.sampling import sampling_options
from trl_april.engine.vllm import VLLMEngine
from trl_april.pool.pool import Pool
from trl_april.pool.staleness import check_bound
from trl_april.rollout.driver import RolloutDriver


PROMPT_LENGTH = 16
COLOR = "#1f6fb4"


@dataclass(frozen=True, slots=True)
class Contestant:
    """An over-provisioning factor and a staleness bound.

    Args:
        factor (`float`):
            `over_provisioning`.
        max_staleness (`int`, *optional*):
            The bound in versions, one per round. `None` lifts it.
    """

    factor: float
    max_staleness: int | None

    @classmethod
    def parse(cls, text: str) -> Contestant:
        """Parse `FACTOR` or `FACTOR:BOUND`, the bound a number or `none`."""
        factor, _, bound = text.partition(":")
        try:
            parsed = cls(float(factor), None if bound == "none" else int(bound or 5))
            check_bound(parsed.factor, parsed.max_staleness, "wait", 1)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not FACTOR or FACTOR:BOUND: {error}") from None
        return parsed

    @property
    def name(self) -> str:
        if self.factor == 1:
            return "synchronous"
        return f"x{self.factor:g}, " + (
            "no bound" if self.max_staleness is None else f"max_staleness={self.max_staleness}"
        )

    def cycle(self, quota: int, every: int) -> int:
        """Rounds that can pass while one long completion is generated."""
        if self.factor == 1:
            return 1
        places = int(round(self.factor * quota) - quota)  # beyond the batch
        rounds = places * every // quota + 1
        return rounds if self.max_staleness is None else min(rounds, self.max_staleness + 1)


@dataclass(slots=True)
class Measurement:
    """The counted cycles of one contestant in one turn."""

    name: str
    turn: int
    rounds: int = 0
    seconds: float = 0.0
    groups: int = 0
    trained_tokens: int = 0
    generated_tokens: int = 0
    carried_tokens: int = 0
    age: int = 0
    staleness_max: int = 0
    request_seconds: float = 0.0

    @property
    def trained_per_second(self) -> float:
        return self.trained_tokens / self.seconds

    @property
    def groups_per_second(self) -> float:
        return self.groups / self.seconds


class TailEngine:
    """A vLLM engine with a few long samples among short ones. `max_tokens` forces the lengths."""

    def __init__(self, engine: VLLMEngine, *, short: int, long: int, every: int, reuse_kv: bool) -> None:
        self._engine = engine
        self._short, self._long, self._every = short, long, every
        self._reuse_kv = reuse_kv

    def length(self, group_id: int, index: int) -> int:
        """Length of a sample in tokens."""
        return self._long if index == 0 and group_id % self._every == 0 else self._short

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        run_id, group_id, index, _ = request.request_id.split("-")
        left = self.length(int(group_id), int(index)) - request.generated
        # One salt per group: a resumed sample finds its own KV blocks, and no other prompt does.
        salt = f"{run_id}-{group_id}" if self._reuse_kv else request.cache_salt
        return self._engine.generate(replace(request, max_tokens=left, cache_salt=salt))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._engine.abort(request_ids)

    async def holds(self, version: int) -> bool:
        return True  # the weights never change

    async def close(self) -> None:
        await self._engine.close()


class Rounds:
    """A contestant's pool, and its rounds on the shared server."""

    def __init__(self, contestant: Contestant, options: argparse.Namespace, engine: Any) -> None:
        self.contestant = contestant
        self.engine = engine
        self.pool = Pool(options.quota, over_provisioning=contestant.factor, max_staleness=contestant.max_staleness)
        self.driver = RolloutDriver(self.pool, engine, run_id=uuid.uuid4().hex)
        self._options = options
        self._prompts = random.Random(options.seed)
        self._ids = count()
        self._versions = count()

    async def run(self, measurement: Measurement | None) -> None:
        """Run a round, and add it to the measurement if there is one."""
        version = next(self._versions)
        self.pool.begin_round(version)
        for _ in range(self.pool.schedule.room):
            prompt = [self._prompts.randrange(3, 13) for _ in range(PROMPT_LENGTH)]
            NewGroup(next(self._ids), {}, prompt, self._options.group_size, self._options.long).admit_to(self.pool)
        done = await self.driver.run_round()
        samples = [sample for group in done.groups for sample in group.samples]
        assert all(len(sample) == self.engine.length(sample.group_id, sample.index) for sample in samples)
        if measurement is None:
            return
        ages = [(version - segment.version, segment.length) for sample in samples for segment in sample.segments]
        measurement.rounds += 1
        measurement.seconds += done.seconds
        measurement.groups += len(done.groups)
        measurement.trained_tokens += sum(map(len, samples))
        measurement.generated_tokens += done.generated_tokens
        measurement.carried_tokens += done.carried_tokens
        measurement.age += sum(age * length for age, length in ages)
        measurement.staleness_max = max(measurement.staleness_max, *(age for age, _ in ages))
        measurement.request_seconds += done.in_flight_mean * done.seconds


async def measure(
    options: argparse.Namespace, base_url: str, model: str, keep: Callable[[list[Measurement]], None]
) -> list[Measurement]:
    """All contestants in turns: a cycle of each that does not count, then one of each per turn.

    `keep` gets everything measured so far, whenever there is more.
    """
    sampling = sampling_options(generation_kwargs={"ignore_eos": True})
    engine = TailEngine(
        VLLMEngine(base_url, model, sampling, stream_interval=options.stream_interval),
        short=options.short,
        long=options.long,
        every=options.every,
        reuse_kv=options.resume_kv == "reuse",
    )
    all_rounds = [Rounds(contestant, options, engine) for contestant in options.contestants]
    measurements = []
    try:
        for turn in range(-1, options.turns):
            for rounds in all_rounds if turn % 2 == 0 else reversed(all_rounds):
                contestant = rounds.contestant
                if turn < 0 and contestant.factor == 1:
                    continue  # a synchronous round has nothing to warm up
                measurement = Measurement(contestant.name, turn)
                cycle = contestant.cycle(options.quota, options.every)
                for _ in range(cycle):
                    await rounds.run(measurement if turn >= 0 else None)
                if turn >= 0:
                    measurements.append(measurement)
                    keep(measurements)
                    print(
                        f"turn {turn}, {contestant.name}: {measurement.trained_per_second:,.0f} trained tok/s, "
                        f"{measurement.rounds} rounds in {measurement.seconds:.1f} s",
                        flush=True,
                    )
                else:
                    print(f"{contestant.name}: the pool is filled", flush=True)
    finally:
        await engine.close()
    return measurements


def ratios(cell: Sequence[Measurement], first: Sequence[Measurement], rate: str) -> list[float]:
    """Ratio to the first contestant, by turn."""
    return [getattr(one, rate) / getattr(other, rate) for one, other in zip(cell, first, strict=True)]


def by_name(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Turns of every contestant, the synchronous one first."""
    names = sorted(dict.fromkeys(m.name for m in measurements), key=lambda name: name != "synchronous")
    return {name: sorted((m for m in measurements if m.name == name), key=lambda m: m.turn) for name in names}


def table(measurements: Sequence[Measurement]) -> str:
    """Medians over the turns, with the staleness that each ratio costs."""
    cells = by_name(measurements)
    first = next(iter(cells.values()))
    rows = []
    for name, cell in cells.items():
        found = ratios(cell, first, "trained_per_second")
        rows.append(
            [
                name,
                f"{statistics.median(m.trained_per_second for m in cell):,.0f}",
                f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})",
                f"{statistics.median(m.groups_per_second for m in cell):.2f}",
                f"{statistics.median(ratios(cell, first, 'groups_per_second')):.2f}",
                f"{statistics.median(m.request_seconds / m.seconds for m in cell):.1f}",
                f"{statistics.median(m.carried_tokens / m.trained_tokens for m in cell):.0%}",
                f"{statistics.median(m.age / m.trained_tokens for m in cell):.1f}",
                str(max(m.staleness_max for m in cell)),
            ]
        )
    header = (
        "", "trained tok/s", "ratio (range)", "groups/s", "ratio", "requests in flight", "carried over",
        "mean staleness of a token", "oldest token",
    )  # fmt: skip
    return markdown(header, rows)


def draw(measurements: Sequence[Measurement], path: Path) -> None:
    """Plot the ratios, with the age of the oldest token."""
    cells = by_name(measurements)
    first = next(iter(cells.values()))
    names = list(cells)
    figure = new_figure(8, 0.7 * len(names) + 1.4)
    axes = figure.subplots()
    medians = [statistics.median(ratios(cell, first, "trained_per_second")) for cell in cells.values()]
    axes.barh(range(len(names)), medians, color=COLOR, height=0.6)
    for position, (cell, median) in enumerate(zip(cells.values(), medians, strict=True)):
        note = f" x{median:.1f}, oldest token {max(m.staleness_max for m in cell)} versions"
        axes.annotate(note, (median, position), va="center", fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(medians))
    axes.set_xlabel("trained tokens per second, as a multiple of the synchronous ones")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


@contextmanager
def server(base_url: str | None, context: int) -> Iterator[str]:
    """Base URL of the server to measure: the given one, or an own server with a small random model."""
    if base_url is not None:
        yield base_url.rstrip("/")
        return
    import torch
    from countdown import build_model, build_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    values = build_model(tokenizer).config.to_dict()
    del values["layer_types"]
    values |= {
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": context,
    }  # fmt: skip
    # A token takes 256 bytes in the KV cache, so the one GiB that LocalServer sets holds 200 long completions.
    with serve(Qwen3ForCausalLM(Qwen3Config(**values)), tokenizer, context) as url:
        yield url


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--contestants", type=Contestant.parse, nargs="+", metavar="FACTOR[:BOUND]",
        default=[Contestant(1.0, 5), Contestant(2.0, 5), Contestant(2.0, None), Contestant(3.0, 11)],
        help="over_provisioning and max_staleness (default 5, or none); the others are compared with the first",
    )  # fmt: skip
    parser.add_argument("--short", type=int, default=100, help="tokens of most completions")
    parser.add_argument("--long", type=int, default=20_000, help="tokens of a long completion")
    parser.add_argument("--every", type=int, default=8, help="groups per long sample")
    parser.add_argument("--quota", type=int, default=8, help="groups per batch")
    parser.add_argument("--group-size", type=int, default=4, help="samples per group")
    parser.add_argument("--turns", type=int, default=1, help="measured cycles of every contestant")
    parser.add_argument(
        "--resume-kv", choices=("reuse", "recompute"), default="reuse", help="the KV cache of resumed samples"
    )
    parser.add_argument("--stream-interval", type=int, default=64, help="tokens per streamed chunk")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--base-url", help="a running server (default: start one)")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmark_output"), help="folder of the results")
    parser.add_argument("--plot-only", type=Path, metavar="FILE", help="table and picture of the results in this file")
    options = parser.parse_args()
    for name in ("short", "every", "quota", "group_size", "turns"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, but it must be at least 1")
    if options.long <= options.short:
        parser.error(f"--long is {options.long}, but it must be more than --short, {options.short}")
    if options.quota % options.every:
        parser.error(
            f"--every is {options.every}, but --quota, {options.quota}, must be a multiple of it, so that every batch "
            "has as many long completions"
        )
    if options.contestants[0].factor != 1:
        parser.error(f"the first contestant is compared with, so it must be 1, not {options.contestants[0].name}")
    require_matplotlib()

    if options.plot_only:
        path = options.plot_only
        measurements = [Measurement(**result) for result in read_json(path)[1]]
    else:
        path = options.output_dir / "tail.json"
        names = ("short", "long", "every", "quota", "group_size", "turns", "resume_kv", "stream_interval", "seed")
        settings = {name: getattr(options, name) for name in names}
        with server(options.base_url, PROMPT_LENGTH + options.long + 64) as base_url:
            model = requests.get(f"{base_url}/v1/models", timeout=30).json()["data"][0]["id"]
            measurements = asyncio.run(
                measure(options, base_url, model, lambda found: write_json(path, settings, [asdict(m) for m in found]))
            )
    print(f"\n{table(measurements)}")
    picture = path.with_suffix(".png")
    draw(measurements, picture)
    print(f"\npicture: {picture.resolve()}")


if __name__ == "__main__":
    main()
