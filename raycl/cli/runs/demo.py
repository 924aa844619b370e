"""Learn short tasks, one after another, on this machine.

raycl demo                                               five tasks in two ways: one LoRA forgets, SLM does not
raycl demo --chat HuggingFaceTB/SmolLM2-135M-Instruct    three skills of a chat model, with answers before and after
raycl demo --write-skills data                           write the rows of these skills into a new folder, and stop
"""

import argparse

from raycl.cli.commands import parsed, show
from raycl.cli.runs import chat_demo, compare

FILE = "jobs/configs/compare/demo.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", default="runs", help="folder or URI for its runs (default: runs)")
    parser.add_argument("--png", metavar="FILE", default="runs/demo.png", help="picture (default: runs/demo.png)")
    parser.add_argument("--chat", metavar="MODEL", help="folder or hub name of a chat model that learns three skills")
    parser.add_argument("--write-skills", metavar="FOLDER", help="write the rows of the three skills, and stop")


def run(options: argparse.Namespace) -> int:
    """Run a config or a comparison that is installed with raycl."""
    if options.write_skills:
        chat_demo.write_rows(options.write_skills)
        text = f"wrote the rows of {', '.join(chat_demo.SKILLS)} to {options.write_skills}"
        show(options, text, {"skills": chat_demo.SKILLS, "folder": options.write_skills})
        return 0
    if options.chat:
        return chat_demo.run(options)
    flags = [f"--{name}" for name in ("json", "quiet") if vars(options)[name]]
    return compare.run(parsed("compare", [FILE, "--dir", options.dir, "--png", options.png, *flags]))
