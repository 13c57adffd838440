"""Checkpoint files to expert folders and back, as a user runs it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from foreign import (
    CLASSES,
    SIDE,
    diffusers_dit,
    diffusers_pixart,
    official_dit,
    official_forward,
    official_pixart,
    save_diffusers,
)
from safetensors.torch import load_file

from atoll.artifacts import Artifact, UserError
from atoll.cli import main
from atoll.convert.expert import Target, convert, own_spaces
from atoll.convert.export import export
from atoll.convert.source import Form, read_source
from atoll.data.space import LatentConfig, TextConfig
from atoll.diffusion import Bridge, Condition, DDPMBetas, Kind, LinearFlow, NetworkDenoiser, Objective
from atoll.diffusion import convert as to_kind
from atoll.islands.expert import load_expert
from atoll.islands.order import Order, ShardRef
from atoll.models.dit import DiTConfig
from atoll.training.config import TrainConfig


def save(folder: Path, form: Form) -> Path:
    """A tiny checkpoint of each form, as its own training code saves it."""
    if form == "diffusers":
        return save_diffusers(diffusers_dit(), folder / "diffusers")
    if form == "pixart":
        torch.save({"state_dict": official_pixart(), "epoch": 3}, folder / "pixart.pth")
        return folder / "pixart.pth"
    state = official_dit()
    names = argparse.Namespace(model="DiT-XL/2", image_size=256)
    torch.save(
        {"model": state, "ema": state, "opt": {"state": {}, "param_groups": []}, "args": names}, folder / "dit.pt"
    )
    return folder / "dit.pt"


def run(folder: Path, form: Form, out: str = "expert", target: Target | None = None):  # type: ignore[no-untyped-def]
    source = read_source(save(folder, form), form, heads=2, license="MIT" if form == "diffusers" else None)
    config = source.network.config if target is None else target.architecture
    encoder = "t5:tiny" if config.condition == "tokens" else None
    latent, text = own_spaces(source, config, autoencoder=None, latent_scale=None, text_encoder=encoder)
    return convert(source, folder / out, latent=latent, text=text, target=target)


@torch.inference_mode()
def test_a_ddpm_network_through_the_bridge_is_itself_at_its_own_steps(tmp_path: Path) -> None:
    """At the flow times of its 1000 steps the bridged expert answers what the original answers there."""
    run(tmp_path, "dit")
    expert = load_expert(tmp_path / "expert")
    betas, flow = DDPMBetas("linear"), LinearFlow()
    steps = torch.tensor([0, 1, 10, 250, 500, 750, 990, 999], dtype=torch.float64)
    s = steps / 999
    t = flow.time_at(betas.log_snr(s))  # the reference time of each step
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(len(s), 4, SIDE, SIDE, generator=generator)  # the state on the expert's own path
    labels = torch.arange(len(s)) % CLASSES
    eps = official_forward(official_dit(), y, steps.float(), labels, heads=2)[:, :4]
    x0 = (y - betas.sigma(s).float().view(-1, 1, 1, 1) * eps) / betas.alpha(s).float().view(-1, 1, 1, 1)

    norm = torch.hypot(flow.alpha(t), flow.sigma(t)).float().view(-1, 1, 1, 1)  # alpha^2 + sigma^2 = 1 for DDPM
    denoiser = NetworkDenoiser(expert.network, expert.card.schedule, expert.card.kind, 999.0)
    answer = Bridge(denoiser, limit=None)(y * norm, t, Condition(labels=labels))
    found_x0, found_eps = (to_kind(answer, kind, flow, y * norm, t).value for kind in (Kind.X0, Kind.EPSILON))
    assert eps.std() > 0.1
    ratio = (betas.sigma(s) / betas.alpha(s)).float().view(-1, 1, 1, 1)
    assert ((found_eps - eps).abs() <= 1e-5).all()
    assert ((found_x0 - x0).abs() <= 1e-5 * (1 + ratio)).all()
    own = denoiser(y, s, Condition(labels=labels)).value
    torch.testing.assert_close(own, eps, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["dit", "sit", "pixart", "diffusers"])
def test_every_form_becomes_an_expert(tmp_path: Path, form: Form) -> None:
    done = run(tmp_path, form)
    expert = load_expert(tmp_path / "expert")
    assert expert.card.architecture.channels_out == 4
    kind = Kind.VELOCITY if form == "sit" else Kind.EPSILON
    assert (expert.card.kind, expert.card.architecture.time_scale) == (kind, 1.0 if form == "sit" else 999.0)
    assert expert.card.latent.scale == pytest.approx((1 / 0.18215,) * 4)
    licenses = {"dit": "CC-BY-NC-4.0", "sit": "MIT", "pixart": "Apache-2.0", "diffusers": "MIT"}
    assert Artifact.open(tmp_path / "expert").manifest.license == licenses[form]
    stored = json.loads((tmp_path / "expert" / "conversion.json").read_bytes())["keys"]
    assert stored == json.loads(json.dumps(done.network.report()))
    keys = [entry["key"] for entry in stored if entry["key"]]
    assert sorted(keys) == sorted(expert.network.state_dict())


def test_equal_work_has_equal_digests_and_is_not_done_twice(tmp_path: Path) -> None:
    first, again = run(tmp_path, "dit"), run(tmp_path, "dit")
    assert first.artifact.digest == again.artifact.digest
    elsewhere = run(tmp_path, "dit", out="other")
    assert elsewhere.artifact.digest == first.artifact.digest
    with pytest.raises(UserError, match="other settings"):
        run(tmp_path, "sit")


def test_a_warm_start_says_what_it_came_from(tmp_path: Path) -> None:
    target = Target(
        architecture=DiTConfig(
            latent=(4, SIDE, SIDE), patch=2, width=32, depth=3, heads=2, condition="tokens", text_width=12,
            text_length=5,
        ),
        schedule=LinearFlow(),
        kind=Kind.VELOCITY,
    )  # fmt: skip
    run(tmp_path, "dit", target=target)
    card = load_expert(tmp_path / "expert").card
    assert card.architecture == target.architecture
    assert (card.schedule, card.kind) == (LinearFlow(), Kind.VELOCITY)
    assert card.origin is not None
    assert "warm start" in card.origin
    assert "non-commercial" in card.origin
    assert card.license == "CC-BY-NC-4.0"


def test_a_bridged_warm_start_keeps_schedule_kind_and_final_layer(tmp_path: Path) -> None:
    config = DiTConfig(
        latent=(4, SIDE, SIDE), patch=2, width=32, depth=3, heads=2, variant="adaln", condition="labels", classes=4
    )
    target = Target(architecture=config, schedule=LinearFlow(), kind=Kind.VELOCITY, final="bridge")
    done = run(tmp_path, "dit", target=target)
    assert (done.card.schedule, done.card.kind) == (DDPMBetas("linear"), Kind.EPSILON)
    how = {key: fate.how for key, fate in done.network.fates.items()}
    assert how["head.project.weight"] == "derived", "the variance half is dropped, the rest is kept"
    assert how["conditioning.time.leave.weight"] == "kept"


@pytest.mark.parametrize("form", ["dit", "pixart", "diffusers"])
def test_export_and_back_is_the_same_expert(tmp_path: Path, form: Form) -> None:
    """Bit for bit, card included: frequency shift, null caption, latent space and history survive."""
    run(tmp_path, form)
    expert = load_expert(tmp_path / "expert")
    export(expert, tmp_path / "exported")
    source = read_source(tmp_path / "exported", "diffusers")
    latent, text = own_spaces(source, source.network.config, autoencoder=None, latent_scale=None, text_encoder=None)
    back = convert(source, tmp_path / "back", latent=latent, text=text)
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("expert", "back"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert back.card == expert.card


@torch.inference_mode()
def test_diffusers_loads_what_we_export(tmp_path: Path) -> None:
    from diffusers import DiTTransformer2DModel, PixArtTransformer2DModel

    x, steps = torch.randn(3, 4, SIDE, SIDE), torch.tensor([3.0, 500.0, 998.0])
    run(tmp_path, "diffusers")
    expert = load_expert(tmp_path / "expert")
    export(expert, tmp_path / "dit")
    theirs = DiTTransformer2DModel.from_pretrained(tmp_path / "dit").eval()
    labels = torch.tensor([0, 4, 9])
    found = theirs(x, timestep=steps, class_labels=labels).sample
    torch.testing.assert_close(found, expert.network(x, steps, Condition(labels=labels)), atol=1e-5, rtol=1e-5)

    run(tmp_path, "pixart", out="text")
    expert = load_expert(tmp_path / "text")
    export(expert, tmp_path / "pixart")
    theirs = PixArtTransformer2DModel.from_pretrained(tmp_path / "pixart").eval()
    tokens = torch.randn(3, 6, 24)
    found = theirs(x, tokens, timestep=steps).sample
    torch.testing.assert_close(found, expert.network(x, steps, Condition(tokens=tokens)), atol=1e-5, rtol=1e-5)
    null = load_file(tmp_path / "pixart" / "null_text.safetensors")["null_text"].expand(3, -1, -1)
    found = theirs(x, null, timestep=steps).sample
    expected = expert.network(x, steps, Condition(tokens=tokens).null())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_diffusers_pixart_without_a_null_caption_says_so(tmp_path: Path) -> None:
    save_diffusers(diffusers_pixart(out_channels=4), tmp_path / "theirs")
    source = read_source(tmp_path / "theirs", "diffusers", license="Apache-2.0")
    latent, text = own_spaces(
        source, source.network.config, autoencoder=None, latent_scale=None, text_encoder="t5:tiny"
    )
    done = convert(source, tmp_path / "expert", latent=latent, text=text)
    fate = done.network.fates["conditioning.null_text"]
    assert fate.how == "re-initialized"
    assert "--null-text" in fate.note


def test_what_diffusers_cannot_hold_is_refused(tmp_path: Path) -> None:
    target = Target(
        architecture=DiTConfig(
            latent=(4, SIDE, SIDE), patch=2, width=32, depth=3, heads=2, condition="labels", classes=CLASSES
        ),
        schedule=LinearFlow(),
        kind=Kind.VELOCITY,
    )
    run(tmp_path, "dit", target=target)
    with pytest.raises(UserError, match="adaln-single with labels; not exportable"):
        export(load_expert(tmp_path / "expert"), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one `atoll` call."""
    try:
        main(list(arguments))
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


READS_TEXT = [
    word
    for setting in ("variant=adaln-single", "condition=tokens", "classes=none", "text_width=16", "text_length=4")
    for word in ("--set", setting)
]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dit = str(save(tmp_path, "dit"))
    code, out, _ = command(capsys, "convert", dit, "--from", "dit", "--heads", "2", "--out", str(tmp_path / "e"))
    assert code == 0
    assert "kept           blocks.*.attention.qkv.weight x3 <- blocks.*.attn.qkv.weight" in out
    assert "non-commercial" in out
    code, out, _ = command(
        capsys, "convert", dit, "--from", "dit", "--heads", "2", "--objective", "linear-flow:velocity",
        *READS_TEXT, "--text-encoder", "t5:tiny", "--out", str(tmp_path / "w"),
    )  # fmt: skip
    assert code == 0
    assert "residual" in out
    assert command(capsys, "export", str(tmp_path / "w"), "--to", "transformer", "--out", str(tmp_path / "x"))[0] == 0
    assert command(capsys, "convert", str(tmp_path / "x"), "--from", "diffusers", "--out", str(tmp_path / "b"))[0] == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("w", "b")]
    assert weights[0] == weights[1]
    for option, value in (("--latent-scale", "0.5"), ("--autoencoder", "pixels"), ("--text-encoder", "t5:tiny")):
        again = ["convert", str(tmp_path / "x"), "--from", "diffusers", "--out", str(tmp_path / "c"), option, value]
        code, _, err = command(capsys, *again)
        assert (code, err) == (2, f"atoll: {option} {value}: the exported expert has its own; leave it out\n")


UNUSED_WITH_AN_ORDER = {
    "--objective": "linear-flow:velocity",
    "--set": "variant=adaln",
    "--autoencoder": "pixels",
    "--latent-scale": "0.5",
    "--text-encoder": "minilm",
}


def test_a_warm_start_for_an_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Architecture, objective, latent and text space come from the order."""
    order = Order(
        name="03",
        cluster=3,
        clusters=8,
        data="0" * 64,
        partition="1" * 64,
        latent=LatentConfig(autoencoder="pixels", shape=(4, SIDE, SIDE), mean=(0.0,) * 4, scale=(1.0,) * 4),
        text=TextConfig(encoder="words", kind="words", length=2, width=None, vocabulary=("a", "cat")),
        shards=(ShardRef(path="x.safetensors", sha256="2" * 64, split="train"),),
        architecture=DiTConfig(
            latent=(4, SIDE, SIDE), patch=2, width=32, depth=3, heads=2, condition="words", vocabulary=2
        ),
        objective=Objective(schedule=LinearFlow(), kind=Kind.VELOCITY),
        training=TrainConfig(images=100, batch=10, learning_rate=1e-3, ema_images=10, seed=0),
    )
    (tmp_path / "03.json").write_bytes(order.to_bytes())
    arguments = [
        "--from",
        "dit",
        "--heads",
        "2",
        "--order",
        str(tmp_path / "03.json"),
        "--out",
        str(tmp_path / "start"),
    ]
    code, _, err = command(capsys, "convert", str(save(tmp_path, "dit")), *arguments)
    assert (code, err) == (0, "")
    card = load_expert(tmp_path / "start").card
    assert (card.architecture, card.latent, card.text) == (order.architecture, order.latent, order.text)
    assert (card.schedule, card.kind) == (order.objective.schedule, order.objective.kind)
    for option, value in UNUSED_WITH_AN_ORDER.items():
        code, _, err = command(capsys, "convert", str(save(tmp_path, "dit")), *arguments, option, value)
        assert (code, err) == (2, f"atoll: {option} {value}: comes from --order; leave it out\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--from", "sdxl"], "'sdxl' is not one of"),
        (["--from", "dit"], "say how many --heads"),
        (["--from", "pixart", "--heads", "2"], "key y_embedder.y_proj.fc1.weight is missing; check --from"),
        (["--from", "dit", "--heads", "2", "--objective", "flow"], "linear-flow:velocity"),
        (["--from", "dit", "--heads", "2", "--latent", "4x9"], "such as 4x32x32"),
        (["--from", "dit", "--heads", "5"], "heads 5 does not divide width 32"),
        (["--from", "diffusers"], "not a folder"),
        (["--from", "dit", "--heads", "2", "--set", "varient=adaln"], "did you mean variant?"),
        (["--from", "dit", "--heads", "2", "--final", "bridge"], "--final bridge: is for a warm start"),
        (["--from", "dit", "--heads", "2", "--keep-labels"], "--keep-labels: is for a warm start"),
        (["--from", "dit", "--heads", "2", "--seed", "0"], "--seed 0: is for a warm start"),
        (["--from", "dit", "--heads", "2", "--text-encoder", "minilm"], "the network reads no text"),
        (["--from", "dit", "--heads", "2", "--null-text", "null.pt"], "is for --from diffusers"),
        (["--from", "diffusers", "--heads", "2"], "is for --from dit, sit or pixart"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    out = tmp_path / "expert"
    code, _, err = command(capsys, "convert", str(save(tmp_path, "dit")), *arguments, "--out", str(out))
    assert code == 2
    assert complaint in err
    assert err.count("\n") == 1
    assert not out.exists()
