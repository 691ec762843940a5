"""The cut target on rows of samples: states at the taps, on their way to the CPU while the GPU runs the
next row.

A row is packed (samples end to end, nothing padded; packed.py) or right-padded samples of like length
(exact for causal models: real tokens never look right, and padding is never stored). On a GPU
nothing here waits: the copy runs on a stream of its own into page-locked memory, and
`RowStates.features` waits for it.

Shapes: N tokens of the row (padding included), S samples.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.core import Sample, UserError
from draftsmith.store.shards import SampleFeatures
from draftsmith.target.load import cut_after, text_decoder
from draftsmith.target.packed import pack, packed
from draftsmith.target.taps import capture, decoder_layers, stack_taps

PAD_ID = 0  # any row of the embedding: nothing real ever sees it
HEAD_TOKENS = 1024  # logits are vocabulary-wide: this many rows of them at a time
ROUND = 256  # a row size that is proposed is a multiple


@dataclass(frozen=True)
class RowStates:
    """States of a row, maybe still on their way: `host` holds hidden [N, taps, H], peaks [N, taps]
    (each row's largest magnitude) and what else was asked for; sample i is rows spans[i].
    """

    samples: list[Sample]
    spans: list[tuple[int, int]]
    host: dict[str, Tensor]
    taps: list[int]
    arrived: torch.cuda.Event | None

    def features(self) -> list[SampleFeatures]:
        """Each sample's features, views of the row's memory. Raises UserError for states that are
        NaN, infinite or all zero: they train a drafter that is never accepted.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        out = []
        for sample, (begin, end) in zip(self.samples, self.spans, strict=True):
            parts = {name: tensor[begin:end] for name, tensor in self.host.items()}
            check_peaks(sample.sample_id, self.taps, parts.pop("peaks"))
            out.append(SampleFeatures(sample, parts.pop("hidden"), parts))
        return out


@dataclass(frozen=True)
class DeviceStates:
    """States of a row where they were made: `parts` as in RowStates."""

    samples: list[Sample]
    spans: list[tuple[int, int]]
    parts: dict[str, Tensor]


def check_peaks(sample_id: int, taps: list[int], peaks: Tensor) -> None:
    """Refuse the sample whose largest magnitudes [n, taps] show states that cannot be."""
    for tap, peak in zip(taps, peaks.amax(0).tolist(), strict=True):
        if peak == 0 or not math.isfinite(peak):
            raise UserError(
                where=f"sample {sample_id}, tap {tap}",
                found="all-zero states" if peak == 0 else "states that are NaN or infinite",
                expected="finite, non-zero states",
                remedy="Check the weights and target.dtype.",
            )


class StatesForward:
    """The target, cut after its last tap. `row_tokens`: packed rows, each filled up to this length,
    so that every row has one shape; None: right-padded rows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        taps: list[int],
        final: str,
        dtype: torch.dtype,
        *,
        row_tokens: int | None = None,
    ) -> None:
        self.model, self.taps, self.final, self.dtype = model, taps, final, dtype
        self.row_tokens = row_tokens
        self.decoder: nn.Module = text_decoder(model)
        self.last = len(decoder_layers(self.decoder, "target.model")) - 1
        if final == "none":
            cut_after(self.decoder, taps[-1] + 1)
        self._copies = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None

    def __call__(self, row: list[Sample]) -> RowStates:
        """Start this row; its states come to the CPU. Raises UserError when it does not fit into the
        GPU's memory.
        """
        return self.to_host(self.on_device(row))

    def on_device(self, row: list[Sample]) -> DeviceStates:
        """The same, without the way to the CPU."""
        try:
            return self._run(row, self.row_tokens)
        except torch.OutOfMemoryError:
            pass  # what the failed forward held is freed when the error is gone
        raise self._too_large(row)

    def launch(self, row: list[Sample], row_tokens: int | None) -> RowStates:
        """This row, packed and filled up to `row_tokens`, or right-padded."""
        return self.to_host(self._run(row, row_tokens))

    @torch.inference_mode()
    def _run(self, row: list[Sample], row_tokens: int | None) -> DeviceStates:
        layers = self.taps + ([self.last] if self.final == "state" else [])
        with capture(self.decoder, layers) as seen:
            if row_tokens is None:
                normed, spans = self._padded(row)
            else:
                normed, spans = self._packed(row, row_tokens)
        seen = {layer: states.to(self.model.device) for layer, states in seen.items()}
        states = stack_taps(seen, self.taps).flatten(0, 1).to(self.dtype)
        parts = {"hidden": states, "peaks": torch.linalg.vector_norm(states, math.inf, dim=-1)}
        if self.final == "state":
            parts["final"] = seen[self.last].flatten(0, 1).to(self.dtype)
        elif self.final == "argmax":
            parts["argmax"] = self._argmax(normed.flatten(0, 1))
        return DeviceStates(row, spans, parts)

    def _packed(self, row: list[Sample], row_tokens: int) -> tuple[Tensor, list[tuple[int, int]]]:
        laid = pack([s.input_ids for s in row], pad_to=row_tokens, device=self.model.device)
        with packed(self.model, self.decoder, laid):
            out = self.decoder(
                input_ids=laid.input_ids, position_ids=laid.position_ids, use_cache=False
            )
        return out.last_hidden_state, list(zip(laid.bounds, laid.bounds[1:], strict=False))[
            : len(row)
        ]

    def _padded(self, row: list[Sample]) -> tuple[Tensor, list[tuple[int, int]]]:
        width = max(len(s.input_ids) for s in row)
        ids = torch.full((len(row), width), PAD_ID)
        for i, sample in enumerate(row):
            ids[i, : len(sample.input_ids)] = torch.tensor(sample.input_ids)
        out = self.decoder(input_ids=ids.to(self.model.device, non_blocking=True), use_cache=False)
        spans = [(i * width, i * width + len(s.input_ids)) for i, s in enumerate(row)]
        return out.last_hidden_state, spans

    def _argmax(self, normed_NH: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        assert head is not None, "a causal LM has output embeddings"
        parts = [head(rows).argmax(-1) for rows in normed_NH.split(HEAD_TOKENS)]
        return torch.cat(parts).to(torch.int32)

    @torch.inference_mode()
    def to_host(self, states: DeviceStates) -> RowStates:
        """Start the copy to page-locked memory; on a CPU nothing is copied."""
        row, spans, parts = states.samples, states.spans, states.parts
        if self._copies is None:
            return RowStates(row, spans, parts, self.taps, None)
        self._copies.wait_stream(torch.cuda.current_stream())
        host = {}
        with torch.cuda.stream(self._copies):
            for name, tensor in parts.items():
                # page-locked blocks come back from torch's cache once a shard is written
                host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._copies)
            arrived = torch.cuda.Event()
            arrived.record()
        return RowStates(row, spans, host, self.taps, arrived)

    def _too_large(self, row: list[Sample]) -> UserError:
        """Says which row would fit, from what a small one is seen to take."""
        device = self.model.device
        tokens = self._row_size(row)
        torch.cuda.empty_cache()
        weights = torch.cuda.memory_allocated(device)
        limit = _memory_limit(device)
        small = max(ROUND, tokens // 8)
        torch.cuda.reset_peak_memory_stats(device)
        ids = [PAD_ID] * small
        try:
            self.launch([Sample(-1, ids, ids)], None if self.row_tokens is None else small)
            torch.cuda.synchronize(device)
            a_token = (torch.cuda.max_memory_allocated(device) - weights) / small
            fits = int(0.9 * (limit - weights) / a_token) // ROUND * ROUND
        except torch.OutOfMemoryError:
            fits = 0
        gib = 1 << 30
        return UserError(
            where="extract.tokens_per_batch",
            found=f"a row of {tokens:,} tokens, which does not fit: the weights take "
            f"{weights / gib:.1f} of {limit / gib:.1f} GiB",
            expected=f"rows of at most {fits:,} tokens here" if fits else "a larger GPU",
            remedy=f"Use --extract.tokens_per_batch {fits} and --tokenize.max_length_tokens no larger, "
            "in a new features.store or run."
            if fits
            else "Even short rows do not fit.",
        )

    def _row_size(self, row: list[Sample]) -> int:
        lengths = [len(s.input_ids) for s in row]
        if self.row_tokens is None:
            return len(row) * max(lengths)
        return max(self.row_tokens, sum(lengths))


def _memory_limit(device: torch.device) -> int:
    """Bytes that this process may use: the allocator's cap, and what other processes leave."""
    free, total = torch.cuda.mem_get_info(device)
    here = free + torch.cuda.memory_reserved(device)
    cap = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return min(here, int(cap * total))
