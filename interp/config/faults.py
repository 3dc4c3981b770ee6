"""The faults of a config in one line: dotted key, value and rule."""

import difflib
from collections.abc import Sequence

from pydantic import BaseModel, ValidationError

from interp.config.attention import GroupedAttentionConfig, LatentAttentionConfig
from interp.config.model import LinearScaling, Llama3Scaling
from interp.config.run import RepeatedDataConfig, TextDataConfig


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """The faults of a pydantic error in one line, each with its dotted key, value and rule."""
    return "; ".join(_explain_one(fault, root) for fault in error.errors())


def _explain_one(fault: object, root: type[BaseModel]) -> str:
    assert isinstance(fault, dict)
    # A discriminated union puts its tag into the location: data.text.corpus is written data.corpus.
    loc = list(fault["loc"])
    for union in ("data", "rotary_scaling", "attention"):
        if union in loc:
            del loc[loc.index(union) + 1 : loc.index(union) + 2]
    key = ".".join(str(part) for part in loc)
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        known = _known_keys(root, fault["loc"][:-1])
        near = difflib.get_close_matches(str(loc[-1]), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"unknown key {key}; {hint}known: {', '.join(known)}"
    if fault["type"] == "union_tag_invalid":
        context = fault["ctx"]
        return f"{key}.kind = {context['tag']!r}: one of {context['expected_tags']}"
    if fault["type"] == "missing":
        return f"{key} is missing"
    value = fault["input"]
    if isinstance(value, dict | BaseModel):  # a rule about a whole table names its own keys
        return f"{key}.{message}" if key else message
    if fault["type"] == "value_error":
        return f"{key} = {value!r} {message}"
    return f"{key} = {value!r}: {message[0].lower()}{message[1:]}"


def _known_keys(root: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    table: type[BaseModel] = root
    for part in loc:
        if part in _UNION_TAGS:
            table = _UNION_TAGS[str(part)]
        elif part in table.model_fields:
            inner = _table_type(table.model_fields[str(part)].annotation)
            table = inner or table
    return sorted(table.model_fields)


_UNION_TAGS: dict[str, type[BaseModel]] = {
    "repeated": RepeatedDataConfig,
    "text": TextDataConfig,
    "grouped": GroupedAttentionConfig,
    "latent": LatentAttentionConfig,
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
}


def _table_type(annotation: object) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
