"""Stored states against an independent path: samples run alone, one at a time, through the uncut
target with Transformers' own `output_hidden_states`, in fp32.

The measure is the noise floor: what the store's compute dtype and codec cost when the sample is
alone. Stored states that differ by several times as much are wrong, and the usual ways to be wrong
(another layer, a norm too many, another sample, padding that leaks) are told apart.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.config import TargetConfig
from draftsmith.core import UserError
from draftsmith.files import digest
from draftsmith.manifest import differences
from draftsmith.store.checks import Finding
from draftsmith.store.codec import decode, encode
from draftsmith.store.container import Span, tensor_of
from draftsmith.store.foreign import through_fp8
from draftsmith.store.reader import StoreReader
from draftsmith.target.load import inspect_target, load_target, text_decoder

TIMES_THE_FLOOR = 4.0
EQUAL = 2e-4
"""fp32 kernels of other batch shapes differ by less."""
STRAY_ROWS = 0.05
"""Share of rows that may leave the floor: near ties of a router, for one, fall either way."""


@dataclass
class Compared:
    """Rows of one sample and tap: relative errors of the stored states and of the noise floor."""

    sample_id: int
    tap: int
    error: Tensor
    floor: Tensor
    cosine: Tensor

    @property
    def limit(self) -> float:
        """The median error that noise explains."""
        return TIMES_THE_FLOOR * float(self.floor.median()) + EQUAL

    @property
    def stray(self) -> Tensor:
        """[n] bool: rows that noise does not explain."""
        return self.error > 5 * self.floor.clamp_min(float(self.floor.median())) + 10 * EQUAL

    @property
    def agrees(self) -> bool:
        """Whether noise explains the difference."""
        lost = (self.error > 0.5) & (self.floor < 0.1)
        few = float(self.stray.float().mean()) <= STRAY_ROWS
        return float(self.error.median()) <= self.limit and few and not lost.any()


def recompute(
    reader: StoreReader, num_samples: int, model: str | None = None
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Numbers a tap, and findings, of `num_samples` samples chosen by hash."""
    inputs = reader.manifest["inputs"]
    target = _target(inputs, model)
    chosen = sorted(reader.sample_ids, key=lambda i: digest([inputs["seed"], i]))[:num_samples]
    ids = {i: reader.read(i, ("input_ids",))["input_ids"].long() for i in chosen}
    taps, dtype = inputs["taps"], reader.dtype
    low: dict[int, Tensor] = {}
    if inputs["compute_dtype"] != "float32":
        network = load_target(target)
        low = {i: _at_taps(alone(network, ids[i]), taps) for i in chosen}
        del network
    network = load_target(target, dtype=torch.float32)
    true = {i: _at_taps(alone(network, ids[i]), taps) for i in chosen}
    compared: list[Compared] = []
    findings: list[Finding] = []
    for i in chosen:
        stored = reader.read(i, ("hidden",))["hidden"]
        noisy = low.get(i, true[i]).to(dtype)
        if inputs.get("files", {}).get("codec") == "fp8":
            noisy = through_fp8(noisy)
        noisy = through_codec(noisy, inputs["codec"])
        rows = [_compare(i, t, c, stored, noisy, true[i]) for c, t in enumerate(taps)]
        compared += rows
        if not all(one.agrees for one in rows):
            layers = alone(network, ids[i])
            for column, one in enumerate(rows):
                if not one.agrees:
                    mine = stored[:, column].float()
                    text = _diagnose(one, column, mine, layers, true, network)
                    findings.append(Finding(text, reader.shard(i).name, i, one.tap))
    return [_numbers([one for one in compared if one.tap == tap]) for tap in taps], findings


def _target(inputs: dict[str, Any], model: str | None) -> TargetConfig:
    """The store's target; `model` says where it is now. Raises UserError when it is another one."""
    named = inputs["target"]
    target = TargetConfig(
        model=model or named["model"], revision=named["revision"], dtype=inputs["compute_dtype"]
    )
    now = {**inspect_target(target).identity(), "model": named["model"]}
    if now != named:
        raise UserError(
            where=target.model,
            found=f"another model than the store's ({'; '.join(differences(named, now))})",
            expected="the target whose states the store holds",
            remedy="Give its path with --target.",
        )
    return target


@torch.inference_mode()
def alone(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[layers + 1, n, H] in fp32 on the CPU: the embeddings, then each layer's output (the last one
    after the final norm, as Transformers gives it).
    """
    out = model(
        input_ids=ids[None].to(model.device),
        output_hidden_states=True,
        use_cache=False,
        logits_to_keep=1,
    )
    return torch.stack([h[0].to("cpu", torch.float32) for h in out.hidden_states])


def _at_taps(layers: Tensor, taps: list[int]) -> Tensor:
    """[n, taps, H]: hidden_states[tap + 1] is the output of layer `tap`."""
    return layers[[tap + 1 for tap in taps]].transpose(0, 1).contiguous()


def through_codec(states: Tensor, codec: Any) -> Tensor:
    """States as they come back from a store."""
    packed = encode(codec, [states])
    small = {
        one.name: tensor_of(bytearray(b"".join(one.pieces)), Span(one.dtype, one.shape, 0, 0))
        for one in packed.fields[1:]
    }
    out = torch.empty_like(states)
    decode(codec, memoryview(bytearray(b"".join(packed.fields[0].pieces))), small, out)
    return out


def _compare(
    sample_id: int, tap: int, column: int, stored: Tensor, noisy: Tensor, true: Tensor
) -> Compared:
    mine, its, real = (x[:, column].float() for x in (stored, noisy, true))
    cosine = torch.cosine_similarity(mine, real, dim=-1)
    return Compared(sample_id, tap, relative(mine, real), relative(its, real), cosine)


def relative(mine: Tensor, true: Tensor) -> Tensor:
    """|mine - true| / |true| of each row [n, H]; infinite where it is not a number."""
    error = (mine - true).norm(dim=-1) / true.norm(dim=-1).clamp_min(1e-12)
    return error.nan_to_num(nan=torch.inf)


def _diagnose(
    one: Compared,
    column: int,
    mine: Tensor,
    layers: Tensor,
    others: dict[int, Tensor],
    model: PreTrainedModel,
) -> str:
    """What these states are instead, when it can be told."""
    if float(one.error.median()) <= one.limit:
        return _diagnose_rows(one, column, mine, others)

    def is_it(candidate: Tensor) -> bool:
        rows = min(len(mine), len(candidate))
        return float(relative(mine[:rows], candidate[:rows]).median()) <= 2 * one.limit

    for layer in range(-1, len(layers) - 2):
        if layer != one.tap and is_it(layers[layer + 1]):
            what = f"the output of layer {layer}" if layer >= 0 else "the embeddings"
            return f"holds {what}: taps are shifted"
    norm: Any = text_decoder(model).norm
    with torch.inference_mode():
        normed = norm(layers[one.tap + 1].to(model.device)).cpu()
    if is_it(normed):
        return "holds the state after the final norm, not the layer's raw output"
    for sample_id, states in others.items():
        if sample_id != one.sample_id and is_it(states[:, column]):
            return f"holds the states of sample {sample_id}"
    text = f"differs: relative error {float(one.error.median()):.3g}, {one.limit:.2g} is noise"
    early, late = (
        one.error[: len(mine) // 4 + 1].median(),
        one.error[-(len(mine) // 4 + 1) :].median(),
    )
    if early > 1.5 * late:
        return f"{text}; most at the first tokens, as when padding leaks in"
    return text


def _diagnose_rows(one: Compared, column: int, mine: Tensor, states: dict[int, Tensor]) -> str:
    """Most rows are right: which are not, and whose the first of them is."""
    wrong = one.stray.nonzero().flatten().tolist()
    text = f"{len(wrong)} of {len(mine)} rows (first: {wrong[0]}) differ"
    for sample_id, its in states.items():
        if sample_id == one.sample_id:
            continue
        distance = relative(its[:, column], mine[wrong[0]].expand(len(its), -1))
        nearest = int(distance.argmin())
        if float(distance[nearest]) <= 2 * one.limit:
            return f"{text}: row {wrong[0]} holds row {nearest} of sample {sample_id}"
    return text


def _numbers(rows: list[Compared]) -> dict[str, Any]:
    error, floor = torch.cat([r.error for r in rows]), torch.cat([r.floor for r in rows])
    cosine = torch.cat([r.cosine for r in rows])
    return {
        "tap": rows[0].tap,
        "tokens": len(error),
        "cosine_median": float(cosine.median()),
        "cosine_min": float(cosine.min()),
        "error_median": float(error.median()),
        "error_max": float(error.max()),
        "floor_median": float(floor.median()),
        "floor_max": float(floor.max()),
        "wrong_samples": sum(not r.agrees for r in rows),
    }
