"""The form of state.json and supervisor.json, for readers: a file that a disk or a person has damaged is told as
one message, not met half-way through a view.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

State = Literal[
    "QUEUED", "LOADING", "READY", "PREPARING", "REGENERATING", "TOKENIZING", "EXTRACTING", "TRAINING",
    "EVALUATING", "EXPORTING", "DONE", "FAILED", "STALLED", "STOPPED",
]  # fmt: skip


class _Said(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class Process(_Said):
    pid: int
    host: str
    role: str = ""
    began: str | None = None
    """Of the process, in the kernel's ticks."""


class Failure(_Said):
    cause: str
    category: str = "unknown"
    remedy: str = ""


class Gpu(_Said):
    index: int
    used_bytes: int
    total_bytes: int
    name: str = ""
    use: float | None = None


class RunState(_Said):
    """state.json."""

    run: str = ""
    state: State
    stage: str
    done: int
    total: int | None = None
    unit: str = ""
    rate: float | None = None
    eta_s: float | None = None
    started_at: float = 0.0
    heartbeat_at: float = 0.0
    progress_at: float = 0.0
    progress_s: float = 0.0
    stall_s: float = 600.0
    workers: list[Process] = Field(min_length=1)
    gpus: list[Gpu] = []
    last: dict[str, float | int | str | None] = {}
    failure: Failure | None = None


class Supervisor(_Said):
    """supervisor.json."""

    pid: int
    host: str
    began: str | None = None
    started_at: float
    heartbeat_at: float
    tried: str = Field(alias="try")
    restarts: int
    waits_until: float | None = None
    failure: Failure | None = None
    stalled: Failure | None = None


def checked(form: type[_Said], data: Any) -> dict[str, Any]:
    """The same data with what may be missing filled in. Raises ValueError for another form."""
    return form.model_validate(data).model_dump(by_alias=True)
