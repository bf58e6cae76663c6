"""Settings of a run: typed, with the meaning beside each field. YAML file < `--set a.b=v` < flags.

Owns names, defaults and their checks. Secrets are never settings: they come from the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kernelband.errors import UserError, nearest
from kernelband.writers import WriterName


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Budget(_Part):
    pulls: int = Field(40, ge=1, description="candidates to ask for")
    seconds: float | None = Field(None, gt=0, description="wall-clock limit; nothing new is ordered after it")


class Workers(_Part):
    compilers: int = Field(0, ge=0, le=256, description="compile actors; 0: one for two cores, at most 8")
    judges: int = Field(0, ge=0, le=256, description="interpreter workers without a GPU; 0: one for two cores, at most 8")
    gpus: int = Field(0, ge=0, description="GPU actors; 0: every GPU that Ray shows")
    in_flight: int = Field(0, ge=0, le=4096, description="pulls under way at once; 0: as many as keep the judges busy")


class Limits(_Part):
    compile_seconds: float = Field(120, gt=0, description="one candidate's compilation; with a GPU no more than 8 times the "
                                                           "baseline's, and 30 s")
    check_seconds: float = Field(60, gt=0, description="one case in the interpreter or on the GPU")


class Config(_Part):
    budget: Budget = Budget()
    policy: str = Field("kernelband", description="kernelband, random, round-robin or greedy")
    seed: int = Field(0, ge=0, lt=2**63)
    device: str | None = Field(None, description="cuda, model:h200, ...; nothing: the GPU if there is one")
    strategies: list[str] | None = Field(None, min_length=1, description="only these strategies; nothing: all")
    writers: list[WriterName] = Field(["rewriter"], min_length=1, description="who writes children: rewriter, tuner")
    ordered: bool | None = Field(None, description="decide on outcomes in pull order (same seed, same pulls); nothing: "
                                                   "yes without a GPU, no with one")
    workers: Workers = Workers()
    limits: Limits = Limits()
    address: str | None = Field(None, description="Ray cluster; nothing: RAY_ADDRESS, or a local Ray of our own")

    @field_validator("writers")
    @classmethod
    def _each_once(cls, names: list[WriterName]) -> list[WriterName]:
        if len(set(names)) < len(names):
            raise ValueError("name each writer once")
        return names


def load(path: Path | None, sets: list[str], flags: dict[str, Any]) -> Config:
    """Merge file, `a.b=v` settings and flags (dotted names; None means not given).

    Raises UserError: unreadable or malformed file, an unknown key (with the nearest name), a value out of range.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as err:
            raise UserError(f"config file {path} cannot be read: {err}.") from None
        except yaml.YAMLError as err:
            raise UserError(f"config file {path} is not valid YAML: {' '.join(str(err).split())}.") from None
        if loaded is not None and not isinstance(loaded, dict):
            raise UserError(f"config file {path} must hold a mapping of settings, not a {type(loaded).__name__}.")
        data = loaded or {}
    _check_keys(data, Config, "", f"config file {path}")
    for item in sets:
        key, eq, text = item.partition("=")
        if not eq or not key:
            raise UserError(f"--set {item!r} is not of the form name=value, such as budget.pulls=40.")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"--set {item!r}: the value is not valid YAML.") from None
        _put(data, key, value, f"--set {item!r}")
    for key, value in flags.items():
        if value is not None:
            _put(data, key, value, f"--{key.rsplit('.', 1)[-1].replace('_', '-')}")
    try:
        return Config.model_validate(data)
    except ValidationError as err:
        first = err.errors()[0]
        raise UserError(f"setting {'.'.join(map(str, first['loc']))} = {first.get('input')!r}: {first['msg']}.") from None


def _fields(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    return {name: f.annotation if isinstance(f.annotation, type) and issubclass(f.annotation, BaseModel) else None
            for name, f in model.model_fields.items()}


def _names(model: type[BaseModel], prefix: str = "") -> list[str]:
    names: list[str] = []
    for name, inner in _fields(model).items():
        names += _names(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return names


def _check_keys(data: dict[str, Any], model: type[BaseModel], prefix: str, where: str) -> None:
    fields = _fields(model)
    for key, value in data.items():
        if key not in fields:
            raise UserError(f"{where}: unknown setting {prefix + str(key)!r}; {nearest(prefix + str(key), _names(Config))}")
        inner = fields[key]
        if inner is not None:
            if not isinstance(value, dict):
                raise UserError(f"{where}: {prefix + key} must hold settings ({', '.join(_fields(inner))}), "
                                f"not {value!r}.")
            _check_keys(value, inner, f"{prefix}{key}.", where)


def _put(data: dict[str, Any], dotted: str, value: Any, where: str) -> None:
    if dotted not in _names(Config):
        raise UserError(f"{where}: unknown setting {dotted!r}; {nearest(dotted, _names(Config))}")
    *path, last = dotted.split(".")
    for part in path:
        data = data.setdefault(part, {})
    data[last] = value
