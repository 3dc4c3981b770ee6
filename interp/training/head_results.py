"""The heads of a trained run one by one: their patterns at every checkpoint, and their ablation.

They go where a report of the experiment looks for them (`head_results` of its pages): to
`step-000500/attention.json`, and `ablation.json` of the last checkpoint.
"""

import shutil
from pathlib import Path

from jaxtyping import Int
from torch import Tensor

from interp.ablation.ablate import ablate
from interp.attending import attend
from interp.inputs import random_inputs
from interp.models.loading import checkpoint_steps, load_model


def save_head_results(
    run: Path, folder: Path, tokens: Int[Tensor, "batch pos"], *, block: int, seed: int
) -> None:
    """Write both into `folder`, in place of what it held.

    The patterns are those on one sequence of `block` random tokens, twice, drawn from `seed`; the
    ablation takes each head away, one at a time, on `tokens`.
    """
    shutil.rmtree(folder, ignore_errors=True)  # a run that was resumed may have other checkpoints
    steps = checkpoint_steps(run)
    for step in steps:
        model = load_model(f"{run}@{step}")
        (batch,) = random_inputs(model, [block], batch=1, seed=seed).batches
        attend(model, batch.tokens).save(folder / f"step-{step:06d}")
    ablate(load_model(run), tokens, metric="loss", seed=seed).save(folder)
