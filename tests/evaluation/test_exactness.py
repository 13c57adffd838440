"""The report's own check of the fusion, for the objectives of an ensemble."""

from __future__ import annotations

from atoll.evaluation.exactness import TIMES, fusion_errors
from atoll.process import EDM, CosineVP, Kind, LinearFlow


def test_the_bridge_is_exact_and_the_papers_recipe_is_not() -> None:
    curves = fusion_errors([(CosineVP(), Kind.EPSILON)] * 2 + [(LinearFlow(), Kind.VELOCITY)] * 6)
    exact, literal = curves.values()
    assert len(exact) == len(literal) == len(TIMES)
    assert max(exact) < 1e-9
    assert literal[len(TIMES) // 2] > 0.05


def test_kinds_the_paper_does_not_fuse_have_no_second_curve() -> None:
    assert list(fusion_errors([(EDM(), Kind.X0), (LinearFlow(), Kind.VELOCITY)])) == ["exact bridge"]
