"""Checks for authors of packages that add to raycl, which raycl's own methods, routers and the like pass."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycl.testing.checks import check_method, check_modifier, check_optimizer, check_router

__all__ = ["check_method", "check_modifier", "check_optimizer", "check_router"]


def __getattr__(name: str) -> Any:
    """Return the checks, imported when they are asked for: tiny models and packages are used without them."""
    if name in __all__:
        from raycl.testing import checks

        return {function.__name__: function for function in checks.CHECKS}[name]
    raise AttributeError(f"module 'raycl.testing' has no attribute '{name}'")
