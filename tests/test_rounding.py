"""Rounding to a grid: known answers, torch's own fake quantization, and loops in float64."""

import itertools
import math

import numpy as np
import pytest
import torch

from interp.errors import AnalysisError
from interp.quantization.rounding import Grid, distinct_bits

BITS = range(2, 9)
SHARINGS = ("matrix", "row", "group")


def rounded(values, bits, sharing="row", **more):
    """What a grid makes of one matrix, as lists."""
    return Grid(bits, sharing, **more).round(torch.tensor(values)).tolist()


def some_matrix(seed=0, rows=6, width=16, dtype=torch.float32):
    """Numbers of unlike rows: some small, some one-signed, one with a large value."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator, dtype=dtype)
    x *= torch.logspace(-3, 2, rows, dtype=dtype)[:, None]
    x[1] = x[1].abs()
    x[2] = -x[2].abs()
    x[3, 5] = 1e4
    return x


def by_loops(x, bits, sharing, affine, group):
    """A matrix on its grid, one number at a time in float64."""
    rows = [[float(value) for value in row] for row in x.tolist()]
    width = len(rows[0])
    size = {"matrix": width, "row": width, "group": group}[sharing]
    parts = [[row[start : start + size] for start in range(0, width, size)] for row in rows]
    together = [value for row in rows for value in row]
    made = []
    for row in parts:
        made.append([])
        for part in row:
            shared = together if sharing == "matrix" else part
            if affine:
                low, high, last = min(*shared, 0.0), max(*shared, 0.0), 2**bits - 1
                scale = (high - low) / last
            else:
                last = 2 ** (bits - 1) - 1
                scale = max(abs(value) for value in shared) / last
            for value in part:
                if scale == 0:
                    made[-1].append(0.0)
                elif affine:
                    zero = round(-low / scale)
                    integer = min(max(round(value / scale) + zero, 0), last)
                    made[-1].append((integer - zero) * scale)
                else:
                    made[-1].append(min(max(round(value / scale), -last), last) * scale)
    return torch.tensor(made, dtype=torch.float64)


# --- known answers --------------------------------------------------------------------------------


def test_halves_go_to_the_even_integer():
    # Of 3 bits the largest integer is 3, so the scale is 1.
    values = [[3.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.75]]
    assert rounded(values, 3) == [[3.0, 0.0, 2.0, 2.0, -0.0, -2.0, -2.0, 1.0]]


def test_a_symmetric_grid_of_2_bits_has_three_numbers_and_one_of_3_bits_has_seven():
    line = torch.linspace(-1, 1, 1001)[None]
    assert Grid(2, "row").round(line).unique().tolist() == [-1, 0, 1]
    assert Grid(3, "row").round(line).unique().tolist() == pytest.approx(
        [-1, -2 / 3, -1 / 3, 0, 1 / 3, 2 / 3, 1]
    )


def test_the_largest_negative_value_is_on_a_symmetric_grid():
    assert rounded([[-7.0, 6.4, 3.5]], 4) == [[-7.0, 6.0, 4.0]]


def test_an_affine_grid_spans_the_smallest_and_the_largest_value():
    # Four numbers from -1 to 2: the scale is 1 and the zero point is 1.
    assert rounded([[-1.0, 2.0, 0.4, 1.6]], 2, affine=True) == [[-1.0, 2.0, 0.0, 2.0]]
    # Values of one sign: the grid goes from 0 to 7 all the same.
    assert rounded([[7.0, 5.2, 4.6]], 3, affine=True) == [[7.0, 5.0, 5.0]]
    assert rounded([[-7.0, -5.2, -4.6]], 3, affine=True) == [[-7.0, -5.0, -5.0]]


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_zero_is_exact(bits, affine):
    x = some_matrix()
    x[:, 3] = 0.0
    assert (Grid(bits, "row", affine).round(x)[:, 3] == 0).all()


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_zeros_stay_zeros(sharing, affine):
    x = torch.zeros(3, 8)
    assert torch.equal(Grid(4, sharing, affine, group=4).round(x), x)
    x[0] = 1.0
    assert (Grid(4, sharing, affine, group=4).round(x)[1:] == 0).all()


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("value", [0.3, -5.7])
@pytest.mark.parametrize("bits", BITS)
def test_a_constant_row_stays_as_it_is(bits, value, affine):
    made = Grid(bits, "row", affine).round(torch.full((2, 5), value))
    # c / (c / 127) * 127 is c to float32's rounding.
    assert made.numpy() == pytest.approx(value, rel=1e-6)


def test_one_huge_value_takes_its_neighbours_to_zero_and_no_other_row():
    values = [[1000.0, 3.0, -3.0, 0.1], [3.5, 3.0, -3.0, 0.1]]
    by_row = rounded(values, 8)
    assert by_row[0] == [1000.0, 0.0, 0.0, 0.0]
    assert by_row[1] == pytest.approx([3.5, 3.0, -3.0, 0.1], abs=3.5 / 254)
    assert rounded(values, 8, "matrix")[1] == [0.0] * 4
    in_groups = rounded(values, 8, "group", group=2)
    assert in_groups[0][:2] == [1000.0, 0.0]
    assert in_groups[0][2:] == pytest.approx([-3.0, 0.1], abs=3 / 254)


def test_a_scale_is_shared_by_a_matrix_a_row_or_a_group_and_never_by_two_sequences():
    values = torch.tensor([[[7.0, 1.4], [0.7, 0.14]], [[0.07, 0.014], [0.007, 0.0014]]])
    matrix = Grid(4, "matrix").round(values)
    assert matrix[0].tolist() == [[7.0, 1.0], [1.0, 0.0]]
    assert matrix[1].flatten().tolist() == pytest.approx([0.07, 0.01, 0.01, 0.0])
    assert Grid(4, "row").round(values)[0, 1].tolist() == pytest.approx([0.7, 0.1])
    alone = torch.stack([Grid(4, "matrix").round(own) for own in values])
    assert torch.equal(matrix, alone)


def test_scales_and_zero_points_count_as_16_bits():
    assert Grid(8, "row").bits_per_number(10, 64) == 8 + 16 / 64
    assert Grid(8, "matrix").bits_per_number(10, 64) == 8 + 16 / 640
    assert Grid(4, "group", group=32).bits_per_number(10, 64) == 4.5
    assert Grid(4, "group", affine=True, group=32).bits_per_number(10, 64) == 5.0


def test_a_group_that_does_not_divide_the_width_is_refused_in_one_line():
    with pytest.raises(AnalysisError) as refused:
        Grid(4, "group", group=5).round(torch.ones(2, 12))
    assert str(refused.value) == "a group of 5 does not divide the 12 inputs of a projection"


# --- torch's own and loops ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", BITS)
def test_a_symmetric_grid_has_the_bits_of_torch_fake_quantization(bits, seed):
    x, last = some_matrix(seed, width=64), 2 ** (bits - 1) - 1
    scale = np.abs(x.numpy()).max() / np.float32(last)
    expected = torch.fake_quantize_per_tensor_affine(x, float(scale), 0, -last, last)
    assert torch.equal(Grid(bits, "matrix").round(x), expected)
    scales = torch.from_numpy(np.abs(x.numpy()).max(axis=1) / np.float32(last))
    zeros = torch.zeros(len(x), dtype=torch.int32)
    expected = torch.fake_quantize_per_channel_affine(x, scales, zeros, 0, -last, last)
    assert torch.equal(Grid(bits, "row").round(x), expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", BITS)
def test_an_affine_grid_has_the_bits_of_torch_fake_quantization(bits, seed):
    x, last = some_matrix(seed, width=64), 2**bits - 1
    low = np.minimum(x.numpy().min(axis=1), np.float32(0))
    scales = (np.maximum(x.numpy().max(axis=1), np.float32(0)) - low) / np.float32(last)
    zeros = np.rint(-low / scales).astype(np.int32)
    expected = torch.fake_quantize_per_channel_affine(
        x, torch.from_numpy(scales), torch.from_numpy(zeros), 0, 0, last
    )
    assert torch.equal(Grid(bits, "row", affine=True).round(x), expected)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("bits", BITS)
def test_float64_is_rounded_as_by_loops_bit_for_bit(bits, sharing, affine):
    x = some_matrix(dtype=torch.float64)
    x[0, 3], x[4] = 0.0, 0.0
    expected = by_loops(x, bits, sharing, affine, 4)
    assert torch.equal(Grid(bits, sharing, affine, group=4).round(x), expected)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_in_float32(dtype, sharing, affine):
    x = some_matrix().to(dtype)
    grid = Grid(8, sharing, affine, group=4)
    made = grid.round(x)
    assert made.dtype == dtype
    assert torch.equal(made, grid.round(x.float()).to(dtype))


def test_a_span_beyond_float16_does_not_overflow():
    x = torch.tensor([[60000.0, -60000.0, 0.0]], dtype=torch.float16)
    made = Grid(8, "row", affine=True).round(x)
    assert made.isfinite().all()
    assert made[0].tolist() == pytest.approx(x[0].tolist(), abs=120000 / 255)


# --- properties -----------------------------------------------------------------------------------

EVERY = list(itertools.product(BITS, SHARINGS, [False, True]))


@pytest.mark.parametrize(("bits", "sharing", "affine"), EVERY)
def test_what_is_on_the_grid_stays(bits, sharing, affine):
    grid = Grid(bits, sharing, affine, group=4)
    once = grid.round(some_matrix())
    assert torch.allclose(grid.round(once), once, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("bits", "sharing", "affine"), EVERY)
def test_nothing_moves_by_more_than_half_a_scale(bits, sharing, affine):
    x = some_matrix(1)
    parts = {"matrix": x.flatten()[None], "row": x, "group": x.reshape(-1, 4)}[sharing]
    moved = (Grid(bits, sharing, affine, group=4).round(x) - x).abs().reshape(parts.shape)
    span = parts.amax(1).clamp(min=0) - parts.amin(1).clamp(max=0)
    steps = 2**bits - 1 if affine else 2 ** (bits - 1) - 1
    scale = (span if affine else parts.abs().amax(1)) / steps
    # float32: half a scale, and the rounding of the integer times the scale.
    assert (moved <= scale[:, None] * (0.5 + 1e-4)).all()


@pytest.mark.parametrize(("bits", "sharing", "affine"), EVERY)
def test_a_power_of_two_passes_through(bits, sharing, affine):
    x, grid = some_matrix(2), Grid(bits, sharing, affine, group=4)
    assert torch.equal(grid.round(x * 32), grid.round(x) * 32)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("bits", BITS)
def test_a_symmetric_grid_treats_both_signs_alike(bits, sharing):
    x, grid = some_matrix(3), Grid(bits, sharing, group=4)
    assert torch.equal(grid.round(-x), -grid.round(x))


@pytest.mark.parametrize(("bits", "sharing", "affine"), EVERY)
def test_there_are_no_more_values_than_bits_tell(bits, sharing, affine):
    made = Grid(bits, sharing, affine, group=8).round(some_matrix(4, width=1024))
    parts = {"matrix": made.flatten()[None], "row": made, "group": made.reshape(-1, 8)}[sharing]
    most = 2**bits if affine else 2**bits - 1
    assert max(len(part.unique()) for part in parts) <= most


def test_what_is_rounded_is_left_as_it_was():
    x = some_matrix()
    before = x.clone()
    for affine in (False, True):
        Grid(4, "row", affine).round(x)
    assert torch.equal(x, before)


# --- a grid that is there already -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [20, 64, 512, 576, 2048])
def test_weights_that_were_never_rounded_lie_on_no_grid(width, dtype):
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(0)) * 0.02
    assert distinct_bits(x.to(dtype)) is None


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(
    ("sharing", "width", "group"), [("row", 96, 64), ("group", 96, 32), ("group", 256, 128)]
)
def test_the_bits_of_rounded_weights_are_found(sharing, width, group, bits, affine):
    x = torch.randn(32, width, generator=torch.Generator().manual_seed(0))
    assert distinct_bits(Grid(bits, sharing, affine, group).round(x)) == bits


@pytest.mark.parametrize("width", [32, 64, 512])
@pytest.mark.parametrize("kept", [0.02, 0.1, 0.3])
def test_weights_that_were_pruned_one_by_one_lie_on_no_grid(width, kept):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, width, generator=generator)
    x *= torch.rand(64, width, generator=generator) < kept
    assert distinct_bits(x) is None
    assert distinct_bits(torch.zeros(64, width)) == 1


def test_blocks_of_32_with_a_scale_and_a_least_value_of_their_own_are_found():
    """GGUF's Q4_1."""
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(16, (8, 6, 32), generator=generator).float()
    scales, least = torch.rand(2, 8, 6, 1, generator=generator)
    assert distinct_bits((integers * scales + least).flatten(1)) == 4


def test_8_bits_are_found_in_rows_of_512_and_more_and_not_in_blocks_of_32():
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    assert distinct_bits(Grid(8, "row").round(x)) == 8
    assert distinct_bits(Grid(8, "row").round(x[:, :256])) is None
    assert distinct_bits(Grid(8, "group", group=32).round(x)) is None


def test_one_weight_off_the_grid_is_enough_where_its_block_has_no_value_to_spare():
    x = Grid(4, "row", affine=True).round(torch.randn(64, 32))
    assert distinct_bits(x) == 4
    full = max(range(64), key=lambda row: len(x[row].unique()))
    values, counts = x[full].unique(return_counts=True)
    assert len(values) == 16
    x[full, int((x[full] == values[counts.argmax()]).nonzero()[0])] += math.pi
    assert distinct_bits(x) is None
