"""The page of a run's status: a small server on this machine, and the plain files of the page.

Like the text of `raycl status`, the page is made from the run's files alone.
"""
