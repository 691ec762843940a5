"""Reading the configuration: the YAML file, overrides from the command line, and the keys' help."""

import difflib
import json
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from draftsmith.config import RunConfig, SourceConfig, TokenizeConfig
from draftsmith.core import UserError


class _Strict(yaml.SafeLoader):
    """YAML in which a key given twice is an error, not silently the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key '{key}' is given twice {node.start_mark}")
        return super().construct_mapping(node, deep)


def load(path: Path, overrides: dict[str, Any] | None = None) -> RunConfig:
    """The YAML at `path` with dotted-key overrides applied. Raises UserError, naming the key, for
    anything wrong.
    """
    try:
        data = yaml.load(path.read_text(), _Strict)
    except FileNotFoundError:
        raise UserError(
            where=str(path),
            found="no such file",
            expected="a YAML configuration",
            remedy="Check the path.",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(
            where=str(path),
            found=f"text that is not YAML ({' '.join(str(error).split())})",
            expected="a YAML mapping",
            remedy="Mend the file.",
        ) from None
    if not isinstance(data, dict):
        raise UserError(
            where=str(path),
            found="an empty file" if data is None else f"a {type(data).__name__}",
            expected="a YAML mapping",
            remedy="See recipes/ for examples.",
        )
    return with_overrides(data, overrides or {}, where=str(path))


def with_overrides(data: dict[str, Any], overrides: dict[str, Any], *, where: str) -> RunConfig:
    """RunConfig from a plain dict and dotted keys; every fault in one UserError."""
    for key, value in overrides.items():
        _set(data, key, value)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        faults: dict[str, tuple[str, list[str]]] = {}
        for fault in error.errors():
            key, found, expected = _describe(fault)
            faults.setdefault(key, (found, []))[1].append(expected)
        raise UserError(
            where=f"{where}: {', '.join(faults)}",
            found="; ".join(found for found, _ in faults.values()),
            expected="; ".join(" or ".join(dict.fromkeys(wanted)) for _, wanted in faults.values()),
            remedy="Correct the file or the command line.",
        ) from None


def _describe(fault: Any) -> tuple[str, str, str]:
    *parents, last = fault["loc"] or ("",)
    unknown = fault["type"] == "extra_forbidden"
    # pydantic adds the tried alternatives of a union to the path: those are no keys
    names = [part for part in parents if isinstance(part, int) or str(part).isidentifier()]
    if unknown or isinstance(last, int) or str(last).isidentifier():
        names.append(last)
    key = ".".join(str(part) for part in names)
    if unknown:
        known = _known_keys(names[:-1])
        close = difflib.get_close_matches(str(last), known, n=1)
        hint = f"{close[0]} (did you mean that?)" if close else "one of " + ", ".join(known)
        return key, f"the unknown key '{last}'", hint
    if fault["type"] == "missing":
        return key, "nothing", "a value: the key is required"
    found, wanted = repr(fault["input"])[:200], _wanted(fault["msg"])
    if fault["type"] == "too_short":
        wanted = "at least one"
    elif "; expected " in wanted:
        found, _, wanted = wanted.partition("; expected ")
    elif isinstance(fault["input"], dict | BaseModel):  # keys that do not go together
        found, _, wanted = wanted.partition("; ")
        wanted = wanted or "keys that go together"
    return key, found, wanted


def _wanted(message: str) -> str:
    return message.removeprefix("Value error, ").removeprefix("Input should be ")


def _known_keys(path: list[Any]) -> list[str]:
    model: Any = RunConfig
    for part in path:
        named = None if isinstance(part, int) else _section(model.model_fields[part].annotation)
        model = SourceConfig if isinstance(part, int) else named or model
    return list(model.model_fields)


def _section(kind: Any) -> type[BaseModel] | None:
    """The model of a key that holds keys of its own, if it does; such a key may also be null."""
    if get_origin(kind) is list:
        return None
    kinds = [one for one in (kind, *get_args(kind)) if isinstance(one, type)]
    return next((one for one in kinds if issubclass(one, BaseModel)), None)


def describe(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """A line a key for --help: name, default, what it is."""
    lines = []
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            lines += describe(section, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else json.dumps(field.default)
        text = " ".join((field.description or "").split())
        lines.append(
            f"  --{prefix}{name:<{max(1, 32 - len(prefix))}} {default:<14} {text}".rstrip()
        )
        if name == "sources":
            lines += describe(SourceConfig, f"{prefix}{name}.0.")
    return lines


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    node: Any = data
    try:
        for part in parents:
            if isinstance(node, list):
                node = node[int(part)]
            else:
                # a mapping's own default, such as template_kwargs, is kept beside the new key
                default = TokenizeConfig().template_kwargs if part == "template_kwargs" else {}
                node = node.setdefault(part, dict(default))
        if isinstance(node, list):
            node[int(leaf)] = value
        else:
            node[leaf] = value
    except (IndexError, ValueError, TypeError, AttributeError):
        raise UserError(
            where=f"--{key}",
            found="a key with nothing at that place",
            expected="a config key",
            remedy="See --help.",
        ) from None
