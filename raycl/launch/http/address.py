"""Addresses of HTTP servers: sockets that listen, URLs, and which ones are this machine's alone."""

from __future__ import annotations

import ipaddress
import os
import socket
from urllib.parse import urlsplit

from raycl.errors import LaunchError


def bound(host: str, port: int, shared: bool = False, setting: str = "port=") -> socket.socket:
    """Return a socket that listens.

    Args:
        port: the port; 0: any free port.
        shared: other processes of this user may listen on it too.
        setting: the setting that chooses the port, for the message.

    Raises:
        LaunchError: the address is taken, or none of this machine's.
    """
    try:
        return socket.create_server(
            (host, port), family=family_of(host), backlog=2048, reuse_port=shared, dualstack_ipv6=is_dual(host)
        )
    except OSError as error:
        raise bind_error(host, port, error, setting) from error


def bind_error(host: str, port: int, error: OSError, setting: str = "port=") -> LaunchError:
    """Return the error of a user whose address cannot be listened on."""
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return LaunchError(
        f"{_written(host)}:{port} cannot be listened on ({reason}): choose a free port with {setting}NUMBER, and a "
        "host that is an address of this machine"
    )


def url_of(host: str, port: int) -> str:
    """Return the URL for clients."""
    return f"http://{_written(host)}:{port}"


def _written(host: str) -> str:
    """Return the host as it is written before a port."""
    return f"[{host}]" if ":" in host else host


def family_of(host: str) -> socket.AddressFamily:
    """Return IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_dual(host: str) -> bool:
    """Return whether IPv4 clients connect to the same socket."""
    return host == "::" and socket.has_dualstack_ipv6()


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches it."""
    try:
        address = ipaddress.ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None  # of a dual-stack socket
        return (mapped or address).is_loopback
    except ValueError:
        return host == "localhost"


def is_local(host: bytes) -> bool:
    """Return whether a Host header names this machine: a web page elsewhere may have its name point here (DNS
    rebinding)."""
    try:
        name = urlsplit(f"//{host.decode('latin-1')}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)
