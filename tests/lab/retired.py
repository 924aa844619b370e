"""Identifiers that were replaced by the field's own terms, and must not come back as names in raycl/.

A name here is a whole identifier: of a module, class, function, argument, attribute or setting. Prose is not checked.
What it does not know: how names are found in code (`architecture.py`).
"""

from __future__ import annotations

NAMES = """
AdapterFacts Ask Asks Attended CARRIED CardFacts Companion Decoding Exercise Facts FileFacts Guided Host Hosted
Hosting Keeper KeptRows Ledger Made Memory ObjectFacts Parts Place Proof Remembering Roster RowRecord Running SectionT
Shelf Slots Verdict Wanted World Writer Yardstick acting add_facts asked asks attended borrow borrowed borrower bring
carried choosing companion companions exercise facts facts_of forgive give_word go_on goes_on has_kept_rows heard
hosting idle_alone idle_beside idle_in is_away keeper kept_rows kept_rows_table ledger lend lender lends lent
lent_records let_go listening live live_ranks loudly made made_now newest_place patient put_back put_back_object
put_together reach read_place refusals resident rivals roster said said_while say says settle shelf silence speak
speakers speaking speaks stage_facts stages stand_in stand_ins take_on tally thawed told told_task unfamiliar verdict
visiting watch_low watched_layers yardstick
"""
EVERYWHERE = frozenset(NAMES.split())
"""Retired in all of raycl/."""

IN_FOLDER = {
    "raycl/methods/": frozenset({"idle", "proof", "reach", "study", "show", "watch"}),
    "raycl/training/": frozenset({"place", "study", "watch", "watched", "word"}),
    "raycl/launch/": frozenset({"here", "stage"}),
    "raycl/sweep/": frozenset({"idle", "stage", "word"}),
    "raycl/report/": frozenset({"idle", "stage", "watched"}),
    "raycl/data/": frozenset({"idle", "stage"}),
    "raycl/run/": frozenset({"idle", "stage"}),
    "raycl/config/": frozenset({"idle"}),
    "raycl/eval/": frozenset({"stage"}),
}
"""Folder -> names that are retired there, and have another meaning elsewhere (`stage` is DeepSpeed's for ZeRO)."""
