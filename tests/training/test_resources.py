"""Which execution a training gets: by the machine, by what was saved, by what the user insists on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from atoll.artifacts import UserError
from atoll.models.accounting import account
from atoll.models.presets import preset
from atoll.training.execution import Execution
from atoll.training.machines import GPUS
from atoll.training.memory import USABLE, fits, plain_execution
from atoll.training.recipe import Training
from atoll.training.resources import Resources, parse_memory

XL = account(preset("xl/2", latent=(4, 32, 32), condition="tokens", text_width=768, text_length=77))
TRAINING = Training(images=12_800, batch=128, learning_rate=1e-4, ema_images=1000, seed=0)
CARD = GPUS["RTX 4090"]


@pytest.mark.parametrize(
    ("text", "gib"), [("24GB", 24), ("24 GiB", 24), ("24", 24), ("12.5g", 12.5), (" 8gb ", 8), ("80Gib", 80)]
)
def test_memory_is_written_in_gigabytes(text: str, gib: float) -> None:
    assert parse_memory(text) == gib


@pytest.mark.parametrize("text", ["", "GB", "24MB", "0", "0GB", "-4GB", "24GB24", "many", "1e9", "nan"])
def test_other_memory_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"--memory .*: write it in gigabytes, such as 24GB"):
        parse_memory(text)


@pytest.mark.parametrize("threads", [1, 2])
def test_on_a_cpu_the_default_is_a_constant(threads: int) -> None:
    """Whatever the machine has: the same order must give the same digest."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        chosen = Resources(device="cpu").choose(XL, TRAINING, 10**12, None)
    finally:
        torch.set_num_threads(before)
    assert chosen.execution == plain_execution(XL, TRAINING.batch, "cpu"), "by the network and its batch alone"


SAVED = Execution(threads=2, micro_batch=16)


def test_what_was_saved_is_kept_unless_something_is_asked() -> None:
    kept = Resources().choose(XL, TRAINING, 0, SAVED)
    assert kept.execution == SAVED
    assert kept.said == "as before"
    changed = Resources(settings={"micro_batch": 8}).choose(XL, TRAINING, 0, SAVED)
    assert changed.execution == SAVED.model_copy(update={"micro_batch": 8})
    # the device is the one it had, said again: nothing else changes
    assert Resources(device="cpu").choose(XL, TRAINING, 0, SAVED).execution == SAVED


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_what_was_saved_on_a_card_goes_on_without_one() -> None:
    saved = Execution(device="cuda", precision="bfloat16", compiling="blocks", moments="8-bit")
    assert Resources().choose(XL, TRAINING, 0, saved).execution == plain_execution(XL, TRAINING.batch, "cpu")


def test_settings_that_are_insisted_on_win() -> None:
    settings = {"precision": "bfloat16", "threads": 2, "recomputed_blocks": 3}
    chosen = Resources(device="cpu", settings=settings).choose(XL, TRAINING, 0, None)
    assert chosen.execution == plain_execution(XL, TRAINING.batch, "cpu").model_copy(update=settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"microbatch": 8}, "microbatch"),
        ({"precision": "float16"}, "precision"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"threads": "many"}, "threads"),
    ],
)
def test_settings_are_validated_and_the_known_ones_listed(settings: dict[str, object], words: str) -> None:
    with pytest.raises(
        UserError, match=rf"--set: {words}.*what can be set is device, precision, micro_batch"
    ) as caught:
        Resources(device="cpu", settings=settings).choose(XL, TRAINING, 0, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("saved", [None, SAVED])
def test_memory_means_a_cards(saved: Execution | None) -> None:
    with pytest.raises(UserError, match="--memory: means a CUDA card's memory, and cpu is none") as caught:
        Resources(device="cpu", memory=24).choose(XL, TRAINING, 0, saved)
    assert "\n" not in str(caught.value)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that says it has a 4090; nothing is computed on it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("atoll.training.resources.placed_on", lambda device: device)
    monkeypatch.setattr("atoll.training.memory.find_spec", lambda name: None)

    def this_gpu(device: torch.device, memory: float | None = None) -> object:
        return CARD if memory is None else type(CARD)(memory, CARD.tflops, CARD.bandwidth)

    monkeypatch.setattr("atoll.training.resources.this_gpu", this_gpu)
    return iter(())


@pytest.mark.usefixtures("card")
class TestOnACard:
    def test_the_best_that_fits_is_chosen_and_said(self) -> None:
        chosen = Resources().choose(XL, TRAINING, 0, None)
        best = fits(XL, CARD, TRAINING.batch, eight_bit=False)[0]
        assert chosen.execution == best.execution
        assert chosen.said == best.sentence(CARD.memory, TRAINING.images)

    def test_memory_limits_it(self) -> None:
        chosen = Resources(memory=16).choose(XL, TRAINING, 0, None)
        found = {fit.execution: fit.memory_gib for fit in fits(XL, CARD, TRAINING.batch, eight_bit=False)}
        assert found[chosen.execution] <= USABLE * 16
        with pytest.raises(UserError, match=r"--memory 4GB: nothing makes 607M weights fit"):
            Resources(memory=4).choose(XL, TRAINING, 0, None)

    def test_what_is_insisted_on_is_kept_and_the_rest_is_chosen_for_it(self) -> None:
        chosen = Resources(settings={"micro_batch": 2, "compiling": "none"}).choose(XL, TRAINING, 0, None)
        assert (chosen.execution.micro_batch, chosen.execution.compiling) == (2, "none")
        assert chosen.said is not None
        assert "micro-batch 2" in chosen.said
        larger = Resources(settings={"micro_batch": 64}).choose(XL, TRAINING, 0, None).execution
        assert larger.recomputed_blocks > 0, "so that it fits all the same"

    def test_what_is_insisted_on_and_does_not_fit_is_refused(self) -> None:
        settings = {"micro_batch": 128, "recomputed_blocks": 0}
        with pytest.raises(UserError, match=r"--set micro_batch=128 --set recomputed_blocks=0: nothing makes 607M"):
            Resources(settings=settings).choose(XL, TRAINING, 0, None)

    def test_a_device_that_is_set_is_the_device(self) -> None:
        chosen = Resources(settings={"device": "cpu"}).choose(XL, TRAINING, 0, None)
        assert chosen.execution == plain_execution(XL, TRAINING.batch, "cpu")

    def test_a_team_shares_the_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        chosen = Resources().choose(XL, TRAINING, 0, None).execution
        assert chosen.micro_batch is not None
        assert TRAINING.batch // 4 % chosen.micro_batch == 0

    def test_a_cpus_execution_is_chosen_anew_when_a_card_is_asked_for(self) -> None:
        assert Resources(device="cuda").choose(XL, TRAINING, 0, SAVED).execution.device == "cuda"
        assert Resources().choose(XL, TRAINING, 0, SAVED).execution == SAVED
