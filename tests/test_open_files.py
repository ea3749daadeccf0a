"""Room for connections: the limit of the process is raised, and what it cannot hold is refused."""

from __future__ import annotations

import resource
import sys

import pytest

from trl_april import open_files
from trl_april.errors import ConfigError
from trl_april.open_files import MOST, OTHERS, make_room


class Limits:
    """Those of a process, in the place of the real ones."""

    def __init__(self, soft: int, hard: int) -> None:
        self.limits = (soft, hard)

    def get(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.limits

    def set(self, which: int, limits: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_NOFILE and limits[1] == self.limits[1]
        self.limits = limits


@pytest.fixture
def limits(monkeypatch):
    def of(soft: int, hard: int) -> Limits:
        given = Limits(soft, hard)
        monkeypatch.setattr(open_files.resource, "getrlimit", given.get)
        monkeypatch.setattr(open_files.resource, "setrlimit", given.set)
        return given

    return of


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 4096),
        (1024, 10**6, MOST),
        (1024, resource.RLIM_INFINITY, MOST),
        (10**6, 10**6, 10**6),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_be(limits, soft, hard, raised):
    given = limits(soft, hard)
    room = make_room(2048)
    assert given.limits == (raised, hard)
    assert room == (sys.maxsize if raised == resource.RLIM_INFINITY else raised - OTHERS)


def test_more_than_that_is_refused_before_connections_fail(limits):
    limits(256, 1024)
    make_room(1024 - OTHERS)
    with pytest.raises(ConfigError, match="769 requests in flight.* may have 1024 files open.*ulimit -Hn"):
        make_room(1025 - OTHERS)
