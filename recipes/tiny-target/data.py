"""Batches for train.py and check.py: rows of plain text, right-padded chats of like lengths.

Chats are never packed: the recurrent layers would carry one chat's state into the next. Right
padding is exact, because every layer is causal.
"""

from pathlib import Path

import numpy as np
import torch

IGNORED = -100
# How often each kind of chat is drawn.
SOURCE_SHARES = {
    "explain": 0.40, "facts": 0.18, "complete": 0.12, "continue": 0.20, "docstring": 0.10
}  # fmt: skip


class TextData:
    """A stream of tokens on the device."""

    def __init__(self, path: Path, device: str) -> None:
        stream = np.fromfile(path, dtype=np.uint16).astype(np.int64)
        self.stream = torch.from_numpy(stream).to(device)

    def sample(
        self, rng: np.random.Generator, *, num_tokens: int, row_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows from random places of the stream; the labels are the inputs."""
        starts = rng.integers(0, len(self.stream) - row_tokens, size=num_tokens // row_tokens)
        offsets_BT = torch.from_numpy(starts)[:, None] + torch.arange(row_tokens)
        rows_BT = self.stream[offsets_BT.to(self.stream.device)]
        return rows_BT, rows_BT

    def eval_batches(
        self, batch_tokens: int, *, row_tokens: int = 1024, num_batches: int = 16
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Fixed rows spread evenly over the stream."""
        rows = self.stream[: len(self.stream) // row_tokens * row_tokens].view(-1, row_tokens)
        rows_per_batch = max(1, batch_tokens // row_tokens)
        rows = rows[:: max(1, len(rows) // (num_batches * rows_per_batch))]
        chunks = rows.split(rows_per_batch)[:num_batches]
        return [(chunk, chunk) for chunk in chunks]


class ChatData:
    """Tokenized chats, drawn by kind and grouped by length."""

    def __init__(self, path: Path, device: str) -> None:
        arrays = np.load(path)
        self.device = device
        self.tokens = arrays["tokens"].astype(np.int64)
        self.prompt_tokens = arrays["prompt_tokens"]
        self.lengths = self.prompt_tokens + arrays["answer_tokens"]
        self.starts = np.cumsum(self.lengths) - self.lengths
        sources = arrays["sources"]
        self.by_source = {s: np.flatnonzero(sources == s) for s in SOURCE_SHARES}
        self.pending: list[np.ndarray] = []

    def collate(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Right-pad some chats; only the answers are labelled."""
        width = -(-int(self.lengths[ids].max()) // 32) * 32
        inputs_BT = np.zeros((len(ids), width), dtype=np.int64)
        labels_BT = np.full((len(ids), width), IGNORED, dtype=np.int64)
        for row, chat in enumerate(ids):
            start, length = self.starts[chat], self.lengths[chat]
            prompt = self.prompt_tokens[chat]
            inputs_BT[row, :length] = self.tokens[start : start + length]
            labels_BT[row, prompt:length] = self.tokens[start + prompt : start + length]
        return (
            torch.from_numpy(inputs_BT).to(self.device, non_blocking=True),
            torch.from_numpy(labels_BT).to(self.device, non_blocking=True),
        )

    def sample(
        self, rng: np.random.Generator, *, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One batch of like-long chats; sixteen batches are drawn and sorted at a time."""
        if not self.pending:
            rows = max(2, num_tokens // 128)
            drawn = np.concatenate(
                [
                    rng.choice(self.by_source[source], size=round(16 * rows * share))
                    for source, share in SOURCE_SHARES.items()
                ]
            )
            drawn = drawn[np.argsort(self.lengths[drawn], kind="stable")]
            batches = np.array_split(drawn, 16)
            self.pending = [batches[i] for i in rng.permutation(len(batches))]
        return self.collate(self.pending.pop())

    def eval_batches(self, *, rows: int = 128) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every chat once, sorted by length."""
        order = np.argsort(self.lengths, kind="stable")
        return [self.collate(order[i : i + rows]) for i in range(0, len(order), rows)]
