"""Python imports this file at the start of every process of tests/ray: jobs and Ray's processes become copies.

So do the processes of pytest-xdist.

Such a process asks one of the servers in the folder `RAYCL_COPY_SERVER` (tests/lab/copy_server.py) for a copy of a
process that has imported the libraries already, passes the signals that it gets on to the copy, and ends with it.
"""

# ruff: noqa: PTH109, PTH112, PTH119 - every process would import pathlib

import os
import sys

SETUP, WORKER = "ray/_private/workers/setup_worker.py", "ray/_private/workers/default_worker.py"
DAEMONS = (
    "ray/_private/log_monitor.py",
    "ray/_private/runtime_env/agent/main.py",
    "ray/autoscaler/_private/monitor.py",
    "ray/dashboard/agent.py",
    "ray/dashboard/dashboard.py",
)
XDIST = ["-c", "import sys;exec(eval(sys.stdin.readline()))"]
"""How execnet starts a process."""

REPO = os.path.realpath(os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../.."))


def _arguments() -> list[str] | None:
    """Return the script and its arguments; None: nothing that is copied. What Ray sets for a worker is set here."""
    texts = [text for text in sys.orig_argv[1:3] if text != "-u"] + sys.orig_argv[3:]
    script = texts[0] if texts else ""
    if script.endswith(SETUP):
        return _worker(texts[1:])
    is_job = os.path.basename(os.path.dirname(script)) == "jobs" and script.endswith(".py")
    is_submission = os.path.basename(script) == "ray" and texts[1:2] == ["job"]
    return texts if is_job or is_submission or texts == XDIST or script.endswith((WORKER, *DAEMONS)) else None


def _worker(result: list[str]) -> list[str] | None:
    """Return the same for a worker whose runtime environment is variables and a working directory, and nothing else."""
    import json
    import re

    options = [text for text in result if text.startswith(("--serialized-runtime-env-context=", "--language="))]
    values = dict(option.split("=", 1) for option in options)
    context = json.loads(values.get("--serialized-runtime-env-context") or "{}")
    prefix = context.get("command_prefix") or ["cd", os.getcwd(), "&&"]
    is_plain = prefix[:1] + prefix[2:] == ["cd", "&&"] and os.path.isdir(prefix[1])
    is_python = values.get("--language") == "PYTHON" and context.get("py_executable", sys.executable) == sys.executable
    arguments = [text for text in result if text not in options]
    if not (is_plain and is_python) or context.get("override_worker_entrypoint"):
        return None
    if not arguments[0].endswith(WORKER):  # the server of Ray's client, which is set up in the same way
        return None
    for name, value in context.get("env_vars", {}).items():  # as ray._private.utils.update_envs
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    os.chdir(prefix[1])
    return arguments


def _template(script: str) -> str:
    """Return the name of the server: `libraries` for a process that imports raycl from another folder, as submitted
    jobs do, or after pytest's plugins."""
    if script == XDIST[0]:
        return "libraries"
    folders = [os.path.dirname(script), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    result = [folder for folder in folders if os.path.isdir(os.path.join(folder, "raycl"))]
    return "libraries" if result and os.path.realpath(result[0]) != REPO else "package"


def _become(servers: str) -> None:
    arguments = _arguments()
    if arguments is None:
        return
    import json
    import signal
    import socket

    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.path.join(servers, _template(arguments[0])))
        data = json.dumps(request).encode()
        socket.send_fds(connection, [len(data).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(data)
        for passed in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(passed, lambda number, _: connection.sendall(bytes([number])))
        answer = connection.recv(2)
    code = int.from_bytes(answer, "big", signed=True) if answer else 1  # nothing: the server was ended
    if code < 0 and -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code & 255)


if "RAYCL_COPY_SERVER" in os.environ:
    _become(os.environ["RAYCL_COPY_SERVER"])
