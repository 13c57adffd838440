"""Experts on a real GPU: what a CPU cannot show of graphs, streams and copies. Needs no organizer's packages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.diffusion import Condition
from atoll.mixture import Mixture, parse_route
from atoll.mixture.mixture import rows_by_expert
from atoll.models.kernel_check import wrong_kernels
from atoll.models.presets import preset
from atoll.runtime.placing import Placement, choose, load_single_expert
from atoll.runtime.pool import ExpertPool
from atoll.runtime.weights import layout_of
from atoll.sampling import Sampling, generate
from tiny_experts import LATENT, Router, architecture, plain, pool, question, write_experts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: NOT TESTED HERE")
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_experts(tmp_path_factory.mktemp("experts"), 8)


def on_cuda(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Condition]:
    x, t, condition = question(rows, seed)
    return x.to(CUDA), t.to(CUDA), condition.to(CUDA)


def cuda_pool(places: list[Path], slots: int | None = None, **settings: object) -> ExpertPool:
    return pool(places, slots, devices=("cuda:0",), **settings)  # type: ignore[arg-type]


class CudaRouter(Router):
    def __init__(self) -> None:
        super().__init__(experts=8)
        self.of_x, self.of_text = self.of_x.to(CUDA), self.of_text.to(CUDA)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu() - wanted.cpu()).norm() / wanted.cpu().norm())


@pytest.mark.parametrize("slots", [8, 2, 1])
def test_graphs_answer_what_the_cpu_answers(places: list[Path], slots: int) -> None:
    """In float32, for many numbers of rows; with two slots a graph replays whoever's weights are in its memory."""
    graphed = cuda_pool(places, slots)
    with torch.no_grad():
        for rows in (1, 2, 5, 17, 130):
            question_there, question_here = on_cuda(rows, rows), question(rows, rows)
            for k, alone in enumerate(plain(places)):
                assert error(graphed[k](*question_there).value, alone(*question_here).value) < 1e-3


def test_bfloat16_int8_and_kernels(places: list[Path]) -> None:
    with torch.no_grad():
        wanted = [expert(*question(6)).value for expert in plain(places)]
        for settings in ({}, {"int8": True}, {"kernels": True}, {"int8": True, "kernels": True}):
            found = cuda_pool(places, precision="bfloat16", **settings)
            for k, value in enumerate(wanted):
                assert error(found[k](*on_cuda(6)).value, value) < 0.05, settings


def test_experts_on_several_streams_do_not_disturb_each_other(places: list[Path]) -> None:
    x, t, condition = on_cuda(64)
    weights = torch.zeros(64, 8, device=CUDA)
    weights[torch.arange(64), torch.arange(64) % 8] = 1.0
    with torch.no_grad():
        rows = rows_by_expert(weights)
        alone = cuda_pool(places, precision="bfloat16", streams=1)
        wanted = [value.clone() for value in alone.velocities(x, t, condition, rows)]
        together = cuda_pool(places, precision="bfloat16", streams=8)
        for _ in range(50):
            for value, expected in zip(together.velocities(x, t, condition, rows), wanted, strict=True):
                assert torch.equal(value, expected)


def test_the_host_waits_for_nothing_but_the_groups(places: list[Path]) -> None:
    x, t, condition = on_cuda(16)
    weights = torch.softmax(torch.randn(16, 8, device=CUDA), dim=1)
    with torch.no_grad():
        rows = rows_by_expert(weights)
        graphed = cuda_pool(places)
        graphed.velocities(x, t, condition, rows)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graphed.velocities(x, t, condition, rows)
            graphed[3](x, t, condition)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("route", ["top-1", "top-2"])
def test_images_that_take_turns_are_those_of_all_in_step(places: list[Path], route: str) -> None:
    sampling = Sampling(steps=8, guidance=1.5)
    _, _, condition = on_cuda(12)
    mixture = Mixture(cuda_pool(places), CudaRouter(), parse_route(route))
    latents = generate(mixture, LATENT, range(12), condition, sampling, device=CUDA)
    turns = cuda_pool(places, 2)
    for _ in range(2):
        found = generate(replace(mixture, experts=turns), LATENT, range(12), condition, sampling, device=CUDA)
        # an expert chosen otherwise by a hair's breadth makes another image
        close = (found - latents).flatten(1).norm(dim=1) < 1e-2 * latents.flatten(1).norm(dim=1)
        assert close.sum() >= 11
    assert turns.residency.fetched >= 8


def test_a_model_on_a_card(places: list[Path]) -> None:
    alone = load_single_expert(places[0], Placement(devices=(CUDA,)))
    assert "1 expert in bfloat16" in alone.placed.summary
    assert "on cuda:0" in alone.placed.summary
    with torch.no_grad():
        value = alone.denoiser("bfloat16")(*on_cuda(3)).value
        assert error(value, plain(places[:1])[0](*question(3)).value) < 0.05


@pytest.mark.parametrize("name", ["xl/2", "s/2"])
def test_the_kernels_are_right_for_the_usual_experts(name: str) -> None:
    config = preset(name, latent=(4, 32, 32), condition="tokens", text_width=768, text_length=77)
    assert wrong_kernels(config, config.image_tokens, CUDA) is None
    assert wrong_kernels(architecture(0), architecture(0).image_tokens, CUDA) is None


def test_memory_decides(places: list[Path]) -> None:
    config = preset("xl/2", latent=(4, 32, 32), condition="tokens", text_width=768, text_length=77)
    layouts = [layout_of(config, "bfloat16")] * 8
    count, said = choose(layouts, Placement(devices=(CUDA,), memory=6.0))
    assert 2 <= count <= 4
    assert "--memory 6GB" in said
