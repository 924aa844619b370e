"""The playground: a page at `/` that uses the endpoint as any other client would, and shows its answers and mixtures.

To see which adapters are active for a text. The page is plain files beside this one (`raycl.launch.http.page_files`).
"""
