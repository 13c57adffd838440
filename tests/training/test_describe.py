"""`atoll describe`: what an architecture costs, by the model that `atoll train` chooses with."""

from __future__ import annotations

import json
import shlex

import pytest

from atoll.cli import main
from atoll.cli.progress import console
from atoll.models.accounting import account
from atoll.models.presets import preset
from atoll.training.memory import GPUS, USABLE, fits

XL = account(preset("xl/2", latent=(4, 32, 32), condition="tokens", text_width=768, text_length=77))


def described(capsys: pytest.CaptureFixture[str], options: str) -> str:
    main(["describe", "xl/2", "--text", "768", *shlex.split(options)])
    return capsys.readouterr().out


def test_json_holds_what_train_would_choose(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(described(capsys, "--latent 4x32x32 --json"))
    assert 605e6 <= found["cost"]["parameters"] <= 608e6
    assert found["flops_per_image"]["training"] == 3 * found["flops_per_image"]["forward"]
    assert [row["gpu"] for row in found["training"]] == list(GPUS)
    for row in found["training"]:
        found_here = fits(XL, GPUS[row["gpu"]], 128, eight_bit=True)
        if not found_here:
            assert row["chosen"] is None
            continue
        best = found_here[0]
        assert row["chosen"]["memory_gib"] == best.memory_gib <= USABLE * row["machine"]["memory"]
        assert row["chosen"]["images_per_s"] == best.images_per_s <= row["unlimited"]["images_per_s"]
        assert row["chosen"]["compute"]["micro_batch"] == best.compute.micro_batch


def test_options_give_the_gpu_how_much_of_it_and_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--gpu 'RTX 4090' --memory 16GB --batch 96 --no-eight-bit --json"
    (row,) = json.loads(described(capsys, options))["training"]
    assert (row["gpu"], row["machine"]["memory"]) == ("RTX 4090", 16)
    assert row["chosen"]["memory_gib"] <= USABLE * 16
    assert 96 % row["chosen"]["compute"]["micro_batch"] == 0
    assert row["chosen"]["compute"]["moments"] == row["least"]["compute"]["moments"] == "float32"
    rows = json.loads(described(capsys, "--memory 48GB --json"))["training"]
    assert [row["gpu"] for row in rows] == [name for name, machine in GPUS.items() if machine.memory >= 48]
    (row,) = json.loads(described(capsys, "--gpu T4 --memory 4 --json"))["training"]
    assert row["chosen"] is None
    assert row["least"]["memory_gib"] > USABLE * 4


@pytest.mark.parametrize("options", ["", "--memory 7GB", "--gpu 'RTX 4090'", "--gpu T4 --memory 4GB", "--batch 4096"])
def test_tables_fit_a_terminal(
    options: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_width", 80)
    told = described(capsys, options)
    assert max(map(len, told.splitlines())) <= 80
    assert "…" not in told
    assert "607,062,928" in told


def test_tables_show_what_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    best = fits(XL, GPUS["RTX 4090"], 128, eight_bit=True)[0]
    for options in ("", "--gpu 'RTX 4090'"):
        shown = described(capsys, options).splitlines()
        (row,) = [line.split() for line in shown if line.startswith("RTX 4090")]
        assert row[2:5] == ["24", f"{best.memory_gib:.1f}", str(best.compute.micro_batch)]
    assert "> " in described(capsys, "--memory 4GB")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("xl/3", "such as xl/2"),
        ("xl/2 --latent 4x31x32", "xl/2: "),
        ("xl/2 --gpu 'RTX 9999'", "--gpu: machine 'RTX 9999' is not known"),
        ("xl/2 --set widht=3", "--set widht: no such setting; did you mean width?"),
        ("xl/2 --memory lots", "--memory lots: write it in gigabytes"),
        ("xl/2 --memory 500GB", "--memory 500GB: no known GPU has so much"),
        ("xl/2 --batch 0", "--batch"),
    ],
)
def test_mistakes_are_one_line(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["describe", *shlex.split(options)])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line
