"""Train one model on a stream of tasks, and report accuracy and forgetting for every task.

python jobs/train_stream.py                                     the built-in stream, LoRA, this machine
python jobs/train_stream.py FILE.yaml key.path=value ...        a config file, or --config FILE; then overrides
python jobs/train_stream.py --resume RUN_DIR                    resume a run
python jobs/train_stream.py --resume RUN_DIR --add TASK         resume it with one more task
python jobs/train_stream.py --resume RUN_DIR --revise TASK      a new run that learns one of its tasks again
python jobs/train_stream.py --status RUN_DIR                    its state, its progress, and the next command
ray job submit --working-dir . -- python jobs/train_stream.py   the same on a cluster
"""

from __future__ import annotations

import argparse
import sys

from raycl.config.reference import commented_yaml
from raycl.errors import RayclError
from raycl.launch import commands, console, driver, status, termination
from raycl.report.plots import heatmap
from raycl.report.tables import matrix_table
from raycl.run import config as run_config


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="FILE.yaml key.path=value", help="for example method=lora")
    parser.add_argument("--config", metavar="FILE", help="YAML; everything it leaves out has a default")
    parser.add_argument("--resume", metavar="RUN_DIR", help="continue a run; its own config is used")
    parser.add_argument("--status", metavar="RUN_DIR", help="state of a run on any machine; starts nothing")
    parser.add_argument("--add", metavar="TASK", action="append", default=[], help="with --resume: name or YAML")
    parser.add_argument("--revise", metavar="TASK", help="learn a task of a bank again: name or YAML with its new data")
    parser.add_argument("--print-config", action="store_true", help="show all settings, described, and stop")
    parser.add_argument("--png", metavar="FILE", help="draw the matrix here (default: in the run folder, if local)")
    options = parser.parse_intermixed_args()
    files = [word for word in options.words[:1] if word.endswith((".yaml", ".yml")) and "=" not in word]
    options.overrides = options.words[len(files) :]
    if files and options.config:
        parser.error(f"two config files, {files[0]} and {options.config}: give one")
    options.config = options.config or next(iter(files), None)
    if options.resume and options.config:
        parser.error(f"--resume takes the run's own config: leave {options.config} out")
    if options.status and (options.words or options.config or options.resume):
        parser.error("--status takes no other options")
    return options


def main() -> int:
    """Parse, prepare, train, report."""
    options = arguments()
    console.log_to_stderr()
    termination.exit_on_sigterm()
    try:
        if options.status:
            print(status.status_of(options.status))
            return 0
        if options.print_config:
            print(commented_yaml(run_config.load_config(options.config, options.overrides)), end="")
            return 0
        prepared = commands.prepared(options.config, options.overrides, options.resume, options.add, options.revise)
        print(f"run {prepared.storage.uri}", flush=True)
        results = driver.train(prepared)
    except RayclError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(matrix_table(results))
    print(f"results {prepared.storage.uri}/results.json")
    if options.png or prepared.storage.is_local:
        print(f"picture {heatmap(results, options.png or f'{prepared.storage.uri}/matrix.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
