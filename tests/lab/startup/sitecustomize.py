"""Python imports this file at the start of every process of the tests; only Ray's workers do something with it.

Such a process asks `RAYCL_WORKER_SERVER` (tests/lab/worker_server.py) for a copy of a process that has imported the
libraries already, and ends with the copy.
"""

# ruff: noqa: PTH109, PTH119 - every process would import pathlib

import os
import sys

SETUP, WORKER = "setup_worker.py", "default_worker.py"


def _request() -> dict[str, object] | None:
    """What Ray wants to start; None: not a worker, or one that is to start in another way than by its environment."""
    script = sys.orig_argv[1] if len(sys.orig_argv) > 1 else ""
    if os.path.basename(script) not in (SETUP, WORKER):
        return None
    import json
    import re

    arguments, context = sys.orig_argv[1:], {}
    if os.path.basename(script) == SETUP:
        options = [
            text for text in arguments[1:] if text.startswith(("--serialized-runtime-env-context=", "--language="))
        ]
        arguments = [text for text in arguments[1:] if text not in options]
        values = dict(option.split("=", 1) for option in options)
        context = json.loads(values.get("--serialized-runtime-env-context") or "{}")
        is_plain = context.get("py_executable", sys.executable) == sys.executable and not context.get("command_prefix")
        if values.get("--language") != "PYTHON" or not is_plain or context.get("override_worker_entrypoint"):
            return None
    if os.path.basename(arguments[0]) != WORKER:  # the server of Ray's client, which is set up in the same way
        return None
    for name, value in context.get("env_vars", {}).items():  # as ray._private.utils.update_envs
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    return {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}


def _become(server: str) -> None:
    request = _request()
    if request is None:
        return
    import json
    import socket

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        data = json.dumps(request).encode()
        socket.send_fds(connection, [len(data).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(data)
        code = connection.recv(1)  # nothing: the server was ended
    os._exit(code[0] if code else 1)


if "RAYCL_WORKER_SERVER" in os.environ:
    _become(os.environ["RAYCL_WORKER_SERVER"])
