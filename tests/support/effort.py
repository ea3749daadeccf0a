"""How thorough a test run is: `make test` takes the few cases, `make test-all` the many."""

import os
from collections.abc import Callable
from typing import TypeVar


T = TypeVar("T")
THOROUGH = os.environ.get("APRIL_TESTS") == "all"


def cases(few: int, many: int) -> int:
    """Number of random cases: `few` by default, `many` under `APRIL_TESTS=all`, as `make test-all` sets it."""
    return many if THOROUGH else few


def until_shown(run: Callable[[], T], is_shown: Callable[[T], bool]) -> T:
    """The result of the first run in which the situation of a test arose: on a busy machine, timing may prevent it."""
    for _ in range(3):
        result = run()
        if is_shown(result):
            return result
    raise AssertionError("In three runs, the situation that is tested did not arise.")
