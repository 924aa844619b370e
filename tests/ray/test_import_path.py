"""Workers import from where the command imports, and not from the folder that it happens to run in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

SCRIPT = """
import json, os, ray, sys
from raycl.launch import cluster

def imported():
    import omegaconf, plugin, pyarrow
    return omegaconf.__file__, plugin.__file__

cluster.connect(dashboard=False)
print(json.dumps([ray.get(ray.remote(imported).remote()), imported(), os.getcwd()]))
ray.shutdown()
"""
REPO = Path(__file__).resolve().parents[2]


def test_workers_import_what_the_command_imports(tmp_path: Path) -> None:
    """A script beside its plugin, started in a folder that holds a module named like each dependency."""
    own, strange = tmp_path / "own", tmp_path / "strange"
    for folder in (own, strange):
        folder.mkdir()
    (own / "script.py").write_text(SCRIPT)
    (own / "plugin.py").write_text("")
    names = {*packages_distributions(), *sys.stdlib_module_names, "plugin", "sitecustomize", "usercustomize"}
    for name in names - {*sys.builtin_module_names}:
        if name.isidentifier():
            (strange / f"{name}.py").write_text(f"raise SystemExit('{name} of a stranger ran')")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY", "PYTHONPATH"))}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}  # it needs one worker
    done = subprocess.run(
        [sys.executable, own / "script.py"],
        cwd=strange,
        env=environment | {"PYTHONPATH": os.path.relpath(REPO, strange)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    workers, driver, cwd = json.loads(done.stdout.splitlines()[-1])
    assert workers == driver == [driver[0], str(own / "plugin.py")] and cwd == str(strange)
    assert "stranger" not in done.stderr
