"""The token lengths of a run: those of its config, and where it leaves them open those of its data."""

import math

from raycl.backbone.base import Backbone
from raycl.backbone.positions import check_limits
from raycl.data.lengths import Positions, fit_lengths, measure_cuts
from raycl.data.stream import Stream
from raycl.errors import ConfigError
from raycl.training.setup.run_config import RunConfig
from raycl.types import TextCodec


def with_lengths(config: RunConfig, stream: Stream, backbone: Backbone) -> tuple[RunConfig, Stream]:
    """Return the config and its stream with a number for every length that is `auto`, and with what is cut of each
    task's rows; the backbone's codec gets the largest lengths.

    Raises:
        BackboneError: the lengths are more than the backbone's positions. DataError, ConfigError: see `Stream.check`.
    """
    codec, limits = backbone.codec, (backbone.max_positions, backbone.max_answer_positions)
    prompts = config.method.prompt_positions(len(stream.tasks))
    prompt, answer = (math.inf if limit is None else limit for limit in limits)
    free = prompt - prompts
    positions = Positions(free, free if codec.capabilities.one_sequence else answer)
    fitted = fit_lengths(stream, codec, positions)
    codec.max_source_tokens, codec.max_target_tokens = fitted.token_limits
    check_limits(backbone.model, codec)
    fitted.check(codec)
    _check_shots(config.eval.shots, fitted, codec, positions)
    fitted.cuts.update(measure_cuts(fitted, codec, positions))
    return config.model_copy(update={"stream": fitted.config}), fitted


def _check_shots(shots: int, stream: Stream, codec: TextCodec, positions: Positions) -> None:
    """Check that there are examples (`eval.shots`), and that a text with them fits the backbone.

    Raises:
        ConfigError: they do not.
    """
    for task in stream.tasks if shots else ():
        if not (rows := len(stream.rows(task, "train"))):
            continue
        if rows < shots:
            raise ConfigError(
                f"eval.shots={shots} and task '{task.name}' has {rows} train rows: expected at most as many"
            )
        limits = stream.with_shots(task, shots, codec)[1]
        needed = limits.source + (limits.target if codec.capabilities.one_sequence else 0)
        if needed > positions.prompt:
            raise ConfigError(
                f"eval.shots={shots}: examples, text and answer of task '{task.name}' take up to {needed} tokens, and "
                f"the backbone has {positions.prompt:.0f} positions: use fewer, or shorter texts "
                "(stream.max_source_tokens)"
            )
