"""The `interp` command: verbs only, no logic.

Nothing heavy is imported before a verb needs it, and paths, configs and flags are checked before a
model is. A user's mistake is one line on standard error and exit code 2.
"""

from interp.cli import (  # noqa: F401  (register verbs)
    ablation,
    activations,
    generation,
    heads,
    models,
    pruning,
    quantization,
    runs,
    views,
)
from interp.cli.app import app


def main() -> None:
    """The entry point of the `interp` command."""
    app()
