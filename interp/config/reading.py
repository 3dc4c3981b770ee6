"""Configs from TOML files, with overrides, and back to plain tables."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from interp.config.faults import explain
from interp.config.run import RunConfig
from interp.errors import ConfigError


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The run config in a TOML file, with `key.subkey=value` overrides applied.

    Raises: ConfigError, one line naming file, dotted key, value and rule.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {_one_line(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {_one_line(error)}") from None
    for override in overrides:
        _apply_override(data, override)
    return parse_config(data, str(path))


def parse_config(data: dict[str, object], where: str) -> RunConfig:
    """The run config in nested tables; `where` begins the line of a fault."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, RunConfig)}") from None


def config_tables(config: BaseModel) -> dict[str, object]:
    """The nested tables of a config as plain values, without the keys that are not set.

    TOML has no null, so a missing key is how "not given" is written.
    """
    return config.model_dump(mode="json", exclude_none=True)


def _apply_override(data: dict[str, object], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected key.subkey=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # an unquoted word is a string
    table = data
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a table")
        table = inner
    table[parts[-1]] = value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
