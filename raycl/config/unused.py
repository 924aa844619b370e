"""Settings that other settings leave without effect; they are errors where the user wrote them.

`method.arm.weight=2` beside an ablation without that term looks as if it were tried. Each section lists its own unused
settings (`Section.unused_settings`). Trees that raycl wrote hold every setting, and load as they are.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raycl import config as configs
from raycl.config import Section, Tree
from raycl.errors import ConfigError, RayclError


def unused_in(config: Section, prefix: str = "") -> dict[str, str]:
    """Return dotted path of each setting or section that acts on nothing -> the setting that makes it so."""
    reasons = {f"{prefix}{path}": f"{prefix}{reason}" for path, reason in config.unused_settings()}
    for name in type(config).model_fields:
        value = getattr(config, name)
        nodes = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        for path, node in nodes.items():
            if isinstance(node, Section):
                reasons |= unused_in(node, f"{prefix}{path}.")
    return reasons


def written(path: str | None, overrides: Sequence[str] = ()) -> Tree:
    """Return dotted path -> value of all that a person wrote: in the file, unless raycl wrote it, and in overrides."""
    by_hand = path is not None and not Path(path).read_text(encoding="utf-8").startswith(configs.MARK)
    tree = configs.read_tree(path) if path is not None and by_hand else {}
    for override in overrides:
        configs.apply_override(tree, override)
    return leaves(tree)


def unused_written(
    path: str | None, overrides: Sequence[str], config: Section, by_file: Callable[[], Section]
) -> dict[str, str]:
    """Return what a person wrote that acts on nothing, `path=value` -> the reason.

    A setting of the file that has its effect until an override switches it off is none of these: that is what the
    override asks for.

    Args:
        by_file: the config of the file without overrides; may raise where the file needs them.
    """
    unused = unused_in(config)
    reasons = found_in(written(path, overrides), unused)
    if not reasons or path is None:
        return reasons
    try:
        in_file = found_in(written(path), unused_in(by_file()))
    except RayclError:
        return reasons
    typed = found_in(written(None, overrides), unused)
    return {setting: reason for setting, reason in reasons.items() if setting in in_file or setting in typed}


def leaves(tree: Tree) -> Tree:
    """Return dotted path -> value of a tree; null is none."""
    return {path: value for path, value in configs.flatten(tree).items() if value is not None}


def found_in(given: Tree, unused_settings: Mapping[str, str]) -> dict[str, str]:
    """Return `path=value` of the settings that act on nothing, with the reason."""
    pairs = ((path, covering(path, unused_settings)) for path in given)
    return {setting(path, given[path]): unused_settings[above] for path, above in pairs if above is not None}


def setting(path: str, value: Any) -> str:
    """Return a setting as it is written on a command line."""
    return f"{path}={_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def covering(path: str, unused_settings: Iterable[str]) -> str | None:
    """Return the unused setting that `path` is or is below."""
    return next(
        (
            setting_path
            for setting_path in unused_settings
            if path == setting_path or path.startswith(f"{setting_path}.")
        ),
        None,
    )


def refuse(unused_settings: Mapping[str, str], source: str) -> None:
    """Refuse written settings that have no effect.

    Raises:
        ConfigError: there are any.
    """
    if unused_settings:
        listed = "; ".join(f"{path} acts on nothing beside {reason}" for path, reason in unused_settings.items())
        raise ConfigError(f"{source}: {listed}: leave it out, or change the other")
