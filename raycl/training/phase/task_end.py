"""The end of a phase: what it has learned becomes the state of its last checkpoint, with the router that it publishes.

A task that another worker group has learned by itself is joined in the same way.
"""

from dataclasses import replace

from raycl.bank.tensor_groups import PUBLISHED, TensorGroups
from raycl.bank.tensors import StoredTensors
from raycl.methods.base import Learned, trained_names
from raycl.routing.routers import with_package, with_text
from raycl.training.definition.training_context import TrainingContext
from raycl.training.phase.routing import router_record
from raycl.training.records.checkpoint import Checkpoint
from raycl.training.workers.distributed import DistributedContext
from raycl.types import Phase


def keep_learned(context: TrainingContext, phase: Phase, learned: Learned | None, done: Checkpoint) -> None:
    """Complete the phase's last checkpoint and its router, after the method has ended the task.

    Args:
        done: the checkpoint, with the parameters that were trained.
    """
    method = context.method
    done.method, done.frozen_state = method.state_dict()
    done.modifiers = context.modifiers.state()
    kept = trained_names(context.backbone)
    done.parameters = {name: done.parameters[name] for name in kept if name in done.parameters}
    if learned is None:
        return
    learned.router = with_text(with_package(learned.router), method.config.routed_text)
    if bare := method.learner.bare.tensors():
        learned.router = replace(learned.router, tensors={**learned.router.tensors, **bare})
    seen = [task.name for earlier_phase in context.phases[: phase.index + 1] for task in earlier_phase.tasks]
    done.router, tensors = router_record(learned, seen)
    done.frozen_state = TensorGroups.of(done.frozen_state) | tensors


def kept_bytes(done: Checkpoint, world: DistributedContext) -> float:
    """Return the bytes that the run keeps after a phase: what was learned and what the method stores beside it, such as
    keys and rows of earlier tasks. Collective.

    The published router is not counted: it repeats what the method has of it.
    """
    trained = sum(tensor.nbytes for tensor in done.parameters.values())
    frozen = sum(
        group.info.bytes if isinstance(group, StoredTensors) else sum(tensor.nbytes for tensor in group.values())
        for name, group in TensorGroups.of(done.frozen_state).groups.items()
        if not name.startswith(f"{PUBLISHED}/")
    )
    return float(frozen + (sum(world.gather(trained)) if done.is_part else trained))


def join_task(context: TrainingContext, phase: Phase, alone: Checkpoint) -> tuple[Learned, Checkpoint]:
    """Let the method take over a task that was learned without the others; returns what the phase has learned, and its
    last checkpoint.

    Args:
        alone: the last checkpoint of the task's own worker group.
    """
    assert context.method.join_task is not None, "tasks of this method are learned one after another"
    learned: Learned = context.method.join_task(alone.method, alone.frozen_state)
    done = replace(alone, published={}, snapshot=b"")
    keep_learned(context, phase, learned, done)
    return learned, done
