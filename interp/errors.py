"""The faults this toolkit raises: one line that says what was wrong and what would be right."""


class InterpError(Exception):
    """A fault a user can act on; the command line prints its one line and exits with code 2."""


class ConfigError(InterpError):
    """A config file, an override or a flag is wrong."""


class ShapeError(InterpError):
    """A tensor or a list of heads does not fit the model."""


class ModelError(InterpError):
    """A model, run folder or checkpoint cannot be used as asked."""


class AnalysisError(InterpError):
    """An analysis, table or report cannot be computed from what was given."""
