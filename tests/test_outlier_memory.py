"""The memory of `interp.outliers`: a forward pass, however many tokens go by."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import interp
from interp.activations import largest
from interp.config import ModelConfig
from interp.models.transformer import Transformer

torch.set_num_threads(1)
model = Transformer(
    ModelConfig(
        **{"n_layers": 2, "d_model": 64, "n_ctx": 100, "d_vocab": 101},
        **{"attention": {"n_heads": 4}, "mlp": {"d_mlp": 256}},
    )
)
if sys.argv[2] == "keeping":
    kept, see = [], largest.Largest.see

    def keeping(self, x, *given):
        kept.append(x.clone())
        see(self, x, *given)

    largest.Largest.see = keeping
tokens = torch.randint(101, (int(sys.argv[1]) // 100, 100))
result = interp.outliers(model, tokens)
assert result.sites["n"].eq(int(sys.argv[1])).all()
# Not ru_maxrss, which begins at what the process that started this one holds.
(peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak.split()[1])
"""

BOUND = 200 * 2**10
"""Kilobytes. The activations of 100,000 tokens are 600 MB for this model: 1,500 numbers a token."""


def peak(tokens, how="streaming"):
    """The largest memory of a process that looks at so many tokens, in kilobytes."""
    command = [sys.executable, "-c", PROGRAM, str(tokens), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is on Linux only")
def test_100_000_tokens_need_no_more_memory_than_2_000_and_200_mb():
    few, many = peak(2_000), peak(100_000)
    assert many - few < BOUND


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is on Linux only")
def test_the_bound_would_see_activations_that_are_kept():
    few, many = peak(2_000, "keeping"), peak(100_000, "keeping")
    assert many - few > 2 * BOUND
