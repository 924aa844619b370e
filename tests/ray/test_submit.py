"""README's cluster lines on ports of their own: a head node, a submitted run, a submitted failure.

The head is started with `--block`, so that ending that one process ends exactly its own cluster.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest
from filelock import FileLock
from listener import free_port
from ray.job_submission import JobSubmissionClient

from raycl.launch.status import status_of

REPO = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))


def answers(url: str) -> bool:
    """Return whether an HTTP server is there (a refusal for want of a token is an answer)."""
    try:
        urllib.request.urlopen(url, timeout=2)
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def end_with_children(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the head and to what it started; by itself it waits half a minute for them."""
    if process.poll() is not None:
        return
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=3)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(10)


@pytest.fixture(scope="module")
def head(one_at_a_time: FileLock) -> Iterator[str]:
    """`ray start --head`, again where its ports were taken; yields the dashboard's address."""
    one_at_a_time.acquire()
    try:
        for attempt in range(3):
            folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
            process, url = started_head(folder)
            if answered(process, url):
                break
            said = (Path(folder) / "head.log").read_text()
            end_with_children(process)
            shutil.rmtree(folder, ignore_errors=True)
            assert attempt < 2, said
    finally:
        one_at_a_time.release(force=True)
    try:
        yield url
    finally:
        end_with_children(process)
        shutil.rmtree(folder, ignore_errors=True)


def started_head(folder: str) -> tuple[subprocess.Popen[bytes], str]:
    """Return `ray start --head` in `folder`, and where its dashboard will be."""
    dashboard = free_port()
    command = [RAY, "start", "--head", "--block", f"--port={free_port()}", "--num-cpus=2", f"--temp-dir={folder}"]
    command += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += ["--dashboard-agent-listen-port=0", "--include-dashboard=true", "--disable-usage-stats"]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment["PATH"] = f"{Path(RAY).parent}{os.pathsep}{environment['PATH']}"  # as `source .venv/bin/activate` does
    environment["RAY_JOB_STOP_WAIT_TIME_S"] = "60"  # on a busy machine three seconds are too few to write a checkpoint
    with open(Path(folder) / "head.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    return process, f"http://127.0.0.1:{dashboard}"


def answered(process: subprocess.Popen[bytes], url: str) -> bool:
    """Return whether the dashboard answers within 90 s, before the process ends."""
    end = monotonic() + 90
    while not answers(f"{url}/api/version"):
        if process.poll() is not None or monotonic() > end:
            return False
        sleep(0.2)
    return True


def until(ready: Callable[[], bool], seconds: float = 280) -> None:
    """Wait until it is so."""
    end = monotonic() + seconds
    while not ready():
        assert monotonic() < end, f"it did not happen in {seconds:g} s"
        sleep(0.2)


def submitted(head: str, name: str, *overrides: str) -> JobSubmissionClient:
    """Return the client that has submitted a run as README's third line does, without another process for it."""
    client = JobSubmissionClient(head)
    entrypoint = shlex.join(["python", "jobs/train_stream.py", *overrides])
    client.submit_job(entrypoint=entrypoint, submission_id=name, runtime_env={"working_dir": str(REPO)})
    return client


def test_a_submitted_run_ends_with_results(head: str, tmp_path: Path) -> None:
    """The third line of README, with overrides, ends with results on two workers under DeepSpeed."""
    command = [RAY, "job", "submit", "--address", head, "--working-dir", ".", "--", "python", "jobs/train_stream.py"]
    command += ["stream.tasks=[topic,sentiment]", "stream.train_rows=16", "stream.test_rows=10", "train.epochs=1"]
    command += ["launch.workers=2", "engine=deepspeed", f"output.dir={tmp_path}", "output.name=submitted"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after sentiment" in done.stdout and "AP" in done.stdout
    results = json.loads((tmp_path / "submitted" / "results.json").read_text())
    assert results["finished"] and results["stream"]["tasks"] == ["topic", "sentiment"]
    assert (results["workers"], results["attempts"]) == (2, 1)


def test_a_submitted_run_that_fails_reports_the_error(head: str, tmp_path: Path) -> None:
    client = submitted(head, "fails", "stream.tasks=[topic,weather]", f"output.dir={tmp_path}")
    until(lambda: client.get_job_status("fails").is_terminal())
    assert client.get_job_status("fails") == "FAILED" and client.get_job_info("fails").driver_exit_code == 1
    assert "weather" in client.get_job_logs("fails")
    assert not list(tmp_path.iterdir())


def test_a_stopped_submitted_run_has_that_status(head: str, tmp_path: Path) -> None:
    """`ray job stop` gives a command three seconds, and no exit status comes back."""
    long = ["stream.train_rows=16", "stream.test_rows=10", "train.epochs=1000", "train.log_every_s=0.1"]
    item = ["launch.workers=1", "launch.cpus_per_worker=1", f"output.dir={tmp_path}", "output.name=mine"]
    client = submitted(head, "mine", *item, *long)
    folder = str(tmp_path / "mine")
    until(lambda: (tmp_path / "mine" / "config.yaml").exists() and "training" in str(status_of(folder)))
    assert status_of(folder).state == "running"
    client.stop_job("mine")
    until(lambda: status_of(folder).state not in ("running", "stopping"))
    stopped = status_of(folder)
    assert stopped.state == "stopped" and "by SIGTERM" in stopped.message and "exit status 75" in stopped.message
    assert stopped.command == f"raycl train --resume {folder}"
