"""The gallery of hostile contributions: each is refused for its own reason, in one line, and changes nothing."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from atoll.artifacts import Artifact, Store, UserError
from atoll.diffusion import Condition, Denoiser, Kind, LinearFlow, Prediction
from atoll.exchange import admission
from atoll.exchange.admission import admit
from atoll.exchange.checks import (
    CHECKS,
    Candidate,
    Measurement,
    check_bands,
    check_holdout_error,
    check_neighbors,
    check_outside,
    ratio,
    run_checks,
)
from atoll.exchange.holdout import BRANCHES
from atoll.exchange.inbox import inbox_of
from atoll.exchange.quarantine import Refused, read_manifest
from atoll.islands.expert import load_expert
from atoll.islands.order import read_order
from atoll.registry.versions import open_ensemble
from exchange.gallery import HOSTILE, ORDER, build, fresh, noisy, reseal, weights
from runs import atoll, made_once

# a fifth of those that are refused before anything is measured, which says little of experts as small as these
MEASURED = ("holdout error", "refused", "without it")
HANDFUL = sorted(name for name, attack in HOSTILE.items() if attack.reason not in MEASURED)[::5]
REMEMBERED = next(name for name, attack in HOSTILE.items() if attack.reason == ORDER and name not in HANDFUL)
SECONDS = 60  # that any judgement may take here
WAITING = r"checking and measuring: \d+ s"  # what a slow machine says meanwhile
PLACES_OF_TEXT = ("reasons.json", "judgement.json")


@pytest.fixture(scope="module")
def run(tiny_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gallery") / "run"
    return Path(shutil.copytree(tiny_demo, place, ignore=shutil.ignore_patterns("samples")))


@pytest.fixture(scope="module")
def honest(run: Path) -> Path:
    return fresh(run / "islands" / "01" / "expert", run.parent / "honest")


def refusal(run: Path, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        admit(Store.at(run), folder)
    return str(caught.value)


@pytest.mark.parametrize("name", HANDFUL)
def test_a_handful_is_refused_for_its_own_reason(name: str, run: Path, honest: Path, tmp_path: Path) -> None:
    before = open_ensemble(Store.at(run)).digest()
    said = refusal(run, build(name, honest, tmp_path))
    assert re.search(HOSTILE[name].reason, said), said
    assert said.isprintable(), "nothing that moves a cursor or ends a line"
    assert open_ensemble(Store.at(run)).digest() == before
    for path in (run / "quarantine").rglob("*.json"):
        if path.name in PLACES_OF_TEXT:
            assert "\x1b" not in json.loads(path.read_text()).get("reason", "")


def test_a_refusal_is_remembered_unless_its_files_were_others(run: Path, honest: Path, tmp_path: Path) -> None:
    """A replay is refused at once; but nobody can spoil another's contribution by sending its manifest first."""
    folder = build(REMEMBERED, honest, tmp_path)
    assert "was refused before" not in refusal(run, folder)
    assert "was refused before" in refusal(run, folder)
    with pytest.raises(Refused, match="is not its order's"):
        admit(Store.at(run), folder, recheck=True)
    (tmp_path / "b").mkdir()
    broken = build("weights are missing", honest, tmp_path / "b")
    assert "missing" in refusal(run, broken)
    assert "missing" in refusal(run, broken), "not held against whoever brings the whole one"


def test_a_copy_of_an_admitted_expert_is_known(run: Path, tmp_path: Path) -> None:
    """The very weights with other metrics: another digest, and somebody else's work."""
    member = next(m for m in open_ensemble(Store.at(run)).serving if m.cluster == 1)
    shutil.copytree(run / member.path, tmp_path / "copy")
    (tmp_path / "copy" / "metrics.jsonl").write_text('{"images": 64, "loss": 1.0}\n')
    reseal(tmp_path / "copy")
    assert f"those of {member.name}" in refusal(run, tmp_path / "copy")


def test_an_inbox_is_taken_whole_and_one_refusal_stops_nobody(run: Path, honest: Path, tmp_path: Path) -> None:
    """Three folders, one of them bad, and a link that is not followed: exit code 2, and the others are in."""
    mine = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("quarantine"))
    inbox = mine / "inbox"
    bad = build("cluster -7", honest, tmp_path)
    shutil.copytree(bad, inbox / "mallory" / "01")
    shutil.copytree(honest, inbox / "alice" / "01")
    (inbox / "eve").mkdir()
    (inbox / "eve" / "link").symlink_to(honest)
    (inbox / "eve" / "half").mkdir()  # no manifest yet
    came = [place.url.removeprefix(f"{inbox}/") for place in inbox_of(inbox)]
    assert came == ["alice/01", "mallory/01"]
    process = atoll("admit", "--inbox", mine / "inbox", "--unsigned-ok", "--out", mine, check=False)
    assert process.returncode == 2
    assert "admitted: cluster 1" in process.stdout or "admitted, but" in process.stdout
    assert "1 of 2 were not admitted" in process.stderr
    (reasons,) = (mine / "quarantine").rglob("reasons.json")
    assert "cluster" in json.loads(reasons.read_text())["reason"]


def test_what_changes_after_it_was_copied_changes_nothing(run: Path, honest: Path, tmp_path: Path) -> None:
    """Checked and used is the copy: the original is spoilt while it is judged, and what comes in is what was read."""
    mine = shutil.copytree(run, tmp_path / "run")
    folder = fresh(honest, tmp_path / "mine", 1e-3)
    digest = Artifact.open(folder).digest

    def spoil(candidate: Candidate) -> None:
        (folder / "model.safetensors").write_bytes(b"something else")

    files = [name for name, _ in CHECKS].index("files")
    spoilt = (*CHECKS[: files + 1], ("spoil", spoil), *CHECKS[files + 1 :])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "run_checks", lambda candidate: run_checks(candidate, spoilt))
        member = admit(Store.at(mine), folder).member
    admitted = Artifact.open(mine / member.path)
    assert admitted.digest == digest
    assert load_expert(mine / member.path).digest == digest, "every digest holds"


class Spoilt:
    """An expert that answers garbage on a part of the questions."""

    schedule, kind = LinearFlow(), Kind.VELOCITY

    def __init__(self, honest: Denoiser, *, above: float = 2.0, below: float = -1.0, dropped: bool = False) -> None:
        self.honest, self.above, self.below, self.dropped = honest, above, below, dropped

    def __call__(self, x: torch.Tensor, t: torch.Tensor, condition: Condition | None) -> Prediction:
        value = self.honest(x, t, condition).value.clone()
        wrong = (t > self.above) | (t < self.below)
        if self.dropped and condition is not None and condition.dropped is not None:
            wrong = wrong | condition.dropped
        value[wrong] = 8.0
        return Prediction(Kind.VELOCITY, value)


class Velocity:
    """The Gaussian as a velocity: it passes every check of errors with room."""

    schedule, kind = LinearFlow(), Kind.VELOCITY

    def __init__(self, gaussian: Denoiser) -> None:
        self.gaussian = gaussian

    def __call__(self, x: torch.Tensor, t: torch.Tensor, condition: Condition | None) -> Prediction:
        x0 = self.gaussian(x, t, condition).value
        return Prediction(Kind.VELOCITY, (x - x0) / t.to(x.dtype).view(-1, 1, 1, 1))


def candidate_of(run: Path, cluster: int, ratio: float = 1.5) -> Candidate:
    """The active expert of a cluster as a candidate, its order with this limit."""
    store, version = Store.at(run), open_ensemble(Store.at(run))
    order, _ = read_order(run / "orders" / f"{cluster:02d}.json")
    acceptance = order.acceptance.model_copy(update={"max_ratio_to_gaussian": ratio})
    source = store.child(next(m.path for m in version.serving if m.cluster == cluster))
    return Candidate(store, version, order.model_copy(update={"acceptance": acceptance}), read_manifest(source), source)


def beyond(candidate: Candidate, *checks: Callable[[Candidate], Iterable[Measurement]]) -> list[str]:
    return [found.name for check in checks for found in check(candidate) if not found.used <= 1]


@pytest.mark.parametrize(
    ("spoilt", "first"),
    [
        ({"above": 0.98}, "error for t from 0.975 to 1 with the condition"),
        ({"above": 0.999}, "error for t from 1 to 1 with the condition"),
        ({"below": 0.02}, None),  # a velocity of 8 there moves x0 by 0.16 at most
        ({"dropped": True}, "holdout error without it, by a Gaussian's,"),
    ],
)
def test_garbage_in_a_band_of_time_or_without_the_condition_is_found(
    spoilt: dict[str, float], first: str | None, run: Path
) -> None:
    """The Gaussian's prediction elsewhere keeps the mean as it was."""
    candidate = candidate_of(run, 1)
    velocity = Velocity(candidate.holdout.gaussian(1))
    candidate.bridge = velocity
    assert beyond(candidate, check_holdout_error, check_bands, check_outside) == []
    candidate = candidate_of(run, 1)
    candidate.bridge = Spoilt(velocity, **spoilt)  # type: ignore[arg-type]
    found = beyond(candidate, check_holdout_error, check_bands)
    assert found == [] if first is None else first in found


# ---- the whole of it, against a run whose experts have learned something ----


def make_real_demo(place: Path) -> None:
    atoll("demo", "--out", place)


@pytest.fixture(scope="module")
def trained(session_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real demo, about two minutes."""
    made = made_once(session_folder, "real-demo", make_real_demo)
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("trained") / "run"))


def judged_apart(arguments: list[str], folder: Path) -> tuple[int, str, float]:
    """The verb in a process of its own: exit code, what it said, and the most memory it had, in MiB."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["atoll.cli.admit", "atoll.exchange.admission"])
    process = context.Process(target=verb, args=(arguments, str(folder)))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"it hangs: {arguments}")
    result = json.loads((folder / "result.json").read_text())
    return result["code"], (folder / "said.txt").read_text(errors="backslashreplace"), result["memory"]


def verb(arguments: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    with open(f"{folder}/said.txt", "wb", buffering=0) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    from atoll.cli import main

    code = 0
    try:
        main(arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        Path(folder, "result.json").write_text(json.dumps({"code": code, "memory": memory}))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_gallery_is_refused_and_the_model_is_what_it_was(trained: Path, tmp_path: Path) -> None:
    assert len(HOSTILE) >= 80
    evaluation = ["evaluate", trained, "-n", "60", "--steps", "8", "--route", "top-2", "--guidance", "2"]
    atoll(*evaluation, "--out", tmp_path / "before")
    model = open_ensemble(Store.at(trained)).model_digest()
    honest = fresh(trained / "islands" / "01" / "expert", tmp_path / "honest")
    wrong, most = [], 0.0
    for number, (name, attack) in enumerate(HOSTILE.items()):
        place = tmp_path / str(number)
        place.mkdir()
        folder = build(name, honest, place)
        code, said, memory = judged_apart(["admit", str(folder), "--out", str(trained)], place)
        most = max(most, memory)
        lines = [line for line in said.strip("\n").split("\n") if not re.fullmatch(WAITING, line)]
        if code != 2 or len(lines) != 1 or not lines[0].isprintable() or not re.search(attack.reason, said):
            wrong.append(f"{name}: exit {code}, {said[-400:]!r}")
        shutil.rmtree(place)
    assert not wrong, "\n".join(wrong)
    assert open_ensemble(Store.at(trained)).model_digest() == model
    code, said, usual = judged_apart(["admit", str(honest), "--out", str(trained)], tmp_path)
    assert code == 0, said
    assert most <= 2 * usual, f"{most:.0f} MiB, an honest one {usual:.0f}"
    assert open_ensemble(Store.at(trained)).model_digest() == model, "the same expert a little otherwise does not serve"
    atoll(*evaluation, "--out", tmp_path / "after")
    before, after = ((tmp_path / name / "evaluation.json").read_bytes() for name in ("before", "after"))
    assert before == after


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_honest_experts_come_in_also_noisy_small_and_started_from_another(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    noisy_one = fresh(run / "islands" / "02" / "expert", tmp_path / "noisy", 0.03)
    assert not admit(Store.at(run), noisy_one).member.serving, "kept, and does not take the place of a better one"
    atoll("plan", run, "--reissue", "4", "--images", "6400")
    atoll("train", run / "orders-2" / "04.json", "--out", tmp_path / "started", "--device", "cpu")
    assert "admitted" in atoll("admit", tmp_path / "started", "--out", run).stdout
    small = ["--from-scratch", "--set", "architecture.depth=2", "--set", "architecture.width=32"]
    atoll("plan", run, "--reissue", "3", *small)
    atoll("train", run / "orders-3" / "03.json", "--out", tmp_path / "small", "--device", "cpu")
    assert "admitted" in atoll("admit", tmp_path / "small", "--out", run).stdout


def under_anothers_order(run: Path, cluster: int, other: int, share: float, place: Path) -> Path:
    """The expert of one cluster under the order of another, its weights disturbed so that it is no copy."""
    shutil.copytree(run / "islands" / f"{cluster:02d}" / "expert", place)
    shutil.copyfile(run / "islands" / f"{other:02d}" / "expert" / "model.safetensors", place / "model.safetensors")
    weights(noisy(share))(place, place)
    reseal(place)
    return place


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", [1e-4, 0.01, 0.05])
def test_another_clusters_expert_is_known_as_such(share: float, trained: Path, tmp_path: Path) -> None:
    """Every expert under every other's order: none of 56 serves, and nearly all are refused outright.

    Also where nobody serves the cluster yet, and so nobody is better: those few that pass there are as good in that
    cluster as an expert of it may be.
    """
    run = shutil.copytree(trained, tmp_path / "run")
    store = Store.at(run)
    serving = {m.cluster: m.digest for m in open_ensemble(store).serving}
    refused, alone = 0, []
    for cluster, other in itertools.permutations(range(8), 2):
        place = under_anothers_order(run, cluster, other, share, tmp_path / f"{cluster}-{other}")
        try:
            assert not admit(store, place).member.serving
        except Refused:
            refused += 1
        candidate = candidate_of(run, cluster)
        version = open_ensemble(store)
        candidate.version = version.model_copy(
            update={"experts": tuple(m for m in version.experts if m.cluster != cluster)}
        )
        candidate.expert = load_expert(place)
        if not beyond(candidate, check_holdout_error, check_bands, check_outside, check_neighbors):
            alone.append((cluster, other, ratio(candidate.scores[BRANCHES[0]], candidate.unit[BRANCHES[0]])))
    assert {m.cluster: m.digest for m in open_ensemble(store).serving} == serving
    assert refused >= 50
    assert len(alone) <= 6, alone
    assert all(error <= 1.5 for *_, error in alone)
