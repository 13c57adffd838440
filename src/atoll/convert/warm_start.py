"""Start an expert from a trained network of another objective, modulation or condition.

The trunk is kept. What cannot be kept is fitted so that the new network, called without a condition, starts as
close as it can to the old one called without a condition at the time of *equal signal-to-noise ratio*:

  time embedder   its last layer is fitted (ridge regression over t) to the old embedder at the matched time, with
                  the old null condition folded in
  adaln -> single the shared map gives the mean of the blocks' modulations; each block's table is the mean over t of
                  what is left; the spread around it is the residual
  single -> adaln every block gets the shared map, its table added to the bias: exact
  head            its modulation in the same way; its projection is kept where schedule and kind stay, else
                  zero: no final layer turns epsilon into a velocity, which needs the state itself

A single head adds the conditioning vector itself to its shift and scale, which a classic head never had to bear: kept
as it is, the vector would drown them. Where no label or word keeps its meaning the vector is therefore free, and is
chosen to be what the old head wanted; the shared map is fitted to it.

Residuals are relative root mean squares over t: 0 is exact.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.dit import DiT, DiTConfig
from ..process import AnySchedule, Kind, Schedule
from .report import Report
from .time_conversion import ImportedNetwork, null_conditioning, null_vector, time_features

FIT_TIMES = 2048
RIDGE = 1e-6  # of the mean squared feature: too little to bend a fit that starts from the old weights
FIRM_RIDGE = 1e-3  # for maps that start from nothing: keeps their weights of ordinary size


def warm_start(
    old: ImportedNetwork,
    config: DiTConfig,
    schedule: AnySchedule,
    kind: Kind,
    *,
    generator: torch.Generator,
    keep_labels: bool = False,
    fit_time: bool = True,
) -> tuple[ImportedNetwork, Report]:
    """Weights for a network of `config` to be trained for (schedule, kind), made from `old`, and the report.

    `keep_labels` says that labels and words mean the same in the new data; else each starts as the null one.
    Without `fit_time` the embedder is asked at the new time itself, whatever noise level that now means [HDDM].
    """
    check_trunk(old.config, config)
    fresh = {name: value.detach() for name, value in DiT(config, generator).state_dict().items()}
    report = Report()
    new = _Draft(old, config, fresh, report, keep_labels)
    new.keep_trunk()
    new.carry_condition()
    times = (torch.arange(FIT_TIMES, dtype=torch.float64) + 0.5) / FIT_TIMES
    matched = matched_time(schedule, old.schedule, times)
    if not fit_time:
        matched = times * (config.time_scale / old.config.time_scale)
    new.carry_time(times, matched)
    new.carry_modulation(times, matched)
    new.carry_projection(same_process=(schedule, kind) == (old.schedule, old.kind))
    for key in old.weights:
        if key not in new.used:
            folded = key in ("conditioning.labels.weight", "conditioning.words.weight")
            note = "its null row lives on in the time embedder" if folded else "no place in the new network"
            report.add(None, old.source(key), "dropped", note)
    assert new.weights.keys() == fresh.keys(), "every weight of the new network must be accounted for"
    return replace(old, config=config, weights=new.weights, schedule=schedule, kind=kind), report


def matched_time(new: Schedule, old: Schedule, t: Tensor) -> Tensor:
    """The old schedule's time at which the signal-to-noise ratio is that of the new schedule at t."""
    return old.time_at(new.log_snr(t))


def check_trunk(old: DiTConfig, new: DiTConfig) -> None:
    """The blocks must be the same function; ValueError names the first setting that is not."""
    for name in ("width", "depth", "heads", "mlp_width", "activation", "qk_norm", "mlp_norm_eps", "frequency_shift"):
        if getattr(old, name) != getattr(new, name):
            raise ValueError(
                f"{name} is {getattr(old, name)} in the source and {getattr(new, name)} in the new network; "
                "a warm start keeps the trunk, so make them equal"
            )


class _Draft:
    """The new network's weights being gathered, each with its line in the report."""

    def __init__(
        self, old: ImportedNetwork, config: DiTConfig, fresh: dict[str, Tensor], report: Report, keep_labels: bool
    ) -> None:
        self.old, self.config, self.fresh, self.report = old, config, fresh, report
        table = f"conditioning.{config.condition}.weight"
        self.labels_kept = (
            keep_labels and table in old.weights and table in fresh and old.weights[table].shape == fresh[table].shape
        )
        self.weights: dict[str, Tensor] = {}
        self.used: set[str] = set()

    def keep(self, key: str, note: str = "") -> None:
        self.weights[key] = self.old.weights[key].clone()
        self.used.add(key)
        self.report.add(key, self.old.source(key), "kept", note)

    def renew(self, key: str, note: str) -> None:
        self.weights[key] = self.fresh[key].clone()
        self.report.add(key, (), "re-initialised", note)

    def set(self, key: str, value: Tensor, sources: list[str], note: str, residual: float | None) -> None:
        """A tensor made from old ones: fitted where there is a residual, else derived."""
        self.weights[key] = value.float().reshape(self.fresh[key].shape).contiguous()
        self.used.update(sources)
        names = tuple(name for key in sources for name in self.old.source(key))
        self.report.add(key, names, "derived" if residual is None else "fitted", note, residual)

    def keep_trunk(self) -> None:
        """Attention and MLP of every block, patches and positions."""
        same_patches = (self.old.config.latent[0], self.old.config.patch) == (self.config.latent[0], self.config.patch)
        for key in self.fresh:
            if ".attention." in key or ".mlp." in key:
                self.keep(key)
            elif ".cross." in key:
                self.keep_or_renew(key, "the source has no cross-attention", key in self.old.weights)
            elif key.startswith("patches.project"):
                self.keep_or_renew(key, "other latent channels or patch", same_patches)
            elif key == "patches.positions":
                same_grid = key in self.old.weights and self.old.config.grid == self.config.grid
                self.keep_or_renew(key, "starts from the sin-cos table", same_grid)

    def keep_or_renew(self, key: str, reason: str, keep: bool) -> None:
        self.keep(key) if keep else self.renew(key, reason)

    def carry_condition(self) -> None:
        """Label, word and text tables: kept where they mean the same, else fresh."""
        old, new = self.old.config, self.config
        for key in [k for k in self.fresh if k.startswith(("conditioning.labels", "conditioning.words"))]:
            if self.labels_kept:
                self.keep(key)
            elif key in self.old.weights:  # other labels: all of them start as the null label
                null = self.old.weights[key][-1:]
                self.set(key, null.expand_as(self.fresh[key]), [key], "every row starts as the null row", None)
            else:
                self.renew(key, f"the source does not read {new.condition}")
        for key in [k for k in self.fresh if k.startswith(("conditioning.text", "conditioning.null_text"))]:
            same = old.condition == new.condition and self.old.weights[key].shape == self.fresh[key].shape
            self.keep_or_renew(key, f"the source does not read this {new.condition} text", same)

    def carry_time(self, times: Tensor, matched: Tensor) -> None:
        """Time embedder: `null_conditioning(new, t)` shall equal `null_conditioning(old, matched t)`."""
        for part in ("weight", "bias"):
            self.keep(f"conditioning.time.enter.{part}")
        weight, bias = "conditioning.time.leave.weight", "conditioning.time.leave.bias"
        for key in (weight, bias):
            self.weights[key] = self.old.weights[key].clone()
        # the null condition of the old network moves into the bias, that of the new one is taken out of it
        moved = null_vector(self.old.config, self.old.weights) - null_vector(self.config, self.weights)
        self.weights[bias] = (self.weights[bias].double() + moved).float()
        same_time = torch.allclose(times * self.config.time_scale, matched * self.old.config.time_scale)
        if same_time and not self.vector_is_free:
            self.used.add(weight)
            self.report.add(weight, self.old.source(weight), "kept")
            if bool(moved.any()):
                self.set(bias, self.weights[bias], [bias], "the null condition folded in", None)
            else:
                self.used.add(bias)
                self.report.add(bias, self.old.source(bias), "kept")
            return
        wanted = self.wanted_vector(matched)
        change = wanted - null_conditioning(self.config, self.weights, times)
        strength = FIRM_RIDGE if self.vector_is_free else RIDGE
        d_weight, d_bias = ridge(time_features(self.config, self.weights, times), change, strength)
        fitted_weight, fitted_bias = self.weights[weight].double() + d_weight, self.weights[bias].double() + d_bias
        self.weights |= {weight: fitted_weight.float(), bias: fitted_bias.float()}
        left = relative(null_conditioning(self.config, self.weights, times), wanted)
        note = "fitted to the old head" if self.vector_is_free else "fitted to the old embedder"
        note += "" if same_time else " at the time of equal signal-to-noise"
        self.set(weight, fitted_weight, [weight], note, left)
        self.set(bias, fitted_bias, [bias], note, left)

    @property
    def vector_is_free(self) -> bool:
        """The conditioning vector may be any curve of t: a single head is new, and no label or word is kept."""
        variants = (self.old.config.variant, self.config.variant)
        return variants == ("adaln", "adaln-single") and not self.labels_kept

    def wanted_vector(self, matched: Tensor) -> Tensor:
        """What the new conditioning vector shall be at the fit times: float64 [T, D]."""
        vector = null_conditioning(self.old.config, self.old.weights, matched)
        if not self.vector_is_free:
            return vector
        shift, scale = self._modulated("head.modulation", vector).chunk(2, dim=1)
        both = (shift + scale) / 2.0  # one vector serves both, so their mean is the least-squares choice
        return vector.mean(0) + both - both.mean(0)

    def carry_modulation(self, times: Tensor, matched: Tensor) -> None:
        old, variants = self.old, (self.old.config.variant, self.config.variant)
        if variants[0] == variants[1]:
            for key in self.fresh:
                if "modulation" in key or key.endswith(".table"):
                    self.keep(key)
            return
        old_vector = null_conditioning(old.config, old.weights, matched)  # [T, D]
        new_vector = null_conditioning(self.config, self.weights, times)
        if variants == ("adaln", "adaln-single"):
            self._to_single(old_vector, new_vector)
        else:
            self._to_classic(old_vector, new_vector)

    def _to_single(self, old_vector: Tensor, new_vector: Tensor) -> None:
        blocks = [f"blocks.{i}.modulation" for i in range(self.config.depth)]
        wanted = [self._modulated(block, old_vector) for block in blocks]  # each [T, 6 D]
        mean = torch.stack(wanted).mean(0)
        if self.vector_is_free:
            weight, bias = ridge(F.silu(new_vector), mean, FIRM_RIDGE)
        else:
            weight, bias = (torch.stack([self._old(b, part) for b in blocks]).mean(0) for part in ("weight", "bias"))
        everywhere = F.silu(new_vector) @ weight.T + bias
        left = relative(everywhere, mean) if self.vector_is_free else None
        for part, value in (("weight", weight), ("bias", bias)):
            sources = [f"{block}.{part}" for block in blocks]
            self.set(f"conditioning.modulation.{part}", value, sources, "mean over the blocks", left)
        for i, block in enumerate(blocks):
            table = (wanted[i] - everywhere).mean(0)
            sources, note = [f"{block}.weight", f"{block}.bias"], "mean over t of what the shared map leaves"
            self.set(f"blocks.{i}.table", table, sources, note, relative(everywhere + table, wanted[i]))

        head = self._modulated("head.modulation", old_vector)  # [T, 2 D]
        twice = new_vector.repeat(1, 2)  # the single head adds the conditioning vector itself
        table = (head - twice).mean(0)
        sources = ["head.modulation.weight", "head.modulation.bias"]
        self.set("head.table", table, sources, "mean over t", relative(twice + table, head))

    def _to_classic(self, old_vector: Tensor, new_vector: Tensor) -> None:
        shared = "conditioning.modulation"
        for i in range(self.config.depth):
            bias = self._old(shared, "bias") + self.old.weights[f"blocks.{i}.table"].double().flatten()
            name, note = f"blocks.{i}.modulation", "the shared map, with the block's table in the bias"
            self.set(f"{name}.weight", self._old(shared, "weight"), [f"{shared}.weight"], note, None)
            self.set(f"{name}.bias", bias, [f"{shared}.bias", f"blocks.{i}.table"], note, None)

        wanted = old_vector.repeat(1, 2) + self.old.weights["head.table"].double().flatten()
        weight, bias = ridge(F.silu(new_vector), wanted, FIRM_RIDGE)
        left = relative(F.silu(new_vector) @ weight.T + bias, wanted)
        self.set("head.modulation.weight", weight, ["head.table"], "fitted over t", left)
        self.set("head.modulation.bias", bias, ["head.table"], "fitted over t", left)

    def carry_projection(self, *, same_process: bool) -> None:
        for part in ("weight", "bias"):
            key = f"head.project.{part}"
            same_shape = self.old.weights[key].shape == self.fresh[key].shape
            reason = "another schedule or kind" if not same_process else "another patch or number of channels"
            self.keep_or_renew(key, reason, same_process and same_shape)

    def _old(self, layer: str, part: str) -> Tensor:
        return self.old.weights[f"{layer}.{part}"].double()

    def _modulated(self, layer: str, vector: Tensor) -> Tensor:
        """What a modulation of the old network gives for conditioning vectors [T, D]."""
        return F.silu(vector) @ self._old(layer, "weight").T + self._old(layer, "bias")


def ridge(features: Tensor, wanted: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Weight [O, D] and bias [O] of the linear map features [T, D] -> wanted [T, O] with the least squared error."""
    mean, middle = features.mean(0), wanted.mean(0)
    centred = features - mean
    gram = centred.T @ centred
    gram.diagonal().add_(strength * gram.diagonal().mean().clamp(min=1e-12))
    weight = torch.linalg.solve(gram, centred.T @ (wanted - middle)).T
    return weight, middle - weight @ mean


def relative(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of what was wanted."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))
