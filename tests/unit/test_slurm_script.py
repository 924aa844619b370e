"""cluster/slurm.sh as Slurm runs it: signals, exit statuses, and the requeue; programs of Slurm and Ray stand in.

`srun` and `ray symmetric-run` run the command that they are given and pass its exit status on, as the real ones do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "cluster" / "slurm.sh"
JOB = "4711"

PROGRAMS = {
    # The head's name, and more names than fit into a pipe: a reader of the first line alone ends this program.
    "scontrol": """#!/bin/bash
echo "$*" >>"$CALLS"
case "$1 $2" in
    "show hostnames") printf 'node%d\\n' {1..20000} ;;
    "show job") echo "JobId=$3 JobState=${FAKE_STATE:-RUNNING} Restarts=0" ;;
esac
""",
    # The real one sends SIGTERM to every process of the step, Ray's too: `srun` must not get it while one trains.
    "srun": """#!/bin/bash
trap 'echo "srun got SIGTERM" >>"$CALLS"; kill "$step"; wait "$step"; exit 143' TERM
while [[ $1 == --* ]]; do shift; done
"$@" &
step=$!
wait "$step"
""",
    "ray": """#!/bin/bash
[[ -z ${FAKE_SLOW_START:-} ]] || { echo starting >"$STARTED"; exec sleep 60; }
while [[ $1 != -- ]]; do shift; done
shift
"$@"
""",
}

DRIVER = """
import os, signal, sys, time

def say(what):
    with open(os.environ["CALLS"], "a") as calls:
        print(what, file=calls)

def leave(number, frame):
    say("driver got SIGTERM")
    time.sleep(0.5)
    say("driver wrote a checkpoint")
    sys.exit(75)

signal.signal(signal.SIGTERM, leave)
with open(os.environ["STARTED"], "w") as started:
    print(os.environ.get("RAYCL_RUN_NAME"), *sys.argv[1:], file=started)
if os.environ["FAKE_STATUS"] != "waits":
    sys.exit(int(os.environ["FAKE_STATUS"]))
while True:
    time.sleep(0.1)
"""


class Job:
    """A folder that a job is submitted from, with its programs; `start` runs the script there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls, self.started = folder / "calls", folder / "started"
        self.calls.touch()
        self.process: subprocess.Popen[str] | None = None
        files = {f"bin/{name}": text for name, text in PROGRAMS.items()}
        files |= {".venv/bin/activate": "", "jobs/train_stream.py": DRIVER}
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755)
        (folder / "bin" / "python").symlink_to(sys.executable)
        (folder / "tmp").mkdir()

    def start(self, *arguments: str, status: str = "waits", **more: str) -> subprocess.Popen[str]:
        """Run the script as the batch step of a job on two nodes."""
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(self.folder / "tmp"),
            "CALLS": str(self.calls),
            "STARTED": str(self.started),
            "FAKE_STATUS": status,
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NODELIST": "node[1-20000]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "4",
            **more,
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = ["bash", str(SCRIPT), *arguments]
        self.process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
        return self.process

    def end(self, *arguments: str, status: str) -> int:
        """Start it and wait; its exit status."""
        self.start(*arguments, status=status).communicate(timeout=30)
        assert self.process is not None
        return int(self.process.returncode)

    def stop(self, *arguments: str, times: int = 1, **more: str) -> int:
        """Start it, send SIGTERM to the script alone when the driver (or Ray) runs, and wait; its exit status."""
        process = self.start(*arguments, **more)
        end = time.monotonic() + 30
        while not (self.started.exists() and self.started.read_text()):
            assert time.monotonic() < end and process.poll() is None, process.communicate(timeout=5)[0]
            time.sleep(0.02)
        for _ in range(times):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        process.communicate(timeout=30)
        return int(process.returncode)

    def count(self, call: str) -> int:
        return self.calls.read_text().splitlines().count(call)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    result = Job(tmp_path)
    yield result
    assert not list((tmp_path / "tmp").iterdir()), "the script left files behind"
    if result.process is not None and result.process.poll() is None:
        os.killpg(result.process.pid, signal.SIGKILL)
        result.process.communicate()


@pytest.mark.parametrize("times", [1, 2])
def test_sigterm_reaches_the_driver_and_the_job_is_requeued(job: Job, times: int) -> None:
    """Once, however often Slurm sends it, and never by `srun`: that would end Ray, and with it the workers."""
    assert job.stop(times=times) == 75
    calls = [call for call in job.calls.read_text().splitlines() if not call.startswith("show")]
    assert calls == ["driver got SIGTERM", "driver wrote a checkpoint", f"requeue {JOB}"]


def test_a_driver_that_asks_to_be_resumed_is_requeued(job: Job) -> None:
    assert job.end(status="75") == 75
    assert job.count(f"requeue {JOB}") == 1


@pytest.mark.parametrize("status", ["0", "1", "3"])
def test_other_statuses_are_passed_on(job: Job, status: str) -> None:
    assert job.end(status=status) == int(status)
    assert job.count(f"requeue {JOB}") == 0


def test_sigterm_before_the_driver_runs_requeues(job: Job) -> None:
    assert job.stop(FAKE_SLOW_START="1") == 75
    assert job.count(f"requeue {JOB}") == 1


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING"])
def test_a_job_that_was_cancelled_is_not_requeued(job: Job, state: str) -> None:
    """`scancel` sends SIGTERM too; where Slurm requeues by itself, the job is COMPLETING as well."""
    assert job.stop(FAKE_STATE=state) == 75
    assert job.count(f"requeue {JOB}") == 0


def test_every_start_works_on_the_same_run(job: Job) -> None:
    assert job.end("train.epochs=2", "output.dir=/shared/my runs", status="0") == 0
    first = job.started.read_text()
    assert job.end("train.epochs=2", "output.dir=/shared/my runs", status="0") == 0
    name, *arguments = first.split(" ", 4)
    assert (name, arguments) == (
        f"slurm-{JOB}",
        ["launch.address=auto", "output.exists=resume", "train.epochs=2", "output.dir=/shared/my runs\n"],
    )
    assert job.started.read_text() == first


def test_slurm_sends_the_signal_to_the_script_in_time() -> None:
    """The signal leaves time before the limit: after `launch.grace_s` the driver has to end and the requeue to run."""
    from raycl.training.definition.settings import LaunchConfig

    options = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert "--requeue" in options and "--open-mode=append" in options
    (given,) = [option for option in options if option.startswith("--signal=")]
    target, _, seconds = given.removeprefix("--signal=").partition("@")
    assert target == "B:TERM" and int(seconds) >= LaunchConfig().grace_s + 60
