"""Look into a bank of adapters, check it, move adapters in and out, clean up.

raycl bank list runs/mine/bank
raycl bank export runs/mine/bank@main --adapters agnews=0.7,yelp=0.3 --to folder [--merged]
raycl bank export runs/mine/bank@7 --engine vllm --to s3://bucket/adapters
"""

import argparse

from raycl.cli.commands import add_output, at_least, log_to_stderr, show

BANK_HELP = "folder or URI of the bank, or of the run that publishes to it; to read, also hf://ORG/NAME[@REVISION]"
REFERENCE = "branch, tag, latest, snapshot's number or hash"
REFERENCE_HELP = f"{BANK_HELP}; REF: {REFERENCE} (default: main, or the run's branch)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, summary: str, reference: bool = False) -> argparse.ArgumentParser:
        added = names.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        at = "[@REF]" if reference else ""
        added.add_argument("bank", metavar=f"BANK{at}", help=REFERENCE_HELP if reference else BANK_HELP)
        add_output(added)
        added.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the backbone")
        added.add_argument("--allow-pickle", action="store_true", help="read pickled weights, which can run code")
        return added

    command("list", "snapshots and adapters, or those of one snapshot", reference=True)
    command("branches", "each branch, the snapshot that it points at, and what moved it there")
    log = command("log", "snapshots of a branch, newest first, with the tasks that each changed", reference=True)
    log.add_argument("branch", nargs="?", metavar="REF", help="the same as in BANK@REF")
    promoting = command("promote", "move a branch forward to a snapshot")
    promoting.add_argument("branch", metavar="REF", help=REFERENCE)
    promoting.add_argument("--to", metavar="BRANCH", help="default: main")
    going_back = command("rollback", "move a branch back to a snapshot that it had; nothing is deleted")
    going_back.add_argument("--branch", help="default: main")
    going_back.add_argument("--to", required=True, metavar="REF", help="snapshot's number or hash, as log lists it")
    going_back.add_argument("--why", default="rolled back", metavar="TEXT", help="for log (default: rolled back)")
    merging = command("merge", "a snapshot with the tasks of two, where tasks do not depend on each other")
    merging.add_argument("ours", metavar="REF", help=f"{REFERENCE}; a branch moves to the merged snapshot")
    merging.add_argument("theirs", metavar="REF", help="the same, or BANK@REF for another bank")
    merging.add_argument(
        "--to", metavar="BRANCH", help="branch that moves to the merged snapshot; default: the first one"
    )
    merging.add_argument("--with-samples", action="store_true", help="copy pseudo-samples of another bank too")
    tagging = command("tag", "give a snapshot a name that never moves", reference=True)
    tagging.add_argument("tag", metavar="NAME")
    deleting = command("delete", "delete a branch, or a tag (tags/NAME); its snapshots stay until they are pruned")
    deleting.add_argument("branch")
    show = command("show", "one adapter or snapshot", reference=True)
    show.add_argument("what", nargs="?", help="an adapter (NAME or NAME@VERSION) or a snapshot's number; default: REF")
    verifying = command("verify", "read everything and check every hash")
    verifying.add_argument("--run", metavar="RUN", help="what this run published must be there, or have been pruned")
    export = command("export", "a mixture as a PEFT folder, or merged into the backbone", reference=True)
    export.add_argument(
        "--adapters", help="name, or name=weight,name=weight; default: all that are active for every text"
    )
    export.add_argument("--to", required=True, metavar="FOLDER")
    export.add_argument("--merged", action="store_true", help="a plain model folder instead of an adapter")
    export.add_argument("--gguf", action="store_true", help="also a GGUF file, by llama.cpp's converter on PATH")
    export.add_argument(
        "--engine", choices=["vllm"], help="folders that vLLM loads, one an adapter, and a config of ray.serve.llm"
    )
    export.add_argument("--served-from", metavar="URI", help="--engine: where the folder will be copied to (s3://...)")
    export.add_argument("--accelerator", metavar="NAME", help="--engine: Ray's name of the GPU, for example H100")
    export.add_argument("--with-samples", action="store_true", help="also write stored samples, inputs of users")
    export.add_argument("--without-head", action="store_true", help="leave label heads out")
    export.add_argument("--backbone", help="where the backbone is now, if not where it was")
    fusing = command("fuse", "one adapter out of those of all tasks, and what that costs them", reference=True)
    fusing.add_argument("--how", required=True, choices=["average", "arithmetic", "ties", "dare", "svd"])
    fusing.add_argument(
        "--adapters",
        metavar="LIST",
        help="name,name or name=weight,...; default: all; weight 1 (arithmetic, ties) or 1/N",
    )
    fusing.add_argument("--density", type=float, default=0.2, help="ties, dare: share of entries kept (default: 0.2)")
    fusing.add_argument("--rank", type=int, help="default: ranks added up; svd: the largest")
    fusing.add_argument("--seed", type=int, default=0, help="dare: of the entries that are drawn (default: 0)")
    fusing.add_argument("--to", metavar="BRANCH", help="branch that points at the result (default: fused-HOW)")
    add_scoring(fusing)
    importing = command("import", "publish a PEFT LoRA made elsewhere")
    importing.add_argument("folder", metavar="ADAPTER", help="folder, or hf://ORG/NAME[/FOLDER][@REVISION]")
    importing.add_argument("--name", required=True, help="of the adapter; with --examples of its task")
    importing.add_argument("--backbone", metavar="MODEL", help="the model that it was made for, or where that is now")
    importing.add_argument(
        "--examples", metavar="FILE", help="a handful of its texts: the router then selects it for texts like these"
    )
    importing.add_argument("--prompt", help="what stood around its texts: 'Classify: {text} Answer:'")
    importing.add_argument("--tasks", nargs="*", action="extend", default=[])
    pruning = command("prune", "remove what no snapshot names")
    pruning.add_argument("--keep-snapshots", type=int, help="how many of the newest of each branch stay; default: all")
    pruning.add_argument("--grace-s", type=at_least(0, float), default=3600.0, help="touch nothing younger")
    pruning.add_argument(
        "--sample-days",
        type=at_least(0, float),
        help="stored samples that are older are removed; default: as each run says",
    )
    pruning.add_argument("--dry-run", action="store_true")
    diff = command("diff", "what changed between two snapshots")
    diff.add_argument("old", metavar="REF", help=REFERENCE)
    diff.add_argument("new", metavar="REF", help="the same")
    forgetting = command("forget", "a new snapshot without a task, and what that cost the others", reference=True)
    forgetting.add_argument("task")
    add_scoring(forgetting)


def add_scoring(parser: argparse.ArgumentParser) -> None:
    """Add arguments of a command that scores tasks before and after."""
    parser.add_argument("--rows", type=int, help="test rows of each task; default: as many as the run used")
    parser.add_argument("--without-scores", action="store_true", help="do not evaluate before and after")
    parser.add_argument("--set", action="append", default=[], metavar="stream.KEY=VALUE", help="data has moved")
    parser.add_argument("--backbone", help="where the backbone is now, if not where it was")
    data = "s3://BUCKET or the like at which the snapshot's record may name data, other than the bank's own"
    parser.add_argument("--allow-storage", metavar="ADDRESS", action="append", default=[], help=data)


def run(options: argparse.Namespace) -> int:
    """Run one command; returns 1 if it reports a problem."""
    from raycl.operations.banks.commands import answer

    log_to_stderr(options)
    result = answer(options)
    show(options, result.text, result.tree)
    return 0 if result.ok else 1
