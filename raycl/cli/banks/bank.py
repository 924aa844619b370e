"""Look into a bank of adapters, check it, move adapters in and out, clean up.

raycl bank --bank runs/mine/bank list
raycl bank --bank runs/mine/bank export --adapters agnews=0.7,yelp=0.3 --to folder [--merged]
raycl bank --bank runs/mine/bank export --engine vllm --to s3://bucket/adapters
"""

from __future__ import annotations

import argparse
import json
import logging

from raycl.cli.commands import echo, log_to_stderr


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--bank", required=True, metavar="PATH", help="folder or URI of the bank")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the backbone")
    parser.add_argument("--allow-pickle", action="store_true", help="read pickled weights, which can run code")
    parser.add_argument("--json", action="store_true", help="for scripts")
    names = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    names.add_parser("list", help="snapshots and adapters")
    names.add_parser("branches", help="each branch, the snapshot that it points at, and what moved it there")
    log = names.add_parser("log", help="snapshots of a branch, newest first, with the tasks that each added")
    log.add_argument("branch", nargs="?", help="branch, snapshot's number or hash; default: main")
    promoting = names.add_parser("promote", help="move a branch forward to where another one is")
    promoting.add_argument("branch", help="branch, snapshot's number or hash")
    promoting.add_argument("--to", metavar="BRANCH", help="default: main")
    going_back = names.add_parser("rollback", help="move a branch back to a snapshot that it had; nothing is deleted")
    going_back.add_argument("--branch", help="default: main")
    going_back.add_argument("--to", required=True, metavar="ID", help="snapshot's number or hash, as log lists it")
    going_back.add_argument("--why", default="rolled back", metavar="TEXT", help="for log (default: rolled back)")
    merging = names.add_parser(
        "merge", help="a snapshot with the tasks of two, where tasks do not depend on each other"
    )
    merging.add_argument("ours", help="branch, snapshot's number or hash; a branch moves to the merged snapshot")
    merging.add_argument("theirs", help="the same, or BANK@REFERENCE for another bank")
    merging.add_argument(
        "--to", metavar="BRANCH", help="branch that moves to the merged snapshot; default: the first one"
    )
    merging.add_argument("--with-samples", action="store_true", help="copy pseudo-samples of another bank too")
    deleting = names.add_parser("delete", help="delete a branch; its snapshots stay until they are pruned")
    deleting.add_argument("branch")
    show = names.add_parser("show", help="one adapter (name or name@version) or snapshot (number)")
    show.add_argument("what")
    verifying = names.add_parser("verify", help="read everything and check every hash")
    verifying.add_argument("--run", metavar="RUN", help="what this run published must be there, or have been pruned")
    export = names.add_parser("export", help="a mixture as a PEFT folder, or merged into the backbone")
    export.add_argument("--snapshot", help="branch, number or hash; default: main")
    export.add_argument(
        "--adapters", help="name, or name=weight,name=weight; default: all that are active for every text"
    )
    export.add_argument("--to", required=True, metavar="FOLDER")
    export.add_argument("--merged", action="store_true", help="a plain model folder instead of an adapter")
    export.add_argument(
        "--engine",
        choices=["vllm"],
        help="folders that vLLM loads, one an adapter, and a config of ray.serve.llm",
    )
    export.add_argument("--served-from", metavar="URI", help="--engine: where the folder will be copied to (s3://...)")
    export.add_argument("--accelerator", metavar="NAME", help="--engine: Ray's name of the GPU, for example H100")
    export.add_argument("--with-samples", action="store_true", help="also write stored samples, inputs of users")
    export.add_argument("--without-head", action="store_true", help="leave label heads out")
    export.add_argument("--backbone", help="where the backbone is now, if not where it was")
    importing = names.add_parser("import", help="publish a PEFT LoRA made elsewhere")
    importing.add_argument("folder")
    importing.add_argument("--name", required=True)
    importing.add_argument("--backbone", required=True, help="the model that it was made for")
    importing.add_argument("--tasks", nargs="*", default=[])
    pruning = names.add_parser("prune", help="remove what no snapshot names")
    pruning.add_argument("--keep-snapshots", type=int, help="how many of the newest of each branch stay; default: all")
    pruning.add_argument("--grace-s", type=float, default=3600.0, help="touch nothing younger")
    pruning.add_argument(
        "--sample-days", type=float, help="stored samples that are older are removed; default: as each run says"
    )
    pruning.add_argument("--dry-run", action="store_true")
    diff = names.add_parser("diff", help="what changed between two snapshots")
    diff.add_argument("old", type=int)
    diff.add_argument("new", type=int)
    forgetting = names.add_parser("forget", help="a new snapshot without a task, and what that cost the others")
    forgetting.add_argument("task")
    forgetting.add_argument("--snapshot", help="branch, number or hash; default: main")
    forgetting.add_argument("--rows", type=int, help="test rows of each task; default: as many as the run used")
    forgetting.add_argument("--without-scores", action="store_true", help="do not evaluate before and after")
    forgetting.add_argument("--set", action="append", default=[], metavar="stream.KEY=VALUE", help="data has moved")
    forgetting.add_argument("--backbone", help="where the backbone is now, if not where it was")
    data = "s3://BUCKET or the like at which the snapshot's record may name data, other than the bank's own"
    forgetting.add_argument("--allow-storage", metavar="ADDRESS", action="append", default=[], help=data)


def run(options: argparse.Namespace) -> int:
    """Run one command; returns 1 if it reports a problem."""
    from raycl.operations.banks.commands import answer

    log_to_stderr()
    logging.getLogger("raycl").setLevel(logging.INFO)
    result = answer(options)
    echo(json.dumps(result.tree, indent=1) if options.json else result.text)
    return 0 if result.ok else 1
