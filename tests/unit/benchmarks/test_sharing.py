"""Reading the kernel's account of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fork_server import Call, ForkServer

from benchmarks.streams.reader import SMAPS, ProcessMemory, memory

TEXT = """\
7f0000000000-7f0000100000 r--s 00000000 fd:01 1234    /cache/tokens/0a b.arrow
Size:               1024 kB
Rss:                1000 kB
Pss:                 500 kB
Private_Clean:         0 kB
Private_Dirty:         0 kB
VmFlags: rd sh mr
7f0000200000-7f0000300000 rw-p 00000000 00:00 0
Size:               1024 kB
Pss:                 300 kB
Private_Clean:         4 kB
Private_Dirty:       200 kB
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0       [stack]
Pss:                  12 kB
Private_Clean:         0 kB
Private_Dirty:        12 kB
"""


def test_mapped_and_private_memory_are_distinguished() -> None:
    assert memory(TEXT) == ProcessMemory(mapped_pss=500, private=216)


@pytest.mark.skipif(not SMAPS.exists(), reason="Linux only")
def test_two_readers_share_one_copy(fork_server: ForkServer, tmp_path: Path) -> None:
    fork_server.run([Call("forked_readers:main", (600, tmp_path), tmp_path / "log")], 120)
    shared = json.loads((tmp_path / "shared.json").read_text())
    assert shared["ok"] and shared["value"] > 0.5
