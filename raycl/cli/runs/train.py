"""Train one model on a stream of tasks, and report accuracy and forgetting for every task.

raycl train                                 the built-in stream, LoRA, this machine
raycl train FILE.yaml key.path=value ...    a config file, or --config FILE; then overrides
raycl train --plan FILE.yaml --gpus 8       memory, traffic, time and disk of a run, by arithmetic; starts nothing
raycl train --resume RUN_DIR                resume a run
raycl train --resume RUN_DIR --add TASK     resume it with one more task
raycl train --resume RUN_DIR --revise TASK  a new run that learns one of its tasks again

On a cluster: ray job submit --working-dir . -- python jobs/train_stream.py, with the same arguments.
"""

import argparse
from dataclasses import asdict

from raycl.cli.commands import add_allow_env, local_or_installed, note, show

GPU_NAMES = ("a10g-24", "l4-24", "a100-40", "a100-80", "h100-80", "h200-141")
"""The names in `raycl.operations.plan.arithmetic`, repeated here so that `--help` does not import it."""

PLAN = {"gpu": "a100-80", "gpus_per_node": 8, "utilisation": 0.4}
"""Options of --plan and their defaults; `gpus` has that of the config."""

SETTINGS = """settings that matter first (all: --print-config, and docs/reference):
  method=lora|slm|sapt|...       how tasks are learned          stream.name, stream.tasks   what is learned
  modifiers=[migu]               which rows are updated         train.epochs, train.learning_rate
  backbone.name=FOLDER|HUB_ID    the pretrained model           launch.workers              of Ray Train
  output.name, bank.dir          where the run and its bank go  engine.name=torch|deepspeed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = SETTINGS
    parser.add_argument("words", nargs="*", metavar="FILE.yaml key.path=value", help="for example method=lora")
    parser.add_argument("--config", metavar="FILE", help="YAML; everything it leaves out has a default")
    add_allow_env(parser)
    parser.add_argument("--resume", metavar="RUN_DIR", help="continue a run; its own config is used")
    parser.add_argument("--status", metavar="RUN_DIR", help="state of a run on any machine; starts nothing")
    parser.add_argument("--add", metavar="TASK", action="append", default=[], help="with --resume: name, path or YAML")
    parser.add_argument(
        "--revise", metavar="TASK", help="learn a task of a bank again: name, or path or YAML of new data"
    )
    parser.add_argument("--print-config", action="store_true", help="show all settings, described, and stop")
    plan = parser.add_argument_group("plan")
    plan.add_argument("--plan", action="store_true", help="what the run would need on these GPUs, and stop")
    plan.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPU_NAMES)} (default: {PLAN['gpu']})")
    plan.add_argument("--gpus", metavar="N", type=int, help="workers, a GPU each (default: launch.workers)")
    plan.add_argument("--gpus-per-node", metavar="N", type=int, help=f"of each node (default: {PLAN['gpus_per_node']})")
    share = f"of the GPU's FLOP/s in training (default: {PLAN['utilisation']})"
    plan.add_argument("--utilisation", metavar="SHARE", type=float, help=share)
    plan.add_argument("--methods", action="store_true", help="what each method keeps, needs and trains, and stop")
    parser.add_argument("--png", metavar="FILE", help="draw the matrix here (default: in the run folder, if local)")


def sort_words(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Separate the config file from settings, and refuse options that exclude each other or have no effect."""
    files = [word for word in options.words[:1] if word.endswith((".yaml", ".yml")) and "=" not in word]
    options.overrides = options.words[len(files) :]
    if files and options.config:
        parser.error(f"two config files, {files[0]} and {options.config}: give one")
    options.config = options.config or next(iter(files), None)
    if options.resume and options.config:
        parser.error(f"--resume takes the run's own config: leave {options.config} out")
    shows = _given(options, "status", "print_config", "plan", "methods")
    of_run = _given(options, "resume", "add", "revise", "png")
    if len(shows) > 1 or (shows and of_run):
        parser.error(f"{shows[0]} shows something and stops: leave {[*shows[1:], *of_run][0]} out")
    if (options.status or options.methods) and (options.words or options.config):
        parser.error(f"{shows[0]} takes no config and no settings: leave {(options.words or [options.config])[0]} out")
    planned = [f"--{name.replace('_', '-')}" for name in ("gpus", *PLAN) if getattr(options, name) is not None]
    if planned and not options.plan:
        parser.error(f"{planned[0]} needs --plan; launch.workers=N, a setting, trains on N workers")
    vars(options).update({name: default for name, default in PLAN.items() if getattr(options, name) is None})


def _given(options: argparse.Namespace, *names: str) -> list[str]:
    """Return those of some options that are given, as they are written."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]


def run(options: argparse.Namespace) -> int:
    """Prepare, train, report."""
    config = options.config and local_or_installed(options.config)
    if options.print_config:
        from raycl.config import as_tree
        from raycl.config.reference import commented_yaml
        from raycl.training.setup import run_config

        settings = run_config.load_config(config, options.overrides)
        show(options, commented_yaml(settings).rstrip("\n"), as_tree(settings))
        return 0
    if options.methods:
        from raycl.operations.plan.tables import methods_table, records

        table = methods_table()
        show(options, table, records(table))
        return 0
    if options.plan:
        return _plan(options, config)
    if run_folder := options.status or options.resume:
        from raycl.training.records.run_folder import run_at

        run_at(run_folder)
    if options.status:
        from raycl.launch.status import status_of

        status = status_of(options.status)
        show(options, status, asdict(status))
        return 0
    from raycl.launch import console, requested_run
    from raycl.training.workers import stopping

    console.log_to_stderr(options.quiet)
    stopping.exit_on_sigterm()
    prepared = requested_run.prepared(config, options.overrides, options.resume, options.add, options.revise)
    from raycl.launch import driver
    from raycl.operations.report.matrix_picture import draw_matrix
    from raycl.operations.report.tables import matrix_table

    note(options, f"run {prepared.storage.uri}")
    results = driver.train(prepared, driver.RunOptions(draw=draw_matrix))
    show(options, matrix_table(results), results)
    note(options, f"results {prepared.storage.uri}/results.json")
    if options.png or prepared.storage.is_local:
        from raycl.operations.report.plots import matrix_figure, save_png  # brings matplotlib, which no step waits for

        note(
            options,
            f"picture {save_png(matrix_figure([results]), options.png or f'{prepared.storage.uri}/matrix.png')}",
        )
    return 0


def _plan(options: argparse.Namespace, config: str | None) -> int:
    from raycl.operations.plan.arithmetic import Cluster, gpu_named
    from raycl.operations.plan.report import plan, text, tree
    from raycl.training.setup import run_config

    settings = run_config.load_config(config, options.overrides)
    gpus = settings.launch.workers if options.gpus is None else options.gpus
    cluster = Cluster(gpu_named(options.gpu), gpus, options.gpus_per_node, options.utilisation)
    report = plan(settings, cluster)
    show(options, text(report), tree(report))
    return 0
