"""Hard attention to the task (HAT): a mask over units for each task, learned with it, and what keeps earlier tasks.

    a = sigmoid(s e)                          mask of the task in training, one value for each of the U units
    s = 1 / s_max + (s_max - 1 / s_max) (b - 1) / (B - 1)         in step b of the B of an epoch; s_max at test
    sparsity = sum a (1 - used) / sum (1 - used)                  used = the largest mask of all earlier tasks
    gradient of a weight *= 1 - min(used of its output unit, used of its input unit)
    gradient of e *= s_max / s * (cosh(s e) + 1) / (cosh(e) + 1)

Serra et al. 2018, "Overcoming Catastrophic Forgetting with Hard Attention to the Task", section 2 (2.3 to 2.6). s_max
400, the weight 0.75 of the sparsity, |s e| up to 50 in cosh and |e| up to 6 are those of ContinualLM
(networks/baselines/hat.py, config.py), where s begins each epoch as here and stops one step short of s_max. |e| is
bounded after each update (`Bounds`), so e gets gradients wherever it is. Serra et al. train with SGD (joansj/hat,
src/approaches/hat.py), for which the compensation is made. Masks are 0 or 1 up to rounding, so gradients of weights in
use are zero, or close to it. AdamW divides gradients by their own size: a weight whose unit is in use by half moves
like a free one, and only those with gradients of zero stay.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import accumulate

import torch
from torch import Tensor, nn

Key = tuple[str, str]
"""Path of a layer, and which of its units."""

MODULE = "unit_masks"
"""Name of the masks' module in the backbone."""
EMBEDDING = f"{MODULE}.embedding"
"""Name of e there."""
MOST = 6.0
"""|e| at most."""
STEEPEST = 50.0
"""|s e| in cosh at most."""


class HardAttention(nn.Module):
    """Masks over all units of a model as one flat vector.

    Attributes:
        embedding: `[U]`, e of the task in training.
        masks: learned task -> its mask `[U]`, on the CPU.
        used: `[U]`, the largest of all masks of earlier tasks.
    """

    def __init__(
        self, sizes: Mapping[Key, int], max_scale: float, device: torch.device, scale: Callable[[], float]
    ) -> None:
        """Start without a task in training; `sizes`: units of each layer, `scale`: s of now."""
        super().__init__()
        ends = list(accumulate(sizes.values()))
        self.places: dict[Key, slice] = {
            key: slice(end - size, end) for (key, size), end in zip(sizes.items(), ends, strict=True)
        }
        self.max_scale = max_scale
        self.masks: dict[str, Tensor] = {}
        self.embedding: nn.Parameter = nn.Parameter(torch.zeros(ends[-1], device=device), requires_grad=False)
        self.used: Tensor = torch.zeros(ends[-1], device=device)
        self._scale = scale
        self._read: tuple[Tensor, float] | None = None

    def begin(self, alone: bool) -> None:
        """Draw e for a new task.

        Args:
            alone: no other task was learned, as far as this one is concerned.
        """
        drawn = torch.randn(len(self.embedding), device="cpu").clamp(-MOST, MOST)  # each device draws other numbers
        self.embedding = nn.Parameter(drawn.to(self.used.device))
        learned = [] if alone else list(self.masks.values())
        self.used = torch.stack([torch.zeros_like(drawn), *learned]).amax(0).to(self.used.device)

    def forward(self, key: Key | None = None) -> Tensor:
        """Return the mask of the task in training: of one layer's units, or of all `[U]`."""
        scale = self._scale()
        e = self.embedding if key is None else self.embedding[self.places[key]]
        if key is None:
            self._read = self.embedding.detach().float().clone(), scale  # engines may keep parts between passes
        return torch.sigmoid(scale * e.float())

    def sparsity(self) -> Tensor:
        """Return the share of the free units that the task in training uses."""
        free = 1 - self.used
        share: Tensor = (self(None) * free).sum() / free.sum().clamp(min=1e-9)
        return share

    def compensated(self, gradient: Tensor) -> Tensor:
        """Return the gradient of e as if s did not flatten the sigmoid; after `sparsity`."""
        assert self._read is not None, "the masks of this step were not read"
        e, scale = self._read[0].to(gradient.device), self._read[1]
        steep = (scale * e).clamp(-STEEPEST, STEEPEST).cosh() + 1
        return gradient * (self.max_scale / scale * steep / (e.cosh() + 1)).to(gradient.dtype)

    def in_use(self, key: Key) -> Tensor:
        """Return `used` of one layer's units."""
        return self.used[self.places[key]]

    def end(self, task: str, embedding: Tensor) -> None:
        """Keep the mask of a task at `s_max`; it is in training no more."""
        e = embedding.detach().float().cpu()
        self.masks[task] = torch.sigmoid(self.max_scale * e)
        self.embedding = nn.Parameter(torch.zeros_like(self.used), requires_grad=False)

    def learned(self, task: str, key: Key) -> Tensor:
        """Return the mask of a learned task over one layer's units."""
        return self.masks[task][self.places[key]]


class Bounds:
    """A constraint on updates of e: |e| stays at most `MOST`."""

    names: Collection[str] = (EMBEDDING,)

    def __call__(self, name: str, before: Tensor, after: Tensor) -> Tensor:
        """Return the value that e gets."""
        return after.clamp(-MOST, MOST)


def annealed(step: int, steps: int, max_scale: float) -> float:
    """Return s in optimizer step `step` of a phase whose epochs have `steps`."""
    share = step % steps / (steps - 1) if steps > 1 else 1.0
    return 1 / max_scale + (max_scale - 1 / max_scale) * share


def freedom(outputs_O: Tensor | None, inputs_I: Tensor | None) -> Tensor:
    """Return `1 - min(used of output, used of input)` for a weight `[O, I]`; a side without masks (None) is always in
    use.

    With one side alone: shaped to broadcast to `[O, I]`.
    """
    if outputs_O is None or inputs_I is None:
        assert outputs_O is not None or inputs_I is not None, "a weight without masks"
        return 1 - (outputs_O[:, None] if outputs_O is not None else inputs_I[None, :])  # type: ignore[index]
    return 1 - torch.minimum(outputs_O[:, None], inputs_I[None, :])
