"""The definition of a run: settings, tasks in their order, parts, and the job of its workers."""
