"""How thorough a test run is: `make test` takes the few cases, `make test-all` the many."""

import os


THOROUGH = os.environ.get("APRIL_TESTS") == "all"


def cases(few: int, many: int) -> int:
    """Number of random cases: `few` by default, `many` under `APRIL_TESTS=all`, as `make test-all` sets it."""
    return many if THOROUGH else few
