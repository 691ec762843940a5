"""The drafter on a GPU, or shared out over many: compiled layers, DDP, FSDP2. The network itself knows
nothing of it.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from draftsmith.drafter.model import DFlash
from draftsmith.ranks import Ranks


def parallelize(
    drafter: DFlash, ranks: Ranks, kind: Literal["ddp", "fsdp"], *, compile_layers: bool
) -> Callable[..., Tensor]:
    """What to call in place of the drafter. `fsdp` changes the drafter's own parameters: shared out within a
    node, whose links are fast, and the same on every node.
    """
    device = drafter.fc.weight.device
    if compile_layers:
        for layer in drafter.layers:  # five of one kind: compiled once
            layer.compile(dynamic=False)
    if ranks.count == 1:
        return drafter
    if kind == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(drafter, device_ids=ids, gradient_as_bucket_view=True)
    shape, names = (ranks.count // ranks.per_node, ranks.per_node), ("nodes", "within")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    if shape[0] == 1:
        mesh = mesh["within"]
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy: dict[str, Any] = {"mp_policy": half} if device.type == "cuda" else {}
    for parameter in drafter.parameters():  # GPUs of another kind draw other first weights
        dist.broadcast(parameter.detach(), 0)
    for layer in drafter.layers:
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(drafter, mesh=mesh, **policy)
    return drafter


def synced(net: Callable[..., Tensor], last: bool) -> contextlib.AbstractContextManager[Any]:
    """Around a micro-batch: gradients are summed over ranks at the step's last one only."""
    if isinstance(net, FSDPModule):
        net.set_requires_gradient_sync(last)
    elif isinstance(net, DistributedDataParallel) and not last:
        return net.no_sync()
    return contextlib.nullcontext()


def clip_and_scale(drafter: nn.Module, factor: Tensor, limit: float) -> Tensor:
    """Multiply gradients by `factor` and then down to a global norm of `limit`, in one pass; the norm
    before it was limited.
    """
    grads = [p.grad for p in drafter.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm) * factor
    scale = factor * (limit / (norm + 1e-6)).clamp(max=1.0)
    mine = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    torch._foreach_mul_(mine, scale)  # pyright: ignore[reportPrivateImportUsage]
    return norm
