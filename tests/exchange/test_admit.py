"""Admission: a stranger's expert is checked, measured on unseen data, and only then let in."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.artifacts import Artifact, AtollWarning, Store, finalize
from atoll.diffusion import CosineVP, DDPMBetas, Kind, LinearFlow, Objective, noisy, velocity_error
from atoll.exchange.admission import admit
from atoll.exchange.card_checks import check_card
from atoll.exchange.checks import CHECKS
from atoll.exchange.holdout import EDGES, WEIGHTS, Draws, GaussianDenoiser
from atoll.exchange.quarantine import Refused
from atoll.exchange.thresholds import AdmissionThresholds
from atoll.islands.expert import load_expert
from atoll.islands.initialization import card_for
from atoll.islands.order import Acceptance, read_order
from atoll.islands.train import train
from atoll.registry.changes import register_orders
from atoll.registry.versions import open_ensemble
from atoll.training.resources import Resources
from exchange.gallery import reseal
from runs import atoll, resealed, versions_of


@pytest.fixture(scope="module")
def expert(planned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("expert") / "01"
    train(planned / "orders" / "01.json", out, resources=Resources(device="cpu"))
    return out


@pytest.fixture
def run(planned: Path, tmp_path: Path) -> Path:
    """A copy of the planned run, so that what is admitted touches no other test."""
    return Path(shutil.copytree(planned, tmp_path / "run"))


def loosened(run: Path, expert: Path, tmp_path: Path, gaussians: float) -> Path:
    """The same expert for the same order with another acceptance rule (tiny experts pass no real one)."""
    order, _ = read_order(run / "orders" / "01.json")
    order = order.model_copy(
        update={"acceptance": order.acceptance.model_copy(update={"max_ratio_to_gaussian": gaussians})}
    )
    (run / "orders" / "01.json").write_bytes(order.to_bytes())
    before = Artifact.open(run / "orders").manifest
    finalize(run / "orders", list(before.files), "orders", config=before.config, parents=before.parents, license=None)
    shutil.rmtree(run / "ensemble", ignore_errors=True)  # the model begins with these orders
    register_orders(Store.at(run), *(Artifact.open(run / name) for name in ("data", "partition", "orders")))
    return resealed(expert, tmp_path / f"for-{gaussians}", order=order.digest())


def test_an_honest_expert_is_admitted_measured_and_named(run: Path, expert: Path, tmp_path: Path) -> None:
    folder = loosened(run, expert, tmp_path, 100.0)
    result = admit(Store.at(run), folder)
    assert not result.already
    file = open_ensemble(Store.at(run))
    assert [member.cluster for member in file.experts] == [1]
    assert file.empty_clusters() == [0, 2]
    assert Artifact.open(run / file.experts[0].path, "expert").digest == Artifact.open(folder).digest
    scores = file.experts[0].val_loss
    assert scores is not None
    assert scores.outside is not None
    assert 0 < scores.inside < 5
    assert 0 < scores.gaussian < 2


def test_admitting_twice_changes_nothing(run: Path, expert: Path, tmp_path: Path) -> None:
    folder = loosened(run, expert, tmp_path, 100.0)
    admit(Store.at(run), folder)
    before = open_ensemble(Store.at(run))
    assert admit(Store.at(run), folder).already
    assert open_ensemble(Store.at(run)) == before


def test_a_better_expert_takes_the_place_and_the_history_stays(run: Path, expert: Path, tmp_path: Path) -> None:
    folder = loosened(run, expert, tmp_path, 100.0)
    weights = {name: 1.2 * value for name, value in load_file(folder / "model.safetensors").items()}
    worse = resealed(folder, tmp_path / "worse", weights)
    admit(Store.at(run), worse)
    first = open_ensemble(Store.at(run))
    admit(Store.at(run), folder)
    second = open_ensemble(Store.at(run))
    third = resealed(folder, tmp_path / "third", {name: 1.1 * value / 1.2 for name, value in weights.items()})
    assert not admit(Store.at(run), third).member.serving, "a worse one is kept, and does not serve"
    assert admit(Store.at(run), third, replace=True).already
    fourth = resealed(folder, tmp_path / "fourth", {name: 1.11 * value / 1.2 for name, value in weights.items()})
    assert admit(Store.at(run), fourth, replace=True).member.serving, "unless the organizer wants it"
    assert second.predecessor == first.digest()
    assert second.serving[0].digest != first.serving[0].digest
    assert {(m.digest, m.serving) for m in second.experts} == {
        (first.serving[0].digest, False),
        (second.serving[0].digest, True),
    }
    assert (run / first.experts[0].path / "model.safetensors").exists()


def test_a_rewritten_header_makes_no_new_expert(run: Path, expert: Path, tmp_path: Path) -> None:
    """An expert is known by its tensors: the same ones in another file are a copy, whoever sends it first."""
    folder = loosened(run, expert, tmp_path, 100.0)
    member = admit(Store.at(run), folder).member
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    save_file(load_file(folder / "model.safetensors"), copy / "model.safetensors", metadata={"by": "mallory"})
    reseal(copy)
    assert Artifact.open(copy).digest != member.digest
    with pytest.raises(Refused, match=f"is a copy, its weights .* are those of {member.name}"):
        admit(Store.at(run), copy)


def test_an_active_expert_that_is_damaged_keeps_its_place(run: Path, expert: Path, tmp_path: Path) -> None:
    """One flipped bit must not let anything else become active; only --replace does."""
    folder = loosened(run, expert, tmp_path, 100.0)
    weights = load_file(folder / "model.safetensors")
    active = admit(Store.at(run), folder).member
    damaged = run / active.path / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    worse = resealed(folder, tmp_path / "worse", {name: 1.5 * value for name, value in weights.items()})
    with pytest.warns(AtollWarning, match="cannot be read and keeps its place"):
        result = admit(Store.at(run), worse)
    assert not result.member.serving
    assert result.incumbent == active.name
    other = resealed(folder, tmp_path / "other", {name: 1.01 * value for name, value in weights.items()})
    assert admit(Store.at(run), other, replace=True).member.serving


def test_an_expert_that_learned_nothing_is_refused_and_nothing_is_written(
    run: Path, expert: Path, tmp_path: Path
) -> None:
    folder = loosened(run, expert, tmp_path, 0.01)
    process = atoll("admit", folder, "--out", run, check=False)
    assert process.returncode == 2
    assert "refused, its holdout error" in process.stderr
    assert open_ensemble(Store.at(run)).experts == ()
    assert not (run / "contributions").exists()


def test_two_organizers_at_once_lose_nobody(run: Path, expert: Path, tmp_path: Path) -> None:
    """Eight admissions at once, one expert each: all are members, and in the history one after the other."""
    folder = loosened(run, expert, tmp_path, 100.0)
    weights = load_file(folder / "model.safetensors")
    folders = [
        resealed(folder, tmp_path / str(k), {name: (1 + k / 100) * w for name, w in weights.items()}) for k in range(8)
    ]
    with ThreadPoolExecutor(8) as pool:
        admitted = list(pool.map(lambda place: admit(Store.at(run), place).member.digest, folders))
    last = open_ensemble(Store.at(run))
    assert {member.digest for member in last.experts} == set(admitted)
    assert len(last.serving) == 1
    chain = versions_of(run)
    assert [len(version.experts) for version in chain] == list(range(8, -1, -1))


def test_loading_an_expert_gives_the_weights_that_were_written(expert: Path) -> None:
    network = load_expert(expert).network
    for name, value in load_file(expert / "model.safetensors").items():
        assert torch.equal(network.state_dict()[name], value)


def test_an_expert_begun_from_one_of_its_own_may_keep_its_schedule_and_kind(planned: Path, expert: Path) -> None:
    """`atoll convert --final bridge` and `atoll train --init` make such experts, for orders of velocity."""
    order, _ = read_order(planned / "orders" / "01.json")
    order = order.model_copy(update={"objective": Objective(schedule=LinearFlow(), kind=Kind.VELOCITY)})
    own = card_for(order, None, None).model_copy(update={"kind": Kind.EPSILON, "origin": "a checkpoint"})
    before = Artifact.open(expert).manifest
    for schedule, usable in ((CosineVP(), True), (DDPMBetas("linear", steps=5), False)):
        card = own.model_copy(update={"schedule": schedule})
        parents = {"order": order.digest(), "init": "1" * 64}
        manifest = before.model_copy(update={"config": card.model_dump(mode="json"), "parents": parents})
        with nullcontext() if usable else pytest.raises(Refused, match="no network is trained with"):
            check_card(card, manifest, order, None, AdmissionThresholds())


def test_the_gaussian_is_ideal_for_gaussian_data() -> None:
    """For independent normal values no denoiser beats it; its error is the closed form s^2 / (a^2 s^2 + b^2)."""
    numbers = torch.Generator().manual_seed(0)
    x0 = 0.5 + 2.0 * torch.randn(200_000, 1, 1, 1, generator=numbers, dtype=torch.float64)
    eps = torch.randn(x0.shape, generator=numbers, dtype=torch.float64)
    gaussian = GaussianDenoiser.fitted(x0)
    for moment in (0.2, 0.5, 0.9):
        t = torch.full((len(x0),), moment, dtype=torch.float64)
        error = velocity_error(gaussian, x0, eps, t, None).mean().item()
        # Var(x0 | x) = s^2 b^2 / (a^2 s^2 + b^2); v = (x - x0) / b, so the velocity error is that over b^2
        assert error == pytest.approx(4.0 / ((1 - moment) ** 2 * 4.0 + moment**2), rel=0.02)
        spread = noisy(LinearFlow(), x0, eps, t).var().item()
        assert spread == pytest.approx((1 - moment) ** 2 * 4 + moment**2, rel=0.02)


def test_every_band_of_t_has_as_many_draws_and_counts_by_its_width() -> None:
    """The mean of a function of t by bands is its integral over [0.03, 1]; the last band is t = 1 itself."""
    draws = Draws.random(torch.arange(10), 0, "outside", each=64)
    bands = draws.t.view(len(WEIGHTS), 64)
    assert bool(
        (bands >= torch.tensor(EDGES[:-1])[:, None]).all() and (bands <= torch.tensor(EDGES[1:])[:, None]).all()
    )
    assert bool((bands[-1] == 1).all())
    assert float(bands.square().mean(1) @ WEIGHTS) == pytest.approx((1 - 0.03**3) / 3 / 0.97, rel=1e-3)


def test_the_table_of_checks_in_the_docs_is_that_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trust.md").read_text()
    for name, check in CHECKS:
        assert check.__doc__ is not None
        assert f"| {name} | {check.__doc__.splitlines()[0]} |" in page
    for name, value in {**vars(Acceptance()), **vars(AdmissionThresholds())}.items():
        assert f"`{name}` {value:,}" in page or name == "times"
