"""For authors of packages that add to raycl: the checks that raycl's own methods, routers and the like pass."""
