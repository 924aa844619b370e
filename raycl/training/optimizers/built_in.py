"""The optimizers of `registry.OPTIMIZERS`: torch's, and those of other libraries behind the same interface."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from raycl.errors import ConfigError
from raycl.kernels.row_gradient import adamw_rows
from raycl.training.optimizers.base import Group, OptimizerKind, ParameterSpec, StateTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's state tensors, by torch's names; DeepSpeed uses the same."""

ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "epsilon": 1e-8}
"""Settings of AdamW, with torch's values."""

LEAST, BLOCK = 4096, 256
"""Values of the smallest tensor whose averages bitsandbytes has in eight bits, and values that have one scale."""


class AdamWKind(OptimizerKind):
    """AdamW (Loshchilov and Hutter 2019), torch's: two running averages for each value."""

    settings = ADAMW
    elementwise = True
    updates_rows = True

    def build(self, groups: list[Group]) -> Optimizer:
        """Build AdamW, on a CPU with torch's fused kernel: one pass over memory instead of ten, a sixth of the time."""
        train = self.train
        return AdamW(
            groups,
            lr=train.learning_rate,
            betas=self.values["betas"],
            eps=self.values["epsilon"],
            weight_decay=train.weight_decay,
            fused=True if all(p.device.type == "cpu" for group in groups for p in group["params"]) else None,
        )

    def state(self, parameter: ParameterSpec) -> dict[str, StateTensor]:
        """Return the means of gradients and of their squares."""
        return dict.fromkeys(MOMENTS, StateTensor(tuple(parameter.shape)))

    def counters(self, parameter: Tensor, spec: ParameterSpec, steps: int) -> dict[str, Any]:
        """Return steps, as torch counts them."""
        return {"step": torch.tensor(float(steps))}

    def first_moment(self) -> tuple[str, float]:
        """Return the mean of gradients."""
        return MOMENTS[0], self.values["betas"][0]

    def step_rows(self, optimizer: Optimizer, parameter: nn.Parameter, rows: Tensor, axis: int) -> None:
        """Update rows by the kernel for rows, with the averages of these rows."""
        state = optimizer.state[parameter]
        if not state:  # as Adam itself begins
            state |= {"step": torch.tensor(0.0), **{moment: torch.zeros_like(parameter) for moment in MOMENTS}}
        state["step"] += 1
        group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        adamw_rows(parameter, (state["exp_avg"], state["exp_avg_sq"]), rows, axis, int(state["step"]), group)


class SGDKind(OptimizerKind):
    """Stochastic gradient descent, torch's: with momentum it keeps one running sum for each value, else nothing."""

    settings: ClassVar[Mapping[str, Any]] = {"momentum": 0.0}
    elementwise = True

    def build(self, groups: list[Group]) -> Optimizer:
        """Weight decay is added to the gradient."""
        train = self.train
        return SGD(groups, train.learning_rate, self.values["momentum"], weight_decay=train.weight_decay)

    def state(self, parameter: ParameterSpec) -> dict[str, StateTensor]:
        """Return the sum of gradients, in which old ones fade."""
        return {"momentum_buffer": StateTensor(tuple(parameter.shape))} if self.values["momentum"] else {}

    def first_moment(self) -> tuple[str, float] | None:
        """Return that sum, unless it includes weight decay."""
        momentum = self.values["momentum"]
        return ("momentum_buffer", momentum) if momentum and not self.train.weight_decay else None


class AdafactorKind(OptimizerKind):
    """Adafactor (Shazeer and Stern 2018), Transformers', as its trainer configures it.

    It keeps means of squared gradients, for matrices of rows and of columns alone.
    """

    def build(self, groups: list[Group]) -> Optimizer:
        """Build Adafactor as the Hugging Face trainer does, which the papers' code uses: the rate is the configured
        one."""
        from transformers.optimization import Adafactor  # a second of imports

        optimizer: Optimizer = Adafactor(
            groups,
            lr=self.train.learning_rate,
            scale_parameter=False,
            relative_step=False,
            warmup_init=False,
            weight_decay=self.train.weight_decay,
        )
        return optimizer

    def state(self, parameter: ParameterSpec) -> dict[str, StateTensor]:
        """Return the mean of each value of a vector, or else those of rows and columns."""
        shape = tuple(parameter.shape)
        if len(shape) < 2:
            return {"exp_avg_sq": StateTensor(shape)}
        return {"exp_avg_sq_row": StateTensor(shape[:-1]), "exp_avg_sq_col": StateTensor(shape[:-2] + shape[-1:])}

    def counters(self, parameter: Tensor, spec: ParameterSpec, steps: int) -> dict[str, Any]:
        """Return the counters; the size of the parameter is measured anew in each step, so it is not needed."""
        return {"step": steps, "RMS": 0.0}


class AdamW8bitKind(OptimizerKind):
    """AdamW with averages in eight bits (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization").

    Library behaviour that it depends on (bitsandbytes 0.50.2): tensors of fewer than 4,096 values keep float32
    averages; others have a scale for each block of 256. It has kernels for CUDA, ROCm, XPU and CPUs.
    """

    settings = ADAMW

    @classmethod
    def check(cls, device: str) -> None:
        """Check the device, where it is known, by a step on zeros."""
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ConfigError(
                "train.optimizer=adamw_8bit needs the package bitsandbytes: pip install 'raycl[quantization]', or use "
                "train.optimizer=adamw"
            )
        if not device:
            return
        zeros = nn.Parameter(torch.zeros(LEAST, device=device))
        zeros.grad = torch.zeros_like(zeros)
        try:
            _library("optim").AdamW8bit([zeros]).step()
        except (RuntimeError, AttributeError) as error:
            raise ConfigError(
                f"train.optimizer=adamw_8bit does not work on this device ('{device}') with the installed bitsandbytes "
                f"({type(error).__name__}): use train.optimizer=adamw, another device, or a newer bitsandbytes"
            ) from error

    def build(self, groups: list[Group]) -> Optimizer:
        """Build the optimizer with AdamW's settings."""
        train = self.train
        settings = {"lr": train.learning_rate, "betas": self.values["betas"], "eps": self.values["epsilon"]}
        optimizer: Optimizer = _library("optim").AdamW8bit(groups, weight_decay=train.weight_decay, **settings)
        return optimizer

    def state(self, parameter: ParameterSpec) -> dict[str, StateTensor]:
        """Return codes of the averages, and their scales."""
        shape = tuple(parameter.shape)
        if parameter.shape.numel() < LEAST:
            return dict.fromkeys(("state1", "state2"), StateTensor(shape))
        scales = StateTensor((-(-parameter.shape.numel() // BLOCK),))
        codes = StateTensor(shape, torch.uint8)
        return {"state1": codes, "state2": codes, "absmax1": scales, "absmax2": scales}

    def counters(self, parameter: Tensor, spec: ParameterSpec, steps: int) -> dict[str, Any]:
        """Return steps, and the values of the codes, which are always the same."""
        if parameter.numel() < LEAST:
            return {"step": steps}
        maps = {name: _library("functional").create_dynamic_map(signed=name == "qmap1") for name in ("qmap1", "qmap2")}
        return {"step": steps, **{name: values.to(parameter.device) for name, values in maps.items()}}


def _library(part: str) -> Any:
    return importlib.import_module(f"bitsandbytes.{part}")


class MuonKind(OptimizerKind):
    """Muon (Jordan et al. 2024), torch's, for weight matrices, and AdamW for all other parameters.

    The rate of matrices is scaled by their size (Liu et al. 2025, "Muon is scalable for LLM training", section 2.2), so
    that both parts learn at a rate that suits AdamW. Embeddings, output words, soft prompts and label heads are
    AdamW's.
    """

    settings: ClassVar[Mapping[str, Any]] = {"momentum": 0.95, **ADAMW}
    separates_matrices = True

    @classmethod
    def check(cls, device: str) -> None:
        """Torch has it since 2.9."""
        _muon()

    def build(self, groups: list[Group]) -> Optimizer:
        """Build both as one optimizer."""
        train, muon = self.train, _muon()
        settings = {"lr": train.learning_rate, "weight_decay": train.weight_decay, "momentum": self.values["momentum"]}
        return Parts(
            groups, lambda matrices: muon(matrices, adjust_lr_fn="match_rms_adamw", **settings), AdamWKind(train).build
        )

    def state(self, parameter: ParameterSpec) -> dict[str, StateTensor]:
        """Return the state of the part that has the parameter."""
        if parameter.is_matrix:
            return {"momentum_buffer": StateTensor(tuple(parameter.shape))}
        return AdamWKind(self.train).state(parameter)

    def counters(self, parameter: Tensor, spec: ParameterSpec, steps: int) -> dict[str, Any]:
        """Return AdamW's steps; Muon counts none."""
        return {} if spec.is_matrix else AdamWKind(self.train).counters(parameter, spec, steps)


class Parts(Optimizer):
    """Two optimizers with one list of groups and one state, so that schedules and checkpoints see one."""

    def __init__(
        self,
        groups: list[Group],
        of_matrices: Callable[[list[Group]], Optimizer],
        of_others: Callable[[list[Group]], Optimizer],
    ) -> None:
        super().__init__(groups, {})
        self.parts: list[Optimizer] = []
        for wanted, build in ((True, of_matrices), (False, of_others)):
            if own := [group for group in self.param_groups if group["is_matrix"] is wanted]:
                self.parts.append(build(own))
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for part in self.parts:
            part.step()


def _muon() -> Any:
    try:
        from torch.optim import Muon
    except ImportError as error:
        raise ConfigError(
            f"train.optimizer=muon needs torch 2.9 or newer, and this is {torch.__version__}: pip install "
            "'torch>=2.9', or use train.optimizer=adamw"
        ) from error
    return Muon
