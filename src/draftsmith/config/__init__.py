"""The configuration: one YAML file a run, any key overridable on the command line. `RunConfig` is
the whole file.

What this version cannot do is not accepted: a value that would be ignored is an error when the file
loads.
"""

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from draftsmith.config.base import S3_ADDRESS, Codec, Section
from draftsmith.config.data import (
    FiltersConfig,
    PrepareConfig,
    RegenerateConfig,
    SourceConfig,
    TargetConfig,
    TokenizeConfig,
)
from draftsmith.config.running import EngineConfig, EvaluateConfig, ExportConfig, SuperviseConfig
from draftsmith.config.training import (
    DrafterConfig,
    ExtractConfig,
    FeaturesConfig,
    FilesConfig,
    TrainConfig,
)

__all__ = [
    "Codec",
    "DrafterConfig",
    "EngineConfig",
    "EvaluateConfig",
    "ExportConfig",
    "ExtractConfig",
    "FeaturesConfig",
    "FilesConfig",
    "FiltersConfig",
    "PrepareConfig",
    "RegenerateConfig",
    "RunConfig",
    "SourceConfig",
    "SuperviseConfig",
    "TargetConfig",
    "TokenizeConfig",
    "TrainConfig",
]


class RunConfig(Section):
    run: str
    """The run's folder."""
    mirror: str | None = None
    """s3://bucket/prefix: data, checkpoints, reports and the export are copied there as they appear, and
    an empty `run:` folder is filled from there. Features are not: see features.store.
    """
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    target: TargetConfig
    prepare: PrepareConfig
    regenerate: RegenerateConfig = RegenerateConfig()
    tokenize: TokenizeConfig = TokenizeConfig()
    features: FeaturesConfig = FeaturesConfig()
    extract: ExtractConfig = ExtractConfig()
    drafter: DrafterConfig = DrafterConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    export: ExportConfig = ExportConfig()
    engine: EngineConfig = EngineConfig()
    supervise: SuperviseConfig = SuperviseConfig()

    @field_validator("mirror")
    @classmethod
    def _is_on_s3(cls, mirror: str | None) -> str | None:
        if mirror is not None and not re.fullmatch(S3_ADDRESS, mirror):
            raise ValueError(f"{mirror}: s3://bucket/prefix")
        return mirror

    @model_validator(mode="after")
    def _held_out_thinks_as_tokenized(self) -> "RunConfig":
        asked, said = self.evaluate.thinking, self.tokenize.template_kwargs.get("enable_thinking")
        if "held_out" in self.evaluate.suites and asked not in (None, said):
            raise ValueError(
                f"evaluate.thinking {asked}: held_out prompts were tokenized with enable_thinking "
                f"{said}; leave held_out out of evaluate.suites, or set tokenize.template_kwargs"
            )
        return self

    @model_validator(mode="after")
    def _store_is_beside_the_mirror(self) -> "RunConfig":
        if self.mirror is None or "://" not in self.store:
            return self
        mirror, store = self.mirror.rstrip("/"), self.store.rstrip("/") + "/"
        mine = [f"{mirror}/{name}/" for name in ("data", "checkpoints", "eval", "export")]
        if mirror + "/" == store or any(store.startswith(folder) for folder in mine):
            raise ValueError(
                f"features.store {self.store} lies among the files of mirror {mirror}; "
                f"use {mirror}/features or another prefix"
            )
        return self

    @model_validator(mode="after")
    def _store_is_no_stages_folder(self) -> "RunConfig":
        if "://" in self.store:
            return self
        mine = {self.root / name for name in ("data", "checkpoints", "eval", "export")}
        store = Path(self.store).absolute()
        if (
            any(store.is_relative_to(folder.absolute()) for folder in mine)
            or store == self.root.absolute()
        ):
            raise ValueError(
                f"features.store {self.store} lies in a folder that another stage remakes"
            )
        return self

    @model_validator(mode="after")
    def _turns_are_asked_of_servers(self) -> "RunConfig":
        asked = self.regenerate
        if asked.enabled and self.tokenize.turns == "all" and not asked.by_server:
            raise ValueError(
                "tokenize.turns: all needs regenerate.servers or regenerate.launch, or "
                "regenerate.enabled: false; in process only the last answer is regenerated"
            )
        return self

    @model_validator(mode="after")
    def _losses_have_what_they_compare_with(self) -> "RunConfig":
        train, final = self.train, self.features.final
        if train.labels == "target" and (train.loss != "ce" or final != "argmax"):
            raise ValueError("train.labels: target needs features.final: argmax and train.loss: ce")
        if train.loss != "ce" and final != "state":
            raise ValueError(f"train.loss: {train.loss} needs features.final: state")
        return self

    @model_validator(mode="after")
    def _live_runs_the_target(self) -> "RunConfig":
        if self.features.source == "live" and self.extract.files is not None:
            raise ValueError("features.source: live runs the target; leave out extract.files")
        return self

    @model_validator(mode="after")
    def _files_hold_no_argmax(self) -> "RunConfig":
        if self.extract.files is not None and self.features.final == "argmax":
            raise ValueError("features.final: argmax needs the target; extract.files hold states")
        return self

    @property
    def train_seed(self) -> int:
        """What training draws by."""
        return self.seed if self.train.seed is None else self.train.seed

    @property
    def root(self) -> Path:
        """The run's folder as a path."""
        return Path(self.run).expanduser()

    @property
    def store(self) -> str:
        """Where the features are: a path or an s3:// address."""
        store = self.features.store
        if store is None:
            return str(self.root / "features")
        return store if "://" in store else str(Path(store).expanduser())
