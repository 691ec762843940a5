"""The same work on more GPUs and nodes: what each number of them takes, and what then decides. Formulas and
what they leave out: docs/scaling.md.

R ranks on N nodes of G GPUs; P parameters of the drafter, 4 P bytes of fp32 gradients a step.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.plan import estimate
from draftsmith.plan.estimate import Job

OVERLAP = 0.5
"""Of a row's forward and backward, behind which messages of that length are hidden: assumed."""
PRODUCTS = "matrix products"


@dataclass(frozen=True)
class Point:
    """A stage on so many GPUs: hours, and what most of the time goes to beyond a fair share of one GPU's."""

    hours: float
    decides: str


@dataclass(frozen=True)
class Shape:
    """Nodes of equal size."""

    nodes: int
    gpus_per_node: int

    @property
    def ranks(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node


def shapes(most: Shape) -> list[Shape]:
    """Powers of two of GPUs in one node, then powers of two of nodes, up to these."""
    within = _doubled(most.gpus_per_node)
    across = [nodes for nodes in _doubled(most.nodes) if nodes > 1]
    return [Shape(1, gpus) for gpus in within] + [Shape(n, most.gpus_per_node) for n in across]


def _doubled(most: int) -> list[int]:
    return sorted({*(1 << k for k in range(most.bit_length())), most} - {0})


def extract(job: Job, shape: Shape) -> Point:
    """Weights are loaded, shards handed out one by one, and all written to one store."""
    size = estimate.store_bytes(job)[job.cfg.extract.codec]
    workers = max(1, shape.ranks // job.cfg.target.gpus_per_replica)
    shards = max(1, math.ceil(size / job.cfg.extract.shard_bytes))
    alone = estimate.extraction_seconds(job) / job.cfg.target.gpus_per_replica
    fair = alone / workers
    last = alone / shards * math.ceil(shards / workers) - fair
    load = job.target.cut_params(job.depth) * job.element / (job.rate("load_gb_s") * 1e9)
    seconds = fair + last + load
    away = size / (shape.nodes * job.rate("network_gb_s") * 1e9) if "://" in job.cfg.store else 0.0
    kept = size / 1e6 / job.rate("disk_write_mb_s") if "disk_write_mb_s" in job.rates else 0.0
    limits = {"the store's writing": kept, "the nodes' network": away}
    return _decided(seconds, limits, {"the last shards": last, "loading weights": load}, fair)


def train(job: Job, source: str, shape: Shape) -> Point:
    """Steps of `tokens_per_step`, shared out by rows, gradients summed over all ranks in each."""
    settings = job.cfg.train
    rows, tokens = step_rows(job)
    a_step = min(1.0, tokens / job.work.tokens)  # of an epoch
    drafter = estimate.drafter_seconds(job) * a_step / rows
    target = estimate.extraction_seconds(job) * a_step / rows if source == "live" else 0.0
    rounds = math.ceil(rows / shape.ranks)
    fair = (drafter + target) * rows / shape.ranks
    idle = (drafter + target) * rounds - fair
    hidden = OVERLAP * drafter
    sums, weights = _messages(job, shape)
    talk = max(0.0, sums - hidden) + rounds * max(0.0, weights - hidden)
    steps = settings.epochs / a_step
    load = 0.0
    if source == "live":
        load = job.target.cut_params(job.depth) * job.element / (job.rate("load_gb_s") * 1e9)
    limits = {}
    if source == "store":
        size = estimate.store_bytes(job)[job.cfg.extract.codec] * settings.epochs
        if "disk_read_mb_s" in job.rates:
            limits["the store's reading"] = size / 1e6 / job.rate("disk_read_mb_s")
        if "://" in job.cfg.store:
            limits["the nodes' network"] = size / (shape.nodes * job.rate("network_gb_s") * 1e9)
    rest = {
        f"{rows} rows a step": idle * steps,
        "messages between " + ("nodes" if shape.nodes > 1 else "GPUs"): talk * steps,
        "loading weights": load,
    }
    return _decided(fair * steps + sum(rest.values()), limits, rest, fair * steps)


def step_rows(job: Job) -> tuple[int, float]:
    """Rows of a step, and their tokens, for samples of the mean length: a row is bounded in tokens and in
    blocks (train/schedule.py).
    """
    train, work = job.cfg.train, job.work
    blocks = work.anchors / work.samples * train.micro_batch_tokens / train.blocks_together
    a_row = max(1, int(train.micro_batch_tokens / max(work.mean_tokens, blocks))) * work.mean_tokens
    rows = max(1, int(train.tokens_per_step / a_row))
    return rows, rows * a_row


def _messages(job: Job, shape: Shape) -> tuple[float, float]:
    """Seconds of a step's sum of gradients, and of a row's gathering of weights (FSDP2: bf16, before its
    forward and again before its backward).
    """
    N, G = shape.nodes, shape.gpus_per_node
    within = job.rate("link_gb_s") * 1e9
    across = job.rate("network_gb_s") * 1e9
    gradients = 4.0 * job.params
    between = 2 * (N - 1) / N * gradients / across
    if job.cfg.train.parallel == "ddp":
        return 2 * (G - 1) / G * gradients / within + between, 0.0
    gather = 2 * (G - 1) / G * 2.0 * job.params / within
    return (G - 1) / G * gradients / within + between, gather


def _decided(
    seconds: float, limits: dict[str, float], rest: dict[str, float], fair: float
) -> Point:
    """What is slower than the work bounds it; else what takes more than a tenth of the time beside it."""
    name = max(limits, key=lambda k: limits[k], default="")
    if name and limits[name] > seconds:
        return Point(limits[name] / 3600, name)
    name = max(rest, key=lambda k: rest[k])
    return Point(seconds / 3600, name if rest[name] > 0.1 * seconds else PRODUCTS)


def table(job: Job, source: str, most: Shape, price: float | None) -> list[dict[str, Any]]:
    """A line for every number of GPUs: hours of the stages that this source takes, speed-up over one GPU,
    GPU-hours, cost.
    """
    lines, first = [], 0.0
    for shape in shapes(most):
        here = replace(job, machine=replace(job.machine, gpus=shape.ranks, nodes=shape.nodes))
        stages = {"extract": extract(here, shape)} if source == "store" else {}
        stages["train"] = train(here, source, shape)
        hours = sum(point.hours for point in stages.values())
        if job.cfg.regenerate.enabled:
            hours += estimate.regenerate(here).hours
        first = first or hours
        lines.append(
            {
                "nodes": shape.nodes,
                "gpus": shape.ranks,
                **{
                    name: {"hours": point.hours, "decides": point.decides}
                    for name, point in stages.items()
                },
                "hours": hours,
                "speedup": first / hours,
                "gpu_hours": hours * shape.ranks,
                "cost": None if price is None else hours * shape.ranks * price,
            }
        )
    return lines
