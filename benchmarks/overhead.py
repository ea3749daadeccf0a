"""Overhead of our own code: CPU microseconds per sample, from 1,000 to 100,000 samples.

    python benchmarks/overhead.py                                    # 1,000, 10,000 and 100,000 samples
    python benchmarks/overhead.py --samples 1000 10000 --repeats 9
    python benchmarks/overhead.py --with-gc                          # with Python's garbage collector
    python benchmarks/overhead.py --plot-only benchmark_output/overhead.json

There is no server and no model. Measured are the pool, the parser of vLLM's stream, the round driver on an instant
engine, and the batch that TRL takes. Every sample has two chunks of tokens. Half of the samples are cut after the
first, parked and resumed. Figures are medians of CPU time, and the sizes alternate.

The cyclic garbage collector is off during measurements, since its cost depends on all objects of the process and makes
linear code look otherwise. `--with-gc` leaves it on.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import time
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from report import markdown, new_figure, read_json, require_matplotlib, write_json

from trl_april.bridge.hand_over import rollout_output
from trl_april.engine.event_stream import EventStream
from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason
from trl_april.pool.state import state_dict
from trl_april.rollout.driver import RolloutDriver
from trl_april.rollout.record import Round
from trl_april.training.batch import batch_rows, loss_mask, round_metrics


GROUP_SIZE = 4
PROMPT_LENGTH = 100
VOCABULARY = 151_936
COLORS = {"pool": "#1f6fb4", "client": "#c8691c", "driver": "#3a8f4d", "batch": "#7a5aa6"}


@dataclass(frozen=True, slots=True)
class Measurement:
    """CPU time of one operation on all samples.

    Args:
        part (`str`):
            Part of the code.
        operation (`str`):
            Measured operation.
        samples (`int`):
            Number of samples.
        tokens (`int`):
            Number of tokens, 0 if the operation handles none.
        seconds (`float`):
            CPU time.
    """

    part: str
    operation: str
    samples: int
    tokens: int
    seconds: float

    @property
    def per_sample(self) -> float:
        """Microseconds."""
        return self.seconds / self.samples * 1e6


class Stopwatch:
    """Measures the CPU time of operations."""

    def __init__(self, part: str, samples: int) -> None:
        self.measurements: list[Measurement] = []
        self._part, self._samples = part, samples
        gc.collect()  # garbage of earlier operations

    @contextmanager
    def time(self, operation: str, tokens: int = 0) -> Iterator[None]:
        """Measure the block."""
        began = time.process_time()
        yield
        seconds = time.process_time() - began
        self.measurements.append(Measurement(self._part, operation, self._samples, tokens, seconds))


class Tokens:
    """Chunks of random tokens, made before the measurement."""

    def __init__(self, chunk: int) -> None:
        rng = random.Random(0)
        self.chunk = chunk
        self.ids = [rng.randrange(VOCABULARY) for _ in range(chunk)]
        self.logprobs = [-rng.expovariate(2.0) for _ in range(chunk)]
        self.prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_LENGTH)]


def admit(pool: Pool, count: int, tokens: Tokens) -> None:
    """Admit `count` groups."""
    first_id = pool.counters.groups_admitted
    for group_id in range(first_id, first_id + count):
        pool.admit(
            group_id,
            {"prompt": "What is 2 + 2?", "answer": "4"},
            tokens.prompt,
            num_generations=GROUP_SIZE,
            max_completion_length=4 * tokens.chunk,
        )


def filled_pool(samples: int, tokens: Tokens, *, quota: int, over_provisioning: float) -> Pool:
    """A pool with all samples waiting."""
    pool = Pool(quota, over_provisioning=over_provisioning)
    pool.begin_round(0)
    admit(pool, samples // GROUP_SIZE, tokens)
    return pool


def measure_pool(samples: int, tokens: Tokens) -> list[Measurement]:
    """Measure every transition: two rounds of half of the groups each, the second half cut once."""
    watch = Stopwatch("pool", samples)
    quota = samples // GROUP_SIZE // 2
    with watch.time("admit"):
        pool = filled_pool(samples, tokens, quota=quota, over_provisioning=2.0)
    with watch.time("ready"):
        ready = [sample for _, sample in pool.ready()]
    with watch.time("start"):
        for sample in ready:
            pool.start(sample)
    with watch.time("record", tokens.chunk * samples):
        for sample in ready:
            pool.record(sample, tokens.ids, tokens.logprobs)
    first, second = ready[: len(ready) // 2], ready[len(ready) // 2 :]
    with watch.time("finish, asking whether the round may close"):
        for sample in first:
            pool.finish(sample, FinishReason.STOP)
            _ = pool.schedule.quota_met
    with watch.time("park"):
        for sample in second:
            pool.park(sample)
    with watch.time("take"):
        pool.take()
    # After five rounds the rest falls due. One long sample holds the round open while all others finish.
    for version in range(1, 6):
        pool.begin_round(version)
    admit(pool, quota, tokens)
    *others, long = [sample for _, sample in reversed(pool.ready())]
    for sample in (*others, long):
        pool.start(sample)
        pool.record(sample, tokens.ids, tokens.logprobs)
    with watch.time("finish, while the bound holds the round open"):
        for sample in others:
            pool.finish(sample, FinishReason.STOP)
            _ = pool.schedule.quota_met
    pool.finish(long, FinishReason.STOP)
    assert pool.schedule.quota_met
    with watch.time("room, requirements and needed"):
        _ = pool.schedule.room, pool.schedule.requirements(), pool.schedule.needed()
    with watch.time("check"):
        pool.check()
    return watch.measurements


def stream_of(tokens: Tokens) -> bytes:
    """Stream of vLLM 0.31 for one sample: the echo of the prompt, two chunks and the end."""

    def event(token_ids: list[int], logprobs: list[float], finish_reason: str | None, first: bool) -> bytes:
        names = [f"token_id:{token_id}" for token_id in token_ids]
        choice = {
            "index": 0,
            "text": "word " * len(token_ids),
            "logprobs": {
                "text_offset": list(range(0, 5 * len(token_ids), 5)),
                "token_logprobs": logprobs,
                "tokens": names,
                "top_logprobs": [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)],
            },
            "finish_reason": finish_reason,
            "stop_reason": None,
            "prompt_token_ids": tokens.prompt if first else None,
            "token_ids": token_ids,
        }
        head = {"id": "cmpl-run-0-0-1-0", "object": "text_completion", "created": 1763758800, "model": "/model"}
        return b"data: " + json.dumps({**head, "choices": [choice], "usage": None}).encode() + b"\n\n"

    return (
        event(tokens.ids, tokens.logprobs, None, True)
        + event(tokens.ids, tokens.logprobs, "stop", False)
        + b"data: [DONE]\n\n"
    )


def measure_client(samples: int, tokens: Tokens) -> list[Measurement]:
    """Measure the parsing of streams, in pieces of up to 8 KiB."""
    watch = Stopwatch("client", samples)
    stream = stream_of(tokens)
    pieces = [stream[start : start + 8192] for start in range(0, len(stream), 8192)]
    request = GenerationRequest("run-0-0-1", tokens.prompt, 0, 4 * tokens.chunk, "salt")
    with watch.time("read the stream", 2 * tokens.chunk * samples):
        for _ in range(samples):
            events = EventStream(request, VOCABULARY)
            received = sum(len(chunk.token_ids) for piece in pieces for chunk in events.feed(piece))
            assert received == 2 * tokens.chunk and events.ended
    return watch.measurements


class InstantEngine:
    """An engine that answers at once, except that every second group waits for an abort after its first chunk."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._aborted: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        tokens = self._tokens
        _, group_id, _, _ = request.request_id.split("-")
        if not request.generated:
            yield Chunk(tokens.ids, tokens.logprobs)
            if int(group_id) % 2:
                aborted = self._aborted[request.request_id] = asyncio.Event()
                await aborted.wait()
                yield Chunk([], [], "abort")
                return
        yield Chunk(tokens.ids, tokens.logprobs, "stop")

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._aborted:
                self._aborted[request_id].set()

    async def holds(self, version: int) -> bool:
        return True

    async def close(self) -> None:
        pass


def measure_driver(samples: int, tokens: Tokens) -> list[Measurement]:
    """Measure two rounds: half of the groups finish in the first, and the others are cut and resumed in the second."""
    watch = Stopwatch("driver", samples)
    pool = filled_pool(samples, tokens, quota=samples // GROUP_SIZE // 2, over_provisioning=2.0)
    driver = RolloutDriver(pool, InstantEngine(tokens), run_id="run")

    async def round_of(version: int) -> None:
        if version:
            pool.begin_round(version)
        await driver.run_round()

    with asyncio.Runner() as runner:
        with watch.time("round with cuts", 3 * tokens.chunk * samples // 2):
            runner.run(round_of(0))
        with watch.time("round of resumed samples", tokens.chunk * samples // 2):
            runner.run(round_of(1))
    assert not len(pool)
    return watch.measurements


def measure_batch(samples: int, tokens: Tokens) -> list[Measurement]:
    """Measure a batch of samples with two policy versions each, and the state of a pool that holds them."""
    watch = Stopwatch("batch", samples)
    total = 2 * tokens.chunk * samples
    pool = filled_pool(samples, tokens, quota=samples // GROUP_SIZE, over_provisioning=1.0)
    ready = [sample for _, sample in pool.ready()]
    for version in range(2):
        pool.begin_round(version)
        for sample in ready:
            pool.start(sample)
            pool.record(sample, array("i", tokens.ids), array("f", tokens.logprobs))
            if version:
                pool.finish(sample, FinishReason.STOP)
            else:
                pool.park(sample)
    with watch.time("state_dict", total):
        state = state_dict(pool)
    del state
    groups = pool.take()
    with watch.time("batch_rows"):
        rows = batch_rows(groups)
    del rows
    with watch.time("rollout_output", total):
        output = rollout_output(groups)
    del output
    with watch.time("loss_mask", total):
        mask = loss_mask(groups, mask_below=1)
    del mask
    done = Round(1, groups=groups, seconds=1.0, requests=samples)
    with watch.time("round_metrics"):
        round_metrics(done, pool, sync_seconds=0.0, max_staleness=5)
    return watch.measurements


MEASURES = (measure_pool, measure_client, measure_driver, measure_batch)


def measure(sizes: Sequence[int], repeats: int, chunk: int, *, with_gc: bool) -> list[Measurement]:
    """Measure all operations at all sizes, alternating."""
    tokens = Tokens(chunk)
    for measure_part in MEASURES:
        measure_part(min(sizes), tokens)  # warm-up
    measurements = []
    if not with_gc:
        gc.disable()
    try:
        for repeat in range(repeats):
            for samples in sizes if repeat % 2 == 0 else reversed(sizes):
                for measure_part in MEASURES:
                    measurements += measure_part(samples, tokens)
            print(f"repeat {repeat + 1} of {repeats}: done", flush=True)
    finally:
        gc.enable()
    return measurements


def medians(measurements: Sequence[Measurement]) -> dict[tuple[str, str], dict[int, Measurement]]:
    """Measurement with the median time, by operation and number of samples."""
    cells: dict[tuple[str, str], dict[int, list[Measurement]]] = {}
    for m in measurements:
        cells.setdefault((m.part, m.operation), {}).setdefault(m.samples, []).append(m)
    return {
        operation: {
            samples: sorted(repeats, key=lambda m: m.seconds)[(len(repeats) - 1) // 2]
            for samples, repeats in sorted(by_samples.items())
        }
        for operation, by_samples in cells.items()
    }


def growth(by_samples: dict[int, Measurement]) -> float:
    """Ratio of the cost per sample at the largest size to the smallest; 1 is linear."""
    fewest, *_, most = by_samples.values()
    return most.per_sample / fewest.per_sample if fewest.seconds else float("nan")


def table(measurements: Sequence[Measurement]) -> str:
    """Microseconds per sample by number of samples."""
    found = medians(measurements)
    sizes = sorted({m.samples for m in measurements})
    rows = []
    for (part, operation), by_samples in found.items():
        most = by_samples[sizes[-1]]
        rows.append(
            [
                part,
                operation,
                *(f"{by_samples[samples].per_sample:.2f}" for samples in sizes),
                f"{growth(by_samples):.2f}" if len(sizes) > 1 else "",
                f"{most.seconds / most.tokens * 1e6:.3f}" if most.tokens else "",
                f"{GROUP_SIZE * most.per_sample:.1f}",
            ]
        )
    header = (
        "part", "operation", *(f"µs per sample, {samples:,} samples" for samples in sizes),
        "ratio of the last to the first", "µs per token", "µs per group",
    )  # fmt: skip
    return markdown(header, rows)


def draw(measurements: Sequence[Measurement], path: Path) -> None:
    """Plot the cost per sample over the number of samples. Level lines are linear work."""
    figure = new_figure(8, 5.5)
    axes = figure.subplots()
    ends: list[tuple[float, str, str]] = []
    for (part, operation), by_samples in medians(measurements).items():
        costs = [m.per_sample for m in by_samples.values()]
        axes.plot(list(by_samples), costs, marker="o", markersize=4, color=COLORS[part])
        ends.append((costs[-1], f"{part}: {operation}", COLORS[part]))
    axes.set_xscale("log")
    axes.set_yscale("log")
    # Labels are beside the ends of their lines, moved apart if they would overlap.
    lowest = 0.0
    for cost, name, color in sorted(ends):
        lowest = max(cost, 1.35 * lowest)
        axes.annotate(
            name, (1.02, lowest), xycoords=("axes fraction", "data"), fontsize=8, color=color, va="center",
            annotation_clip=False,
        )  # fmt: skip
    axes.set_xlabel("samples")
    axes.set_ylabel("CPU microseconds per sample")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="how many samples")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each measurement")
    parser.add_argument("--chunk", type=int, default=64, help="tokens per chunk; a sample has two")
    parser.add_argument("--with-gc", action="store_true", help="leave Python's garbage collector on")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmark_output"), help="folder of the results")
    parser.add_argument("--plot-only", type=Path, metavar="FILE", help="table and picture of the results in this file")
    options = parser.parse_args()
    for name in ("repeats", "chunk"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, but it must be at least 1")
    wrong = [samples for samples in options.samples if samples < 1 or samples % (2 * GROUP_SIZE)]
    if wrong:
        parser.error(f"--samples has {wrong}, but they must be multiples of {2 * GROUP_SIZE}: two halves of groups")
    require_matplotlib()

    if options.plot_only:
        path = options.plot_only
        measurements = [Measurement(**result) for result in read_json(path)[1]]
    else:
        path = options.output_dir / "overhead.json"
        measurements = measure(options.samples, options.repeats, options.chunk, with_gc=options.with_gc)
        settings = {name: getattr(options, name) for name in ("samples", "repeats", "chunk", "with_gc")}
        write_json(path, settings, [asdict(m) for m in measurements])
    print(f"\n{table(measurements)}")
    picture = path.with_suffix(".png")
    draw(measurements, picture)
    print(f"\npicture: {picture.resolve()}")


if __name__ == "__main__":
    main()
