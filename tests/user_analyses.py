"""What a user's own file of analyses may look like, as text and on disk."""

GOOD = '''"""My analyses."""
from typing import Annotated

import torch

from interp import analysis


@analysis("my-score", unit="attention probability", null="uniform", noun="seer", effect=0.2)
def my_score(
    attention,
    batch,
    *,
    offset: Annotated[int, "how far back [tokens]"] = 1,
    share: float = 0.5,
    strict: Annotated[bool, "only real tokens"] = True,
    label: str = "x",
):
    """Attention some tokens back.

    More words.
    """
    keys = torch.arange(batch.tokens.shape[1])[None] - offset
    keys = keys.expand(len(batch.tokens), -1)
    counted = keys >= 0
    return {"my_score": share * attention.mean(attention.prob_at(keys), counted)}


@analysis("plain", unit="nats", null="uniform")
def plain(attention, batch):
    return {"plain": attention.mean(attention.entropy, batch.real)}
'''


def one(name="my-score", body='return {"my_score": 0}', *, keywords="", top=""):
    """A file with one analysis."""
    arguments = f", *, {keywords}" if keywords else ""
    return (
        f"{top}\nfrom interp import analysis\n\n\n"
        f'@analysis("{name}", unit="x", null="uniform")\n'
        f"def f(attention, batch{arguments}):\n    {body}\n"
    )
