"""Addresses of vLLM servers, as `vllm_server_base_url` gives them: one, a list, or one text with commas."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from ..errors import ConfigError


EXAMPLE = "http://127.0.0.1:8000,http://127.0.0.1:8001"


def server_addresses(value: str | Sequence[str], name: str = "vllm_server_base_url") -> list[str]:
    """The addresses in `value`, without a slash at the end. A single one is checked when it is connected to.

    Raises:
        ConfigError: If one of several is empty, given twice, or not an address. The message begins with `name`.
    """
    given = value.split(",") if isinstance(value, str) else list(value)
    if isinstance(value, str) and len(given) == 1:
        return [value.rstrip("/")]
    if not given:
        raise ConfigError(f"{name} is an empty list; it must have at least one address. Leave it out for none.")
    addresses: list[str] = []
    for entry in given:
        if not isinstance(entry, str) or not entry.strip():
            raise ConfigError(
                f"{name} is {value!r}, which has an empty entry or one that is not text; each must be an address. "
                f"Remove it, or write {EXAMPLE}."
            )
        address = entry.strip().rstrip("/")
        if not _is_address(address):
            raise ConfigError(
                f"{name} has the entry {entry!r}; each must have the form http://HOST:PORT. Write {EXAMPLE}."
            )
        if address in addresses:
            raise ConfigError(
                f"{name} has {address} twice; each server is given once, since it would get twice the requests. "
                "Remove one."
            )
        addresses.append(address)
    return addresses


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not set(text) & set(" \t'\"")
