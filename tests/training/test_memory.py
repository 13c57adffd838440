"""Memory and speed as predicted, and the settings that follow from machine, saved run and user."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from atoll.artifacts import UserError
from atoll.models.accounting import account
from atoll.models.presets import preset
from atoll.training.compute import ComputeConfig, opened
from atoll.training.config import TrainConfig
from atoll.training.memory import GPUS, USABLE, Machine, divisors, fits, footprint, host_compute, images_per_s
from atoll.training.resources import Resources, parse_memory

XL = account(preset("xl/2", latent=(4, 32, 32), condition="tokens", text_width=768, text_length=77))
BATCH = 128
PLAIN = ComputeConfig(device="cuda", precision="bfloat16", compile="cuda-graph", micro_batch=BATCH)
SMALLER = {"micro_batch": 32, "moments": "8-bit"}
H200, CARD = GPUS["H200"], GPUS["RTX 4090"]
TRAINING = TrainConfig(images=12_800, batch=BATCH, learning_rate=1e-4, ema_images=1000, seed=0)
SAVED = ComputeConfig(threads=2, micro_batch=16)


@pytest.mark.parametrize(
    ("settings", "gib", "rate"),
    [({}, 53, 515), (SMALLER, 21.7, 460), ({**SMALLER, "checkpointed_blocks": 21}, 14.7, 416)],
    ids=["all", "24 GB", "16 GB"],
)
def test_predictions_agree_with_an_h200(settings: dict[str, object], gib: float, rate: float) -> None:
    """607M weights with text at batch 128, measured (benchmarks, commit 3167457): within 25 %."""
    compute = PLAIN.model_copy(update=settings)
    assert footprint(XL, compute, BATCH) == pytest.approx(gib, rel=0.25)
    assert images_per_s(XL, H200, compute, BATCH) == pytest.approx(rate, rel=0.25)


@pytest.mark.parametrize("change", [{"micro_batch": 4}, {"checkpointed_blocks": 14}, {"moments": "8-bit"}])
def test_each_setting_saves_memory_and_costs_speed(change: dict[str, object]) -> None:
    saving = PLAIN.model_copy(update=change)
    assert footprint(XL, saving, BATCH) < footprint(XL, PLAIN, BATCH)
    assert 0.3 < images_per_s(XL, H200, saving, BATCH) / images_per_s(XL, H200, PLAIN, BATCH) < 1


def test_what_is_chosen_stays_within_the_gpu_and_more_memory_is_never_slower() -> None:
    memories = (8, 10, 12, 16, 24, 48, 80, 139)
    found = [fits(XL, replace(H200, memory=memory), BATCH, eight_bit=True) for memory in memories]
    for memory, fitting in zip(memories, found, strict=True):
        for fit in fitting:
            assert fit.memory_gib == pytest.approx(footprint(XL, fit.compute, BATCH), abs=0.01)
            assert fit.memory_gib <= USABLE * memory
            assert BATCH % (fit.compute.micro_batch or BATCH) == 0
    speeds = [fitting[0].images_per_s if fitting else 0.0 for fitting in found]
    assert speeds[0] == 0
    assert all(later >= sooner for sooner, later in itertools.pairwise(speeds))
    best = found[-1][0].compute
    assert (best.micro_batch, best.checkpointed_blocks, best.moments) == (BATCH, 0, "float32")


def test_xl_trains_on_16_and_24_gib() -> None:
    unlimited = fits(XL, replace(CARD, memory=math.inf), BATCH, eight_bit=True)[0]
    assert fits(XL, CARD, BATCH, eight_bit=True)[0].images_per_s >= 0.8 * unlimited.images_per_s
    assert fits(XL, GPUS["T4"], BATCH, eight_bit=True)[0].compute.precision == "float32"
    assert fits(XL, replace(CARD, memory=16), BATCH, eight_bit=False)[0].compute.moments == "float32"


def test_whether_moments_may_be_8_bit_is_looked_up_only_if_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    card = replace(H200, memory=12)
    for installed in (None, object()):
        monkeypatch.setattr("atoll.training.memory.find_spec", lambda name, installed=installed: installed)
        assert fits(XL, card, BATCH, eight_bit=True)
        assert not fits(XL, card, BATCH, eight_bit=False)
        assert bool(fits(XL, card, BATCH)) == (installed is not None)


def test_what_was_chosen_in_one_line() -> None:
    said = fits(XL, replace(H200, memory=12), BATCH, eight_bit=True)[0].sentence(12, 12_800_000)
    assert "bfloat16" in said
    assert "8-bit moments" in said
    assert "of 12.0 GiB" in said
    assert divisors(12) == [12, 6, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("text", "gib"), [("24GB", 24), ("24 GiB", 24), ("24", 24), ("12.5g", 12.5), (" 8gb ", 8), ("80Gib", 80)]
)
def test_memory_is_written_in_gigabytes(text: str, gib: float) -> None:
    assert parse_memory(text) == gib


@pytest.mark.parametrize("text", ["", "GB", "24MB", "0GB", "-4GB", "24GB24", "1e9", "nan"])
def test_other_memory_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"--memory .*: write it in gigabytes, such as 24GB"):
        parse_memory(text)


@pytest.mark.parametrize("threads", [1, 2])
def test_on_a_cpu_the_default_is_a_constant(threads: int) -> None:
    """Whatever the machine has: the same order must give the same digest. The thread count is left as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        chosen, _ = Resources(device="cpu").choose(XL, TRAINING, None)
        assert chosen == host_compute(XL, TRAINING.batch, "cpu"), "by the network and its batch alone"
        with pytest.raises(ZeroDivisionError), opened(chosen):
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_what_was_saved_is_kept_unless_something_is_asked() -> None:
    assert Resources().choose(XL, TRAINING, SAVED) == (SAVED, "as before")
    changed, _ = Resources(settings={"micro_batch": 8}).choose(XL, TRAINING, SAVED)
    assert changed == SAVED.model_copy(update={"micro_batch": 8})
    # the device is the one it had, given again: nothing else changes
    assert Resources(device="cpu").choose(XL, TRAINING, SAVED)[0] == SAVED


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_what_was_saved_on_a_gpu_resumes_without_one() -> None:
    saved = ComputeConfig(device="cuda", precision="bfloat16", compile="blocks", moments="8-bit")
    assert Resources().choose(XL, TRAINING, saved)[0] == host_compute(XL, TRAINING.batch, "cpu")


def test_settings_win_and_none_is_a_way_to_compile() -> None:
    """The command line reads `none` as nothing at all, elsewhere the absence of a micro-batch."""
    settings = {"precision": "bfloat16", "threads": 2, "checkpointed_blocks": 3}
    chosen, _ = Resources(device="cpu", settings=settings).choose(XL, TRAINING, None)
    assert chosen == host_compute(XL, TRAINING.batch, "cpu").model_copy(update=settings)
    asked = Resources("cpu", settings={"compile": None, "micro_batch": None})
    chosen, _ = asked.choose(XL, TRAINING, ComputeConfig(compile="blocks", micro_batch=8))
    assert (chosen.compile, chosen.micro_batch) == ("none", None)


@pytest.mark.parametrize(
    ("settings", "words"), [({"warp": 8}, "warp"), ({"precision": "float16"}, "precision"), ({"threads": 0}, "threads")]
)
def test_settings_are_validated_and_the_known_ones_listed(settings: dict[str, object], words: str) -> None:
    known = rf"--set: {words}.*what can be set is device, precision, micro_batch"
    with pytest.raises(UserError, match=known) as caught:
        Resources(device="cpu", settings=settings).choose(XL, TRAINING, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("saved", [None, SAVED])
def test_memory_means_a_gpus(saved: ComputeConfig | None) -> None:
    with pytest.raises(UserError, match="--memory: means a CUDA device's memory, and cpu is none"):
        Resources(device="cpu", memory=24).choose(XL, TRAINING, saved)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that seems to have a 4090; nothing is computed on it."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("atoll.training.resources.local_device", lambda device: device)
    monkeypatch.setattr("atoll.training.memory.find_spec", lambda name: None)

    def this_machine(device: str, limit: float | None = None) -> Machine:
        return replace(CARD, memory=min(limit or math.inf, CARD.memory))

    monkeypatch.setattr("atoll.training.resources.this_machine", this_machine)
    return iter(())


@pytest.mark.usefixtures("card")
class TestOnAGpu:
    def test_the_best_that_fits_is_chosen_and_printed(self) -> None:
        best = fits(XL, CARD, TRAINING.batch, eight_bit=False)[0]
        assert Resources().choose(XL, TRAINING, None) == (best.compute, best.sentence(CARD.memory, TRAINING.images))

    def test_memory_limits_it(self) -> None:
        chosen, _ = Resources(memory=16).choose(XL, TRAINING, None)
        assert footprint(XL, chosen, BATCH) <= USABLE * 16
        beside, _ = Resources(taken=8).choose(XL, TRAINING, None)
        assert beside == chosen, "8 of 24 GiB are the teachers'"
        with pytest.raises(UserError, match=r"--memory 4GB: nothing makes 607M weights fit"):
            Resources(memory=4).choose(XL, TRAINING, None)

    def test_settings_are_kept_and_the_rest_is_chosen_for_them(self) -> None:
        chosen, _ = Resources(settings={"micro_batch": 2, "compile": "none"}).choose(XL, TRAINING, None)
        assert (chosen.micro_batch, chosen.compile) == (2, "none")
        larger, _ = Resources(settings={"micro_batch": 64}).choose(XL, TRAINING, None)
        assert larger.checkpointed_blocks > 0, "so that it fits all the same"
        settings = {"micro_batch": 128, "checkpointed_blocks": 0}
        with pytest.raises(UserError, match=r"--set micro_batch=128 --set checkpointed_blocks=0: nothing makes 607M"):
            Resources(settings=settings).choose(XL, TRAINING, None)

    def test_several_processes_share_the_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        chosen, _ = Resources().choose(XL, TRAINING, None)
        assert chosen.micro_batch is not None
        assert TRAINING.batch // 4 % chosen.micro_batch == 0

    def test_another_device_is_chosen_for_anew(self) -> None:
        assert Resources(device="cuda").choose(XL, TRAINING, SAVED)[0].device == "cuda"
        assert Resources(settings={"device": "cpu"}).choose(XL, TRAINING, None)[0].device == "cpu"
