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

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..diffusion import AnySchedule, Kind, Schedule
from ..models.dit import DiT, DiTConfig
from .imported import Fate, ImportedNetwork
from .time_conversion import HEAD, null_conditioning, null_vector, time_features

FIT_TIMES = 2048
RIDGE = 1e-6  # of the mean squared feature: too little to bend a fit that starts from the old weights
FIRM_RIDGE = 1e-3  # for maps that start from nothing: keeps their weights of ordinary size
SAME_TRUNK = ("width", "depth", "heads", "mlp_width", "activation", "qk_norm", "mlp_norm_eps", "frequency_shift")


def warm_start(
    old: ImportedNetwork,
    config: DiTConfig,
    schedule: AnySchedule,
    kind: Kind,
    *,
    generator: torch.Generator,
    keep_labels: bool = False,
    fit_time: bool = True,
) -> ImportedNetwork:
    """A network of `config` to be trained for (schedule, kind), made from `old`. Another trunk is a ValueError.

    `keep_labels`: labels and words mean the same in the new data; else each starts as the null one.
    Without `fit_time` the embedder is evaluated at the new time itself, whatever noise level that now means [HDDM].
    """
    for name in SAME_TRUNK:
        if getattr(old.config, name) != getattr(config, name):
            raise ValueError(
                f"{name} is {getattr(old.config, name)} in the source and {getattr(config, name)} in the new network; "
                "a warm start keeps the trunk, so make them equal"
            )
    times = (torch.arange(FIT_TIMES, dtype=torch.float64) + 0.5) / FIT_TIMES
    matched = matched_time(schedule, old.schedule, times)
    if not fit_time:
        matched = times * (config.time_scale / old.config.time_scale)
    new = _Start(old, config, generator, keep_labels)
    new.keep_trunk()
    new.carry_condition()
    new.carry_time(times, matched)
    new.carry_modulation(times, matched)
    new.carry_projection(same_process=(schedule, kind) == (old.schedule, old.kind))
    assert new.weights.keys() == new.fresh.keys(), "every weight of the new network must be accounted for"
    return ImportedNetwork(config, new.weights, schedule, kind, new.fates, {**old.dropped, **new.unused()})


def matched_time(new: Schedule, old: Schedule, t: Tensor) -> Tensor:
    """The old schedule's time at which the signal-to-noise ratio is that of the new schedule at t."""
    return old.time_at(new.log_snr(t))


class _Start:
    """The new network's weights as they are gathered, each with its fate."""

    def __init__(self, old: ImportedNetwork, config: DiTConfig, generator: torch.Generator, keep_labels: bool) -> None:
        self.old, self.config = old, config
        self.fresh = {name: value.detach() for name, value in DiT(config, generator).state_dict().items()}
        table = f"conditioning.{config.condition}.weight"
        self.labels_kept = keep_labels and self.same_shape(table)
        self.change = old.config.variant, config.variant
        self.weights: dict[str, Tensor] = {}
        self.fates: dict[str, Fate] = {}
        self.used: set[str] = set()

    @property
    def vector_is_free(self) -> bool:
        """The conditioning vector may be any curve of t: a single head is new, and no label or word is kept."""
        return self.change == ("adaln", "adaln-single") and not self.labels_kept

    def same_shape(self, key: str) -> bool:
        """Whether both networks have this tensor, with one shape."""
        return key in self.old.weights and key in self.fresh and self.old.weights[key].shape == self.fresh[key].shape

    def keep(self, *keys: str) -> None:
        for key in keys:
            self.weights[key], self.fates[key] = self.old.weights[key].clone(), self.old.fate(key)
            self.used.add(key)

    def keep_if(self, kept: bool, key: str, otherwise: str) -> None:
        """Keep a tensor, or start it anew for the reason `otherwise`."""
        if kept:
            self.keep(key)
        else:
            self.weights[key], self.fates[key] = self.fresh[key].clone(), Fate("re-initialized", note=otherwise)

    def set(self, key: str, value: Tensor, sources: Sequence[str], note: str, residual: float | None = None) -> None:
        """A tensor made from old ones: fitted where there is a residual, else derived."""
        self.weights[key] = value.float().reshape(self.fresh[key].shape).contiguous()
        self.used.update(sources)
        names = tuple(name for source in sources for name in self.old.fate(source).source)
        self.fates[key] = Fate("derived" if residual is None else "fitted", names, note, residual)

    def unused(self) -> dict[str, str]:
        """Foreign names of what has no part in the new network, and why."""
        folded = ("conditioning.labels.weight", "conditioning.words.weight")
        return {
            name: "its null row lives on in the time embedder" if key in folded else "no place in the new network"
            for key in self.old.weights
            if key not in self.used
            for name in self.old.fate(key).source
        }

    def keep_trunk(self) -> None:
        """Attention and MLP of every block, patches and positions."""
        for key in self.fresh:
            if ".attention." in key or ".mlp." in key:
                self.keep(key)
            elif ".cross." in key:
                self.keep_if(self.same_shape(key), key, "the source has no such cross-attention")
            elif key.startswith("patches.project"):
                same = (self.old.config.latent[0], self.old.config.patch) == (self.config.latent[0], self.config.patch)
                self.keep_if(same, key, "other latent channels or patch")
            elif key == "patches.positions":
                same = key in self.old.weights and self.old.config.grid == self.config.grid
                self.keep_if(same, key, "starts from the sin-cos table")

    def carry_condition(self) -> None:
        """Label, word and text tables: kept where they mean the same, else fresh."""
        reads = self.config.condition
        for key in self.fresh:
            if key.startswith(("conditioning.labels", "conditioning.words")):
                if key in self.old.weights and not self.labels_kept:  # other labels: all of them start as the null one
                    null = self.old.weights[key][-1:]
                    self.set(key, null.expand_as(self.fresh[key]), [key], "every row starts as the null row")
                else:
                    self.keep_if(self.labels_kept, key, f"the source does not read {reads}")
            elif key.startswith(("conditioning.text", "conditioning.null_text")):
                same = self.old.config.condition == reads and self.same_shape(key)
                self.keep_if(same, key, f"the source does not read this {reads} text")

    def carry_time(self, times: Tensor, matched: Tensor) -> None:
        """Time embedder: `null_conditioning(new, t)` shall equal `null_conditioning(old, matched t)`."""
        weight, bias = "conditioning.time.leave.weight", "conditioning.time.leave.bias"
        self.keep("conditioning.time.enter.weight", "conditioning.time.enter.bias", weight, bias)
        # the null condition of the old network moves into the bias, that of the new one is taken out of it
        moved = null_vector(self.old.config, self.old.weights) - null_vector(self.config, self.weights)
        if bool(moved.any()):
            self.set(bias, self.weights[bias].double() + moved, [bias], "the null condition folded in")
        same_time = torch.allclose(times * self.config.time_scale, matched * self.old.config.time_scale)
        if same_time and not self.vector_is_free:
            return
        wanted = self._wanted_vector(matched)
        change = wanted - null_conditioning(self.config, self.weights, times)
        strength = FIRM_RIDGE if self.vector_is_free else RIDGE
        d_weight, d_bias = ridge(time_features(self.config, self.weights, times), change, strength)
        fitted = {weight: self.weights[weight].double() + d_weight, bias: self.weights[bias].double() + d_bias}
        self.weights |= {key: value.float() for key, value in fitted.items()}
        left = relative(null_conditioning(self.config, self.weights, times), wanted)
        note = "fitted to the old head" if self.vector_is_free else "fitted to the old embedder"
        note += "" if same_time else " at the time of equal signal-to-noise"
        for key, value in fitted.items():
            self.set(key, value, [key], note, left)

    def _wanted_vector(self, matched: Tensor) -> Tensor:
        """What the new conditioning vector shall be at the fit times: float64 [T, D]."""
        vector = null_conditioning(self.old.config, self.old.weights, matched)
        if not self.vector_is_free:
            return vector
        shift, scale = self._modulated("head.modulation", vector).chunk(2, dim=1)
        both = (shift + scale) / 2.0  # one vector serves both, so their mean is the least-squares choice
        return vector.mean(0) + both - both.mean(0)

    def carry_modulation(self, times: Tensor, matched: Tensor) -> None:
        """Modulation of blocks and head: kept for the same variant, else fitted over t."""
        if self.change[0] == self.change[1]:
            self.keep(*(key for key in self.fresh if "modulation" in key or key.endswith(".table")))
            return
        old_vector = null_conditioning(self.old.config, self.old.weights, matched)  # [T, D]
        new_vector = null_conditioning(self.config, self.weights, times)
        if self.change == ("adaln", "adaln-single"):
            self._to_single(old_vector, new_vector)
        else:
            self._to_classic(old_vector, new_vector)

    def _to_single(self, old_vector: Tensor, new_vector: Tensor) -> None:
        """adaln to adaln-single: one shared map, and a table per block."""
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
        note = "mean over t of what the shared map leaves"
        for i, block in enumerate(blocks):
            self._set_table(f"blocks.{i}.table", block, everywhere, wanted[i], note)
        # the single head adds the conditioning vector itself
        head = self._modulated("head.modulation", old_vector)  # [T, 2 D]
        self._set_table("head.table", "head.modulation", new_vector.repeat(1, 2), head, "mean over t")

    def _set_table(self, key: str, layer: str, given: Tensor, wanted: Tensor, note: str) -> None:
        """A constant that brings `given` [T, O] to `wanted` on average; `layer` is the old one that gives `wanted`."""
        table = (wanted - given).mean(0)
        self.set(key, table, [f"{layer}.weight", f"{layer}.bias"], note, relative(given + table, wanted))

    def _to_classic(self, old_vector: Tensor, new_vector: Tensor) -> None:
        """adaln-single to adaln: the shared map in every block, exactly; the head is fitted."""
        shared, note = "conditioning.modulation", "the shared map, with the block's table in the bias"
        for i in range(self.config.depth):
            name, table = f"blocks.{i}.modulation", f"blocks.{i}.table"
            bias = self._old(shared, "bias") + self.old.weights[table].double().flatten()
            self.set(f"{name}.weight", self._old(shared, "weight"), [f"{shared}.weight"], note)
            self.set(f"{name}.bias", bias, [f"{shared}.bias", table], note)
        wanted = old_vector.repeat(1, 2) + self.old.weights["head.table"].double().flatten()
        weight, bias = ridge(F.silu(new_vector), wanted, FIRM_RIDGE)
        left = relative(F.silu(new_vector) @ weight.T + bias, wanted)
        self.set("head.modulation.weight", weight, ["head.table"], "fitted over t", left)
        self.set("head.modulation.bias", bias, ["head.table"], "fitted over t", left)

    def carry_projection(self, *, same_process: bool) -> None:
        """The last layer: kept for the same schedule, prediction type and shape."""
        reason = "another patch or number of channels" if same_process else "another schedule or kind"
        for key in HEAD:
            self.keep_if(same_process and self.same_shape(key), key, reason)

    def _old(self, layer: str, part: str) -> Tensor:
        return self.old.weights[f"{layer}.{part}"].double()

    def _modulated(self, layer: str, vector: Tensor) -> Tensor:
        """What a modulation of the old network gives for conditioning vectors [T, D]."""
        return F.silu(vector) @ self._old(layer, "weight").T + self._old(layer, "bias")


def ridge(features: Tensor, wanted: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Weight [O, D] and bias [O] of the linear map features [T, D] -> wanted [T, O] with the least squared error."""
    mean, middle = features.mean(0), wanted.mean(0)
    centered = features - mean
    gram = centered.T @ centered
    gram.diagonal().add_(strength * gram.diagonal().mean().clamp(min=1e-12))
    weight = torch.linalg.solve(gram, centered.T @ (wanted - middle)).T
    return weight, middle - weight @ mean


def relative(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of what was wanted."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-12))
