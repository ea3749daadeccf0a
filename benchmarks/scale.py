"""Which part saturates first: one to 64 servers of 1,024 sequences, and one to 64 trainer processes.

    python benchmarks/scale.py                                  # ten minutes
    python benchmarks/scale.py --servers 1 8 --processes 1 8

Servers are simulated, in the default mode and with the default options. Their step times are assumed, not measured
(`--step-time`). The shares of a core are computed: generated tokens per second times the CPU time per token that
overhead.py and api_server.py measured, for the client and the round driver of a trainer process and for the API
process of a server. A share over 100 % is a limit: the part cannot keep pace with the simulated servers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from overhead import Measurement, medians
from report import earlier_results, markdown, read_json, write_json

from trl_april.config import AprilOptions
from trl_april.tuning.scenario import Lognormal, Scenario
from trl_april.tuning.simulation import Mode, run
from trl_april.tuning.step_time import parse_step_time


MEASURED = Path(__file__).parent.parent / "docs" / "measured"
SEQUENCES, GROUP_SIZE = 1024, 16  # of a server, of a group
STEP_TIME = "1:0.008,256:0.014,1024:0.034"


@dataclass(frozen=True, slots=True)
class Cell:
    """A simulated training, and the seconds that its simulation took."""

    servers: int
    processes: int
    in_flight: int
    generated_per_second: float
    trained_per_second: float
    simulated_in: float


def simulate(servers: int, processes: int, step_time: str) -> Cell:
    """Twice as many samples in the pool as the servers decode at once: about half have finished before their group."""
    defaults = AprilOptions().with_schedule()
    quota = round(2 * servers * SEQUENCES / GROUP_SIZE / defaults.over_provisioning)
    scenario = Scenario(
        parse_step_time(step_time), Lognormal(4000, 1.0, 16, 32_768), quota=quota, group_size=GROUP_SIZE,
        prompt_tokens=500, servers=servers, processes=processes, max_sequences=SEQUENCES, max_batched_tokens=8192,
        train_seconds=30.0, sync_seconds=2.0, max_staleness=defaults.max_staleness,
    )  # fmt: skip
    began = time.perf_counter()
    result = run(scenario, Mode.KEEP, defaults.over_provisioning)
    return Cell(
        servers, processes, round(quota * defaults.over_provisioning) * GROUP_SIZE, result.generated_per_second,
        result.trained_per_second, time.perf_counter() - began,
    )  # fmt: skip


def microseconds() -> dict[str, float]:
    """Measured CPU time per token, by part."""
    found = medians([Measurement(**result) for result in read_json(MEASURED / "overhead.json")[1]])
    client, driver = (
        cells[max(cells)] for cells in (found["client", "read the stream"], found["driver", "round with cuts"])
    )
    trainer = sum(one.seconds / one.tokens * 1e6 for one in (client, driver))
    turns = [turn for turn in read_json(MEASURED / "api_server.json")[1] if turn["streams"] == 512]
    return {"trainer": trainer, **{kind: statistics.median(turn[kind] for turn in turns) for kind in ("text", "ids")}}


def table(cells: Sequence[Cell]) -> str:
    """Simulated pace, computed shares of a core, and the part with the largest share."""
    costs, alone = microseconds(), next(cell.generated_per_second for cell in cells if cell.servers == 1)
    rows = []
    for cell in cells:
        pace = cell.generated_per_second / 1e6  # times microseconds: cores
        trainer = pace / cell.processes * costs["trainer"]
        api, with_text = (pace / cell.servers * costs[kind] for kind in ("ids", "text"))
        numbers = cell.servers, cell.processes, cell.in_flight, round(cell.generated_per_second)
        rows.append([
            *(f"{number:,}" for number in numbers), f"{cell.generated_per_second / cell.servers / alone:.2f}",
            *(f"{share:.0%}" for share in (trainer, api, with_text)),
            "trainer process" if trainer > api else "API process",
        ])  # fmt: skip
    header = (
        "servers", "trainer processes", "samples in the pool", "generated tok/s", "of one server, per server",
        "core of a trainer process", "core of an API process, token ids only", "with text", "largest share",
    )  # fmt: skip
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8, 64], help="trainer processes")
    parser.add_argument("--step-time", default=STEP_TIME, help="of a server: SEQUENCES:SECONDS, separated by commas")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmark_output"), help="folder of the results")
    options = parser.parse_args()
    path, settings = options.output_dir / "scale.json", {"step_time": options.step_time}
    cells = [Cell(**result) for result in earlier_results(path, settings)]
    done = {(cell.servers, cell.processes) for cell in cells}
    for servers in options.servers:
        for processes in options.processes:
            if (servers, processes) not in done:
                cells.append(simulate(servers, processes, options.step_time))
                write_json(path, settings, [asdict(cell) for cell in cells])
                print(f"{servers} servers, {processes} processes: {cells[-1].simulated_in:.0f} s", flush=True)
    print(f"\n{table(cells)}")


if __name__ == "__main__":
    main()
