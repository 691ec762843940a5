"""Other tools' files of hidden states: read for the extract stage, written for speculators.

vLLM's ExampleHiddenStatesConnector, speculators' `generate-offline-data` and hs-connectors' FP8
connector leave one safetensors file a request: token_ids [n] int64 and hidden_states [n, layers, H],
in fp8 with hidden_states_scales [n, 1, 1]. No file says which layers these are: the ids given to the
server do. Id k is the state after k layers, so tap i is id i + 1 and `final` is id N, un-normed.
"""

import fcntl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.config import FilesConfig, RunConfig
from draftsmith.core import Sample, UserError
from draftsmith.files import digest, write_atomic
from draftsmith.store.codec import FP8, FP8_MAX
from draftsmith.store.shards import SampleFeatures
from draftsmith.target.forward import check_peaks
from draftsmith.target.load import TargetInfo

IDS, STATES, SCALES = "token_ids", "hidden_states", "hidden_states_scales"
SMALLEST_SCALE = 1e-12


class ForeignStates:
    """Samples' states from a folder of such files, found by their token ids."""

    def __init__(
        self,
        files: FilesConfig,
        taps: list[int],
        *,
        final: str,
        num_layers: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._files, self._taps, self._hidden, self._dtype = files, taps, hidden_size, dtype
        self._columns = [_column(files, tap + 1, f"tap {tap}") for tap in taps]
        self._final = None
        if final == "state":
            self._final = _column(files, num_layers, "features.final: state")
        self._paths = _by_tokens(Path(files.path).expanduser())

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise UserError when a sample has no file."""
        missing = [s for s in samples if _key(s.input_ids) not in self._paths]
        if missing:
            raise UserError(
                where=f"extract.files.path: {self._files.path}",
                found=f"no file with the tokens of {len(missing)} of {len(samples)} samples "
                f"(first: sample {missing[0].sample_id}, {len(missing[0].input_ids)} tokens from "
                f"{missing[0].input_ids[:8]})",
                expected="a file for each sample of RUN/data/tokens, with the same token ids",
                remedy="Send these token ids to the server, or prepare both runs from the same text "
                "with the same template and max_length_tokens.",
            )

    @classmethod
    def of(cls, cfg: RunConfig, info: TargetInfo, taps: list[int]) -> "ForeignStates":
        """Those of extract.files."""
        assert cfg.extract.files is not None, "asked for with extract.files only"
        return cls(
            cfg.extract.files,
            taps,
            final=cfg.features.final,
            num_layers=info.num_layers,
            hidden_size=info.hidden_size,
            dtype=getattr(torch, cfg.features.dtype),
        )

    def __call__(self, row: list[Sample]) -> "ReadRow":
        """The row's samples; their files are read when their features are asked for."""
        return ReadRow(row, self)

    def read(self, sample: Sample) -> SampleFeatures:
        """Features of one sample. Raises UserError for states that cannot be."""
        states = self._states(self._paths[_key(sample.input_ids)], len(sample.input_ids))
        hidden = states[:, self._columns].to(self._dtype)
        check_peaks(
            sample.sample_id, self._taps, torch.linalg.vector_norm(hidden, torch.inf, dim=-1)
        )
        extra = {}
        if self._final is not None:
            extra["final"] = states[:, self._final].to(self._dtype).contiguous()
        return SampleFeatures(sample, hidden, extra)

    def _states(self, path: Path, num_tokens: int) -> Tensor:
        """[n, layers, H] as the file holds them, 8 bits unpacked to fp32."""
        with safe_open(path, "pt") as file:
            states = file.get_tensor(STATES)
            scales = file.get_tensor(SCALES) if SCALES in file.keys() else None  # noqa: SIM118
        shape = (num_tokens, len(self._files.layer_ids), self._hidden)
        if tuple(states.shape) != shape:
            raise _unlike(
                path,
                f"hidden_states {list(states.shape)}",
                f"{list(shape)}: tokens, extract.files.layer_ids, the target's hidden size",
            )
        found = "none" if scales is None else "fp8"
        if found != self._files.codec:
            raise _unlike(path, f"states of codec {found}", f"extract.files.codec: {found}")
        return states if scales is None else states.float() * scales.float()


@dataclass(frozen=True)
class ReadRow:
    """Samples whose states lie in files."""

    samples: list[Sample]
    states: ForeignStates

    def features(self) -> list[SampleFeatures]:
        """Each sample's features."""
        return [self.states.read(sample) for sample in self.samples]


def _column(files: FilesConfig, layer_id: int, what: str) -> int:
    """Where the files hold this layer."""
    if layer_id not in files.layer_ids:
        raise UserError(
            where="extract.files.layer_ids",
            found=str(files.layer_ids),
            expected=f"{layer_id} among them, for {what} (id k is the state after k layers)",
            remedy="Correct layer_ids or features.taps, or extract again with that id.",
        )
    return files.layer_ids.index(layer_id)


def _by_tokens(folder: Path) -> dict[str, Path]:
    """Every file of the folder by its token ids."""
    paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not paths:
        raise UserError(
            where=f"extract.files.path: {folder}",
            found="no *.safetensors",
            expected="the files that vLLM or speculators wrote",
            remedy="Check the path: shared_storage_path, or DATA/hidden_states.",
        )
    out = {}
    for path in paths:
        _refuse_unfinished(path)
        try:
            with safe_open(path, "pt") as file:
                out[_key(file.get_tensor(IDS).tolist())] = path
        except (SafetensorError, OSError) as error:
            raise _unlike(path, str(error), f"{IDS} and {STATES}") from None
    return out


def _refuse_unfinished(path: Path) -> None:
    """vLLM holds a lock beside a file that it still writes."""
    lock = path.with_name(path.name + ".lock")
    if not lock.exists():
        return
    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _unlike(path, "a file that is being written", "finished files") from None


def _key(ids: list[int]) -> str:
    return digest(ids)


def _unlike(path: Path, found: str, expected: str) -> UserError:
    return UserError(
        where=str(path), found=found, expected=expected, remedy="Remove the file or make it again."
    )


def through_fp8(states: Tensor) -> Tensor:
    """States [n, layers, H] as they come back from such an 8-bit file: one scale a token, over all
    its layers.
    """
    codes, scales = in_fp8(states)
    return (codes.float() * scales).to(states.dtype)


def in_fp8(states: Tensor) -> tuple[Tensor, Tensor]:
    """hs-connectors' fp8: codes, and a scale a token [n, 1, 1]."""
    wide = states.float()
    scales = (wide.abs().amax((1, 2), keepdim=True) / FP8_MAX).clamp(min=SMALLEST_SCALE)
    return (wide / scales).to(FP8), scales


def write_sample(path: Path, ids: Tensor, states: Tensor, *, fp8: bool) -> None:
    """One file of speculators: ids [n], states [n, taps + final, H]."""
    tensors = {IDS: ids.long().contiguous(), STATES: states.contiguous()}
    if fp8:
        tensors[STATES], tensors[SCALES] = in_fp8(states)
    write_atomic(path, lambda temporary: save_file(tensors, temporary))
