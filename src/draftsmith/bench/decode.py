"""`draftsmith bench decode`: what a round of speculative decoding costs on this machine, before there is a
drafter: random weights of any configuration, the loop's own steps.

An autoregressive step, the verification of a chain and of a tree, their commits, and the drafter's block,
behind a context of random tokens, in turns, medians. The ceiling of the autoregressive step is the time to
read the target's weights once at the copy rate measured in the same run. Speedups are those times with
acceptance given by survival curves (curves.py, or --survival).
"""

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from draftsmith.bench.clock import busy_seconds, device_within, time_of, two_columns
from draftsmith.bench.curves import CURVES, Curve
from draftsmith.bench.models import BUILT_IN, config_of, drafter_shape, random_target
from draftsmith.core import UserError
from draftsmith.decode.session import TargetSession
from draftsmith.decode.tree import Draft, best_first, chain
from draftsmith.drafter.model import ContextCache, DFlash
from draftsmith.target.load import unembed
from draftsmith.target.taps import auto_taps

COPIED = {"cuda": 1 << 30, "cpu": 1 << 26}  # bytes
WARM_UP = 2


def run(
    *,
    model: str,
    context: int,
    block_size: int,
    tree_nodes: int,
    layers: int,
    rounds: int,
    survival: list[float] | None,
    tree_tau: float | None,
    memory_gib: float | None,
    as_json: bool,
) -> None:
    """Measure and print. `tree_nodes` counts the root, as does `block_size`."""
    curves = [*_own(survival, tree_tau), *CURVES]
    device, dtype = device_within(memory_gib)
    config = config_of(model)
    room = getattr(config, "max_position_embeddings", 0) or context + 4096
    _fits(context, block_size, tree_nodes, rounds, room)
    target = random_target(config, device, dtype)
    taps = BUILT_IN[model][0] if model in BUILT_IN else auto_taps(config.num_hidden_layers, 5)
    shape = drafter_shape(config, taps, layers, block_size)
    drafter = DFlash.empty(shape, device).init_weights(0).to(dtype).eval().requires_grad_(False)
    drafter.share(*unembed(target))
    with torch.inference_mode():
        times, busy = _times(target, drafter, context, tree_nodes, rounds, device)
    weights = sum(p.numel() * p.itemsize for p in _read(target))
    rate = _copy_rate(device)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": model,
        "context": context,
        "block_size": block_size,
        "tree_nodes": tree_nodes,
        "drafter_layers": layers,
        **{f"{name}_s": seconds for name, seconds in times.items()},
        "weight_bytes": weights,
        "copy_bytes_per_s": rate,
        "weights_once_s": weights / rate,
        **_ratios(times, weights / rate),
    }
    if device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / (1 << 30)
        result |= {f"{name}_busy_s": seconds for name, seconds in busy.items()}
        result |= {f"busy_{k}": v for k, v in _ratios(busy, weights / rate).items()}
    result["speedups"] = [speedups(curve, times, block_size) for curve in curves]
    print(json.dumps(result, indent=1) if as_json else _table(result))


def _own(survival: list[float] | None, tree_tau: float | None) -> list[Curve]:
    if survival is None:
        return []
    falling = all(a >= b for a, b in zip([1.0, *survival], survival, strict=False))
    if not survival or not falling or survival[-1] < 0:
        raise UserError(
            where="--survival",
            found=" ".join(map(str, survival)),
            expected="shares from 1 to 0 that never rise, slot 1 first",
            remedy="Take `survival` from a report.json.",
        )
    return [Curve("yours", "--survival", survival, tree_tau)]


def _fits(context: int, block_size: int, tree_nodes: int, rounds: int, room: int) -> None:
    need = context + (rounds + WARM_UP) * (2 * block_size + 1) + max(block_size, tree_nodes)
    if block_size < 2 or tree_nodes < block_size or need > room:
        raise UserError(
            where="--context, --block-size, --tree-nodes, --rounds",
            found=f"{context}, {block_size}, {tree_nodes}, {rounds}",
            expected=f"a block of 2 or more, a tree no smaller, and {need} tokens within the target's {room}",
            remedy="Lower --context or --rounds.",
        )


def _times(
    target: Any, drafter: DFlash, context: int, tree_nodes: int, rounds: int, device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians in seconds: ar, ar_commit, draft, extend, and verify and commit of chain and tree; and
    for each how long the GPU is busy, once.
    """
    block_size, vocab = drafter.shape.block_size, drafter.shape.vocab_size
    generator = torch.Generator().manual_seed(0)
    session = TargetSession(target, list(drafter.shape.taps))
    _, features = session.prefill(torch.randint(vocab, (context,), generator=generator).tolist())
    cache = ContextCache(drafter)
    cache.append(features)
    plain = TargetSession(target, [])
    plain.prefill(torch.randint(vocab, (context,), generator=generator).tolist())
    drafts = {"chain": _chain(block_size, vocab, generator)}
    drafts["tree"] = _tree(block_size, tree_nodes, vocab, generator)

    def one_round(timed: Callable[[str, Callable[[], Any]], None]) -> None:
        timed("ar", lambda: plain.verify([1])[0].argmax(-1).tolist())
        timed("ar_commit", lambda: plain.commit([0]))
        timed("draft", lambda: drafter.draft(1, cache))
        for name, draft in drafts.items():
            states: list[Any] = []

            def verify(draft: Draft = draft, states: list[Any] = states) -> None:
                logits, its = session.verify(draft.tokens, draft.parents)
                states.append(its)
                logits.argmax(-1).tolist()

            timed(f"{name}_verify", verify)
            path = list(range(1 + block_size // 2))  # half of the chain, which comes first in trees
            timed(f"{name}_commit", lambda path=path: session.commit(path))
            timed("extend", lambda path=path, states=states: cache.append(states[0][path]))

    taken: dict[str, list[float]] = {}

    def clock(name: str, work: Callable[[], Any]) -> None:
        taken.setdefault(name, []).append(time_of(work, device))

    for _ in range(WARM_UP + rounds):
        one_round(clock)
    busy: dict[str, float] = {}
    if device.type == "cuda":
        one_round(lambda name, work: busy.update({name: busy_seconds(work)}))
    return {name: statistics.median(seconds[WARM_UP:]) for name, seconds in taken.items()}, busy


def _chain(block_size: int, vocab: int, generator: torch.Generator) -> Draft:
    return chain(1, torch.randint(vocab, (block_size - 1,), generator=generator).tolist())


def _tree(block_size: int, nodes: int, vocab: int, generator: torch.Generator) -> Draft:
    logits = 3 * torch.randn(block_size - 1, min(vocab, 1000), generator=generator)
    return best_first(1, logits, nodes - 1)


def _read(target: Any) -> list[torch.Tensor]:
    """The weights that a step reads whole: all but an embedding that is no lm_head too."""
    embedding, head, _ = unembed(target)
    alone = embedding.data_ptr() != head.data_ptr()
    return [p for p in target.parameters() if not (alone and p.data_ptr() == embedding.data_ptr())]


def _copy_rate(device: torch.device) -> float:
    """Bytes read and written a second by a copy, the best of ten."""
    source = torch.empty(COPIED[device.type], dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    best = min(time_of(lambda: into.copy_(source), device) for _ in range(10))
    return 2 * source.numel() / best


def _ratios(times: dict[str, float], weights_once_s: float) -> dict[str, float]:
    out = {"ar_over_weights_once": times["ar"] / weights_once_s}
    for name in ("chain", "tree"):
        out[f"{name}_verify_over_ar"] = times[f"{name}_verify"] / times["ar"]
        out[f"{name}_commit_share"] = times[f"{name}_commit"] / _round(times, name)
    return out


def _round(times: dict[str, float], name: str) -> float:
    return times["draft"] + times["extend"] + times[f"{name}_verify"] + times[f"{name}_commit"]


def speedups(curve: Curve, times: dict[str, float], block_size: int) -> dict[str, Any]:
    """tau and speedup of the chain; of the tree where its tau is known; and the tau at which the tree
    would be as fast as the chain.
    """
    step, tau = times["ar"] + times["ar_commit"], curve.tau(block_size)
    rounds = {name: _round(times, name) for name in ("chain", "tree")}
    return {
        "curve": curve.name,
        "source": curve.source,
        "chain_tau": tau,
        "chain_speedup": tau * step / rounds["chain"],
        "tree_tau": curve.tree_tau,
        "tree_speedup": curve.tree_tau and curve.tree_tau * step / rounds["tree"],
        "tree_must_reach_tau": tau * rounds["tree"] / rounds["chain"],
    }


def _busy(result: dict[str, Any]) -> str:
    """What a server that launches whole graphs would see."""
    said = f"{result['ar_busy_s'] * 1e3:,.2f} ms, {result['busy_ar_over_weights_once']:.2f}x the weights"
    for name in ("chain", "tree"):
        said += f"; {name} {result[f'busy_{name}_verify_over_ar']:.2f}x"
    return said


def _table(result: dict[str, Any]) -> str:
    def ms(name: str) -> str:
        return f"{result[name + '_s'] * 1e3:,.2f} ms"

    once = f"{result['ar_over_weights_once']:.2f}x of {ms('weights_once')}"
    rows = [
        ("autoregressive step", ms("ar")),
        ("  over reading the weights once", once),
        ("  copy rate, read and written", f"{result['copy_bytes_per_s'] / 1e9:,.0f} GB/s"),
        ("drafter's block, its context", f"{ms('draft')}, {ms('extend')}"),
    ]
    for name in ("chain", "tree"):
        nodes = result["block_size" if name == "chain" else "tree_nodes"]
        over = f"{result[f'{name}_verify_over_ar']:.2f}x a step"
        share = f"{result[f'{name}_commit_share']:.1%} of a round"
        rows.append((f"{name}: verify {nodes}", f"{ms(f'{name}_verify')}, {over}"))
        rows.append((f"{name}: commit", f"{ms(f'{name}_commit')}, {share}"))
    if "ar_busy_s" in result:
        rows.append(("the GPU's part alone: step", _busy(result)))
        rows.append(("peak memory", f"{result['peak_gib']:.1f} GiB"))
    for s in result["speedups"]:
        said = f"chain tau {s['chain_tau']:.2f}: {s['chain_speedup']:.2f}x"
        if s["tree_speedup"]:
            verdict = "wins" if s["tree_speedup"] > s["chain_speedup"] else "LOSES"
            said += f"; tree tau {s['tree_tau']:.2f}: {s['tree_speedup']:.2f}x, {verdict}"
        else:
            said += f"; a tree wins above tau {s['tree_must_reach_tau']:.2f}"
        rows.append((s["curve"], said))
    title = f"{result['model']}, context {result['context']:,}, batch 1, {result['device']}"
    return two_columns(title, rows)
