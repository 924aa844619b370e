"""The parts that installed packages add to raycl, and those that cannot be used."""

from collections.abc import Callable, Mapping

from raycl import plugins
from raycl.data.benchmarks.orders import find
from raycl.data.sources.formats import reader_of
from raycl.errors import RayclError
from raycl.methods.registry import method_class, modifier_class
from raycl.metrics.per_example import check_metric
from raycl.plugins import Kind, Plugin
from raycl.routing.routers import router_class
from raycl.training.optimizers.registry import optimizer_class
from raycl.training.setup.run_config import BUILT_IN
from raycl.types import RouterState

LOADERS: Mapping[Kind, Callable[[str], object]] = {
    "method": method_class,
    "router": lambda name: router_class(RouterState(name)),
    "modifier": modifier_class,
    "metric": check_metric,
    "optimizer": optimizer_class,
    "format": reader_of,
    "order": find,
}
"""Kind -> what gives the object of a name, as a run does."""


def _problem_of(plugin: Plugin) -> str:
    """Import the package of an entry point, and say in one sentence why it cannot be used; empty: it can."""
    name = plugin.name.lower() if plugin.kind == "order" else plugin.name
    if name in BUILT_IN[plugin.kind]:
        return f"{plugin} has a built-in name, and the built-in {plugin.kind} is used: give it another name"
    try:
        LOADERS[plugin.kind](plugin.name)
    except RayclError as error:
        return str(error)
    return ""


def plugins_list() -> tuple[list[Plugin], list[str]]:
    """Return what can be used of installed packages, and a sentence for all that cannot."""
    there = [plugin for kind in LOADERS for plugin in plugins.installed(kind)]
    problems = [(plugin, _problem_of(plugin)) for plugin in there]
    usable = [plugin for plugin, problem in problems if not problem]
    return usable, list(dict.fromkeys(problem for _, problem in problems if problem))
