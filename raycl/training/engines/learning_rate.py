"""The learning rate of a task's optimizer steps: warm-up and decay by the Hugging Face schedules."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from raycl.training.optimizers.settings import TrainConfig


def schedule(optimizer: Optimizer, train: TrainConfig, steps: int) -> LambdaLR:
    """Return the Hugging Face schedule of that name over `steps` optimizer steps."""
    from transformers import get_scheduler  # brings peft: a third of a driver's start, which makes none

    warmup = train.warmup(steps)
    scheduler = get_scheduler(train.lr_scheduler, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    assert isinstance(scheduler, LambdaLR), f"{train.lr_scheduler} is no function of the step, so it cannot be resumed"
    return scheduler


def advance(scheduler: LambdaLR, steps: int) -> None:
    """Put a fresh schedule where it would be after `steps` steps."""
    state = scheduler.state_dict()
    rates = [base * rate(steps) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler.load_state_dict({**state, "last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
