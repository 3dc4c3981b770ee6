"""Quantization in words, on pages and on a terminal, from small tables made up."""

import math
import re

import pandas as pd
import pytest
from pages import NASTY, Elements, figures_of, strict, without_library
from quantization_tables import NOTE, result, row, several_bits, smollm, w4a16, w8a8

import interp
from interp.activation_tables import Quantization
from interp.errors import AnalysisError
from interp.views.findings import findings
from interp.views.pages.scores import read_scores
from interp.views.quantization_words import quantization_findings, variants
from interp.views.report import report, result_page, write_report
from interp.views.terminal.quantization import print_quantization


def test_what_each_way_costs_is_told_with_its_error():
    told = quantization_findings(result(w8a8()))
    assert told[0] == (
        "quantization: before rounding the loss is 3.118 nats a token, a perplexity of 22.6"
    )
    assert told[1] == "per tensor and per token say which activations share a scale"
    assert told[2] == (
        "W8A8 costs, in nats a token: round-to-nearest per tensor 0.715 ± 0.02, round-to-nearest "
        "per token 0.04 ± 0.004, LLM.int8 0.02 ± 0.003, SmoothQuant per tensor 0.187 ± 0.02, "
        "SmoothQuant per token −0.001 ± 0.002 (not clearly different from 0)"
    )


def test_the_share_that_is_won_back_has_its_error():
    """1 - 0.2/0.8 = 75%; by hand: sqrt(0.03² + (0.25 × 0.04)²) / 0.8 = 4.0%."""
    rows = [
        row("round-to-nearest", "w8a8", "channel", "tensor", "rounded", 0.8, 0.04),
        row("smoothquant", "w8a8", "channel", "tensor", "rounded", 0.2, 0.03),
    ]
    assert quantization_findings(result(rows))[3] == (
        "W8A8: of the 0.8 nats that round-to-nearest per tensor costs, SmoothQuant per tensor "
        "saves 75 ± 4%"
    )


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (0.50, 0.01, "costs, LLM.int8 saves 38 ± 2%"),
        (0.79, 0.01, "not clearly different"),  # 0.01 less, its error 0.022
        (0.84, 0.01, "not clearly different"),
        (0.90, 0.01, "worse than"),
    ],
)
def test_only_a_difference_of_more_than_two_errors_is_one(change, error, said):
    rows = [
        row("round-to-nearest", "w8a8", "channel", "tensor", "rounded", 0.8, 0.02),
        row("llm.int8", "w8a8", "channel", "vector", "rounded", change, error),
    ]
    (line,) = quantization_findings(result(rows))[3:]
    assert said in line
    assert line.count("LLM.int8") == 1


def test_a_cost_that_may_be_none_has_no_shares():
    rows = [
        row("round-to-nearest", "w8a8", "channel", "token", "rounded", 0.01, 0.02),
        row("llm.int8", "w8a8", "channel", "vector", "rounded", -0.2, 0.01),
    ]
    told = quantization_findings(result(rows))
    assert len(told) == 3
    assert "0.01 ± 0.02 (not clearly different from 0)" in told[2]


def test_rounding_errors_of_floats_are_no_cost():
    rows = [row("round-to-nearest", "w16a16", "channel", "", "", 3e-6, 1e-9)]
    told = quantization_findings(result(rows))
    assert "(not clearly different from 0)" in told[1]


def test_kept_sinks_are_told_where_they_matter_and_where_not():
    told = [line for line in quantization_findings(result(w8a8())) if "sink" in line]
    assert told == [
        "W8A8: keeping the 8 sink tokens unrounded takes 0.516 ± 0.028 off the cost of "
        "round-to-nearest per tensor, which is then 0.199 ± 0.02; it makes no clear difference for "
        "round-to-nearest per token, LLM.int8, SmoothQuant per tensor, SmoothQuant per token"
    ]


def test_without_sinks_nothing_is_claimed_of_them():
    summary = result(w8a8()).summary | {"sink_tokens": 0}
    told = quantization_findings(result(w8a8(), summary=summary))
    assert "W8A8: no token is a sink, so keeping them changes nothing" in told
    assert not any("takes" in line for line in told)


def test_weights_alone_are_compared_with_the_nearest():
    """1 - 0.15/0.30 = 50%."""
    told = quantization_findings(result(w4a16()))
    assert told[1] == ("W4A16 costs, in nats a token: round-to-nearest 0.3 ± 0.02, AWQ 0.15 ± 0.01")
    assert told[2] == ("W4A16: of the 0.3 nats that round-to-nearest costs, AWQ saves 50 ± 5%")


def test_without_errors_no_difference_is_told():
    rows = [one | {"loss_change_se": math.nan} for one in w8a8()]
    told = quantization_findings(result(rows))
    assert told[1] == "there are no standard errors, so no differences are told"
    assert len(told) == 4
    assert "±" not in " ".join(told)


def test_notes_are_told_last_and_not_again_among_the_facts():
    page = Elements(result_page(smollm())).text
    assert quantization_findings(smollm())[-1] == NOTE
    assert page.count(NOTE[1:]) == 1


def test_a_result_without_values_says_so():
    rows = [one | {"loss_change": math.nan, "error": math.nan} for one in w8a8()]
    empty = result(rows)
    page = Elements(result_page(empty)).text
    assert "no way of rounding has a value." in page
    assert "No way of rounding has a finite loss, so there is no figure to draw." in page
    with pytest.raises(AnalysisError, match="No way of rounding has a finite loss"):
        interp.figure(empty)
    nothing = Quantization(**vars(empty) | {"table": pd.DataFrame(), "layers": pd.DataFrame()})
    assert "no way of rounding is listed" in Elements(result_page(nothing)).text


def test_a_page_has_both_figures_every_row_and_every_error():
    page = result_page(smollm())
    drawn = figures_of(page)
    assert len(drawn) == 2
    elements = Elements(without_library(page))
    for told in (
        "What rounding costs",
        "Error of the residual stream by layer",
        "All 300 errors by layer",
        "costs, round-to-nearest per token saves 94.4 ± 0.6%, LLM.int8 97.2 ± 0.4%",
        "LLM.int8 keeps dimensions with an activation of 6 or more.",
        "The block weights lie on a 4-bit grid already",
    ):
        assert told in elements.text
    assert "A group is" not in elements.text
    assert "A group is 64 weights" in Elements(result_page(several_bits())).text


def test_names_from_outside_stay_text():
    page = result_page(smollm(model=NASTY, inputs=NASTY))
    assert "alert" not in "".join(Elements(without_library(page)).tags)
    assert Elements(page).tags.count("script") == Elements(result_page(smollm())).tags.count(
        "script"
    )
    assert strict(interp.figure(smollm(model=NASTY)))


def test_a_saved_result_gives_the_same_page(tmp_path):
    smollm().save(tmp_path)
    again = read_scores(tmp_path / "quantization.json")
    assert isinstance(again, Quantization)
    assert variants(again.table) == variants(smollm().table)
    assert result_page(again) == result_page(smollm())
    whole = Elements(without_library(write_report(tmp_path).read_text("utf-8"))).text
    assert "Quantization: " in whole
    assert "What rounding costs" in whole


def test_results_of_two_models_name_them(tmp_path):
    path = report([smollm(), result(w4a16())], tmp_path / "page.html")
    text = Elements(without_library(path.read_text("utf-8"))).text
    assert "Quantization of smollm2-135m, tiny" in text
    lines = findings([smollm(), result(w4a16())])
    assert any(line.startswith("Tiny, W4A16 costs") for line in lines)
    assert any(line.startswith("Smollm2-135m, W8A8 costs") for line in lines)


def test_a_terminal_shows_every_row_and_the_findings(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    print_quantization(several_bits())
    printed = capsys.readouterr().out
    assert "quantization of tiny" in printed
    assert printed.count("round-to-nearest W8A8 per tensor") == 1
    assert re.search(r"\+0\.7150 ± 0\.0200 │ +\+0\.1990 ± 0\.0200", printed)
    assert "8 windows of 256 tokens; seed 7" in printed
    for line in quantization_findings(several_bits()):
        assert line[:60] in printed


def test_a_narrow_terminal_folds_no_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    print_quantization(smollm())
    printed = capsys.readouterr().out
    assert "+0.7150 ± 0.0200" in printed
    assert all(len(line) <= 60 for line in printed.splitlines())
