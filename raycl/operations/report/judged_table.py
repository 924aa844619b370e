"""Judged answers as a table: wins, ties and losses against the untrained model, by aspect and set of prompts."""

from rich.console import Group
from rich.text import Text

from raycl.config import Tree
from raycl.text_tables import edgeless, render

TITLES = {"helpful": "instruction following", "harmless": "safety"}


def judged_table(tree: Tree) -> str:
    """Return percent of wins, ties and losses, and the delta with its 95 % interval, in points."""
    table = edgeless(("", "prompts", "prompts won", "tied", "lost", "delta", "95 % interval"))
    for aspect, scores in tree["scores"].items():
        for name, score in scores.items():
            title = TITLES[aspect] if name == "all" else f"  {name}"
            shares = [f"{score[key]:.1f}" for key in ("win", "tie", "loss")]
            limits = f"{score['low']:+.1f} to {score['high']:+.1f}"
            table.add_row(title, f"{score['prompts']:,}", *shares, f"{score['delta']:+.1f}", limits)
    judge = tree["judge"]
    return render(Group(Text(f"against the backbone without adapters, judged by {judge['model']}"), table))
