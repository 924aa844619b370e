"""The process that tries a form of answers for another one (`raycl.generation.grammars`).

llguidance limits its own work, except where several regular expressions must hold together (`allOf` of patterns in a
JSON schema, `&` in Lark): time and memory of its search for a text of all of them double with each expression. So the
kernel ends another process, and only that request fails. The process is started as a file, with the import path of
the other one as its argument, and imports nothing of raycl. It reads a grammar from its standard input and writes what
is wrong with it, or nothing.
"""

import json
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

CPU_S = 2.0
"""Seconds of CPU time for one form."""

MEMORY_MIB = 1024
"""Address space of the process."""


def main(path: Sequence[str]) -> None:
    """Try one grammar."""
    sys.path[:] = path
    from llguidance import LLMatcher, LLTokenizer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of a terminal is for the parent process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # macOS has no memory limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MIB * 2**20, MEMORY_MIB * 2**20))
    grammar = sys.stdin.buffer.read().decode()
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)  # its tokens are the 256 bytes
    sys.stdout.buffer.write((matcher.get_error() if matcher.is_error() else "").encode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
