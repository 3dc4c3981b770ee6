"""What every table of a config has in common."""

from typing import Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, model_validator


@runtime_checkable
class FieldInfo(Protocol):
    """The part of pydantic's `ValidationInfo` used here; that class refuses `isinstance`."""

    @property
    def data(self) -> dict[str, object]: ...


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, data: object) -> object:
        # pydantic reads true as 1.
        for name, value in data.items() if isinstance(data, dict) else ():
            field = cls.model_fields.get(name)
            if field is not None and isinstance(value, bool) and not _takes_bool(field.annotation):
                raise ValueError(f"{name} = {str(value).lower()} is not what belongs here")
        return data


def _takes_bool(annotation: object) -> bool:
    return annotation is bool or bool in getattr(annotation, "__args__", ())
