"""The page of a run's status: a small server on this machine, and the plain files of the page.

What it does not know: the workers; like the text of `raycl status` it is made of the run's files alone.
"""
