"""The reductions of row statistics to a loss, as torch's cross_entropy defines them, in differentiable torch code.

One place for the formulas: functional.py runs them, match/ writes them into graphs.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")


@dataclasses.dataclass(frozen=True)
class Loss:
    """cross_entropy's arguments, and z_loss: the factor of lse^2 that is added to each label's loss."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __call__(self, nll: Tensor, lse: Tensor, zsum: Tensor, target: Tensor, class_weight: Tensor | None, V: int):
        """The loss, [] or [N], of nll, lse, zsum [N] (read with label smoothing only), target [N], class_weight u [V].

        With t the label, w = u[t] where it counts and 0 where it is ignored, and s the smoothing, a label's loss is

            (1 - s) w nll + s / V (sum_v u[v] lse - zsum) + z_loss lse^2

        (torch.nn.functional.cross_entropy's definition; z-loss as in PaLM, arXiv 2204.02311.) "mean" divides the first
        two terms by the sum of w, the last by the number of labels that count.
        """
        valid = torch.ne(target, self.ignore_index)
        weight = uniform = None
        if class_weight is not None:
            label = torch.where(valid, target, 0)
            weight = torch.where(valid, class_weight[label].to(nll.dtype), 0.0)
        loss = nll if weight is None else nll * weight
        if self.label_smoothing:
            total = V if class_weight is None else class_weight.to(nll.dtype).sum()
            uniform = torch.where(valid, total * lse - zsum, 0.0)
            loss, uniform = (1 - self.label_smoothing) * loss, (self.label_smoothing / V) * uniform
            if weight is None or self.reduction != "mean":
                loss, uniform = loss + uniform, None
        z_term = torch.where(valid, self.z_loss * torch.square(lse), 0.0) if self.z_loss else None
        if self.reduction == "none":
            return loss if z_term is None else loss + z_term
        loss, z_term = torch.sum(loss), None if z_term is None else torch.sum(z_term)
        if self.reduction == "mean":
            count = torch.sum(valid)
            weights = count if weight is None else torch.sum(weight)
            loss = torch.div(loss, weights)
            if uniform is not None:  # apart, as the weights of the labels may sum to 0: 0 / 0 is NaN, 1 / 0 isn't
                loss = loss + torch.div(torch.sum(uniform), weights)
            z_term = None if z_term is None else torch.div(z_term, count)
        return loss if z_term is None else loss + z_term

    def cotangents(
        self, target: Tensor, class_weight: Tensor | None, V: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The derivatives of a "mean" or "sum" by nll, lse and zsum without the z-loss, and by lse^2: [N] each or None.

        0 at ignored rows, so nothing is multiplied by the infinite 1 / 0 of a mean over no label.
        """
        valid = torch.ne(target, self.ignore_index)
        weight = torch.ones((), dtype=dtype, device=target.device)
        if class_weight is not None:
            weight = torch.where(valid, class_weight[torch.where(valid, target, 0)].to(dtype), 0.0)
        count = torch.sum(valid).to(dtype)
        by = z_by = torch.ones((), dtype=dtype, device=target.device)
        if self.reduction == "mean":
            by, z_by = by / (count if class_weight is None else torch.sum(weight)), z_by / count
        smooth = self.label_smoothing
        nll = torch.where(valid, (1 - smooth) * weight * by, 0.0)
        lse = zsum = square = None
        if smooth:
            total = V if class_weight is None else class_weight.to(dtype).sum()
            lse = torch.where(valid, smooth / V * total * by, 0.0)
            zsum = torch.where(valid, -smooth / V * by, 0.0)
        if self.z_loss:
            square = torch.where(valid, self.z_loss * z_by, 0.0)
        return nll, lse, zsum, square
