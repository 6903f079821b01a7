"""Batch norms over the images of all processes: several train what one would, on CPUs as on GPUs.

torch's own ``SyncBatchNorm`` refuses CPUs. Every process must have equally many pixels, which a ``Plan`` sees to.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn


class SyncedNorm(nn.BatchNorm2d):
    """``nn.BatchNorm2d``, whose mean and variance in training are those of all processes together."""

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        if not (self.training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(x)
        mean = _over_all(x.float().mean((0, 2, 3)))
        centred = x.float() - mean[:, None, None]
        variance = _over_all(centred.square().mean((0, 2, 3)))
        self._remember(mean, variance, x.numel() // x.shape[1] * dist.get_world_size())
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), self.momentum)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += 1


def synced(model: nn.Module) -> nn.Module:
    """``model`` with its batch norms replaced by these, their weights and names kept."""
    for name, child in model.named_children():
        if type(child) is nn.BatchNorm2d:
            made = SyncedNorm(child.num_features, child.eps, child.momentum)
            made.load_state_dict(child.state_dict())
            setattr(model, name, made.train(child.training))
        else:
            synced(child)
    return model


def _over_all(part: Tensor) -> Tensor:
    """The mean over processes; gradients come back from all of them."""
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(part) / dist.get_world_size()
