"""What a run is, as all of training reads it: settings, tasks in their order, parts, and the job of its workers."""
