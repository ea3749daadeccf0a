"""The pause by itself: whatever fails, what may be paused is resumed, and an error that matters is not hidden."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trl_april.errors import ServerError
from trl_april.server_pause import ServerPause


class Server:
    """Answers all but what fails, and remembers what it was asked."""

    def __init__(self, *, failing: tuple[str, ...] = (), paused: bool = False) -> None:
        self.failing, self.paused = failing, paused
        self.asked: list[str] = []

    def answer(self, method: str, path: str) -> dict[str, Any]:
        self.asked.append(path.split("?")[0])
        if self.asked[-1] in self.failing:
            raise ServerError(f"no /{path}")
        return {"is_paused": self.paused}


def pause_of(server: Server) -> ServerPause:
    return ServerPause(server.answer, "http://there")


def test_it_is_resumed_once():
    server = Server()
    pause = pause_of(server)
    pause.end()
    assert pause.begin() and pause.is_on
    pause.end()
    pause.give_up()
    assert server.asked == ["pause", "resume"] and not pause.is_on


def test_a_pause_whose_answer_was_lost_is_ended_too(caplog):
    server = Server(failing=("pause",))
    pause = pause_of(server)
    assert not pause.begin()
    assert "What runs is cut instead." in caplog.text
    pause.end()
    assert server.asked == ["pause", "resume"]


def test_a_server_that_is_not_resumed_is_an_error_unless_there_is_another(caplog):
    pause = pause_of(Server(failing=("resume",)))
    pause.begin()
    with pytest.raises(ServerError, match="no /resume"):
        pause.end()
    with caplog.at_level(logging.WARNING, "trl_april"):
        pause.give_up()
    assert "http://there could not be resumed. no /resume" in caplog.text and not pause.is_on


@pytest.mark.parametrize("error", [ValueError("<html>"), AttributeError("'list' object has no attribute 'get'")])
def test_what_is_no_server_is_no_concern_of_a_pause(error):
    """Its check says in a sentence what it is."""

    def answer(method, path):
        raise error

    ServerPause(answer, "http://there").end_foreign()


@pytest.mark.parametrize("server", [Server(), Server(failing=("is_paused",))])
def test_a_server_that_nobody_left_paused_is_let_be(server, caplog):
    pause_of(server).end_foreign()
    assert server.asked == ["is_paused"] and caplog.text == ""
