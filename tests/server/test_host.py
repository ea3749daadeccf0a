"""Addresses of servers, and this machine: where a server can bind, open files, GPUs."""

import resource
import socket
import sys
from unittest.mock import Mock

import pytest
from transformers import HfArgumentParser
from trl import TrlParser

from trl_april.commands.serve import build_parser
from trl_april.config import APRILGRPOConfig
from trl_april.errors import ConfigError
from trl_april.server import host as host_module
from trl_april.server.command_line import flag_value
from trl_april.server.host import (
    MAX_OPEN_FILES,
    OTHER_FILES,
    bind,
    check_address,
    reserve_connections,
    server_addresses,
    warn_if_exposed,
)
from trl_april.server.local import LocalServer


def test_server_binds_to_loopback_by_default(caplog):
    """Its development endpoints run commands for everybody who reaches them."""
    for host in (flag_value(LocalServer("m").command(8000), "--host"), build_parser().parse_args(["m"]).host):
        assert host == "127.0.0.1"
        warn_if_exposed(host)
    assert caplog.text == ""


@pytest.mark.parametrize(("host", "exposed"), [("0.0.0.0", True), ("somewhere", True), ("localhost", False)])
def test_address_that_other_machines_reach_is_warned_of(host, exposed, caplog):
    warn_if_exposed(host)
    assert (f"binds to {host}. Its development endpoints run commands for everybody" in caplog.text) == exposed


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 0, "port is 0, .*1 to 65535"),
        ("127.0.0.1", "8000", "port is '8000', .*whole number"),
        ("http://localhost", None, "host is 'http://localhost', but that name does not resolve"),
        ("a..b", None, "host is 'a..b', but that name does not resolve"),
        ("192.0.2.1", None, "cannot bind to 192.0.2.1, .*Give an address of this machine"),
    ],
)
def test_address_that_cannot_be_bound_is_refused(host, port, words):
    with pytest.raises(ConfigError, match=words):
        check_address(host, port)


def test_address_of_a_disabled_family_is_refused(monkeypatch):
    monkeypatch.setattr(socket, "socket", Mock(side_effect=OSError(97, "Address family not supported")))
    with pytest.raises(ConfigError, match="cannot bind to ::1, port 0: Address family not supported"):
        bind("::1", 0)


def test_name_means_its_ipv4_address_as_in_vllm(monkeypatch):
    """Otherwise a program that listens there would answer instead of the server."""
    resolve = socket.getaddrinfo

    def both(host, port, family=0, *rest, **options):
        found = resolve("127.0.0.1" if host == "localhost" else host, port, family, *rest, **options)
        six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
        return [six, *found] if host == "localhost" and family == 0 else found

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host in ("localhost", "127.0.0.1"):
            with pytest.raises(ConfigError, match=f"cannot bind to {host}, .*free port"):
                bind(host, taken.getsockname()[1])


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, MAX_OPEN_FILES),
        (10**6, 10**6, 10**6),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_limit_of_open_files_is_raised_for_connections(monkeypatch, soft, hard, raised):
    limits = [(soft, hard)]
    monkeypatch.setattr("resource.getrlimit", lambda which: limits[-1])
    monkeypatch.setattr("resource.setrlimit", lambda which, given: limits.append(given))
    assert reserve_connections(2048) == (sys.maxsize if raised is None else raised - OTHER_FILES)
    assert limits[-1] == (raised or soft, hard)


def test_too_many_connections_are_refused_before_they_fail(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 1024))
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    with pytest.raises(ConfigError, match="769 requests in flight.* 1 files.* only 1024.*ulimit -Hn"):
        reserve_connections(1025 - OTHER_FILES)
    assert reserve_connections(192, files_each=4) == 192
    with pytest.raises(ConfigError, match="193 requests in flight.* 4 files"):
        reserve_connections(193, files_each=4)


def test_gpus_are_counted_by_the_drivers_and_unknown_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr(host_module, "NVIDIA_GPUS", tmp_path / "nvidia")
    monkeypatch.setattr(host_module, "AMD_NODES", tmp_path / "amd")
    assert host_module.gpus_of_host() is None
    for number, gpu_id in enumerate(("0", "51765", "4660")):  # the first node is a CPU
        (tmp_path / "amd" / str(number)).mkdir(parents=True)
        (tmp_path / "amd" / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
    assert host_module.gpus_of_host() == 2
    (tmp_path / "amd" / "3").mkdir()  # unreadable, as in a container that may not use this one
    assert host_module.gpus_of_host() == 3
    (tmp_path / "nvidia" / "0000:01:00.0").mkdir(parents=True)
    assert host_module.gpus_of_host() == 1


A, B = "http://127.0.0.1:8000", "https://gpu-2:8001/served"
PAIR = f"{A},{B}"


@pytest.mark.parametrize(
    ("value", "addresses"),
    [
        *((value, [A, B]) for value in ((f"{A}/", B), PAIR, f" {A}/ , {B} ", [f"{A} ", f"{B}/"])),
        *((value, [value]) for value in (A, "http://[::1]:8000", "no address at all")),  # left to the connection
        (f"{A}/", [A]),
    ],
)
def test_several_addresses_are_a_list_or_a_text_with_commas(value, addresses):
    assert server_addresses(value) == addresses


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "--x is an empty list.*at least one address"),
        (f"{A},", "entry ''.*Write http"),
        ([A, 7], "entry 7"),
        (f"{A},127.0.0.1:8001", "entry '127.0.0.1:8001'.*form http://HOST:PORT"),
        ([A, "http://h:0"], "entry 'http://h:0'"),
        ([f"['{A}'", A], "form http://HOST:PORT"),
        (f"{A},{A}/", f"has {A} twice.*Remove"),
    ],
)
def test_an_error_names_value_rule_and_remedy(value, message):
    with pytest.raises(ConfigError, match=message):
        server_addresses(value, "--x")


def test_the_option_comes_from_python_a_command_line_and_yaml(tmp_path):
    """TRL's option is text, and stays text for all that read or save it."""
    assert APRILGRPOConfig(str(tmp_path), vllm_server_base_url=[A, B]).vllm_server_base_url == PAIR
    arguments = ["--output_dir", str(tmp_path), "--vllm_server_base_url", PAIR]
    (args,) = HfArgumentParser(APRILGRPOConfig).parse_args_into_dataclasses(arguments)
    assert args.vllm_server_base_url == PAIR
    for number, yaml in enumerate([f"vllm_server_base_url: {PAIR}", f"vllm_server_base_url:\n- {A}\n- {B}"]):
        config = tmp_path / f"{number}.yaml"
        config.write_text(f"output_dir: {tmp_path}\n{yaml}\n")
        (args,) = TrlParser(APRILGRPOConfig).parse_args_and_config(["--config", str(config)])
        assert args.vllm_server_base_url == PAIR
