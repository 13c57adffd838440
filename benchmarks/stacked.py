"""For tables of small networks only: several of them trained in one process, each weight with a leading expert axis.

One expert of three million weights at batch 128 leaves most of a card idle. Here E networks of one shape, each with
its own samples, objective and seed, take every step together: their weights are one matrix [E, P], their linear maps
batched products, and all else (norms, attention, AdamW, average) never mixes rows, so that it does not know whose row
it has. Nothing passes from one expert to another: tests/test_stacked.py compares gradients with those of E separate
networks, and the finished experts with those of `fit` on separate islands. A monolith is the case E = 1.

Schedule, objective, network, optimizer, average and the order of samples are the product's own. What differs from an
island: noise, times and dropout are drawn on the device, by one generator for all.

    python benchmarks/stacked.py             # how fast: on random latents, the shapes of the tables
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from atoll.data.stream import sample_order
from atoll.distill.lessons import Trust, corrected, heard, taught, weight_of
from atoll.distill.plan import TrustIn
from atoll.distill.posterior import Behind, Blocks, mean_target
from atoll.models import fused
from atoll.models.dit import NORM_EPS, DiT, DiTConfig, gated_add, join_heads, modulate, split_heads
from atoll.models.router import Router
from atoll.planning.recipes import OBJECTIVES
from atoll.process import (
    Bridge,
    Condition,
    Corruption,
    Denoiser,
    LinearFlow,
    NetworkDenoiser,
    Objective,
    mix,
)
from atoll.process.objective import squared_error
from atoll.process.schedule import scaled
from atoll.training.average import WeightAverage
from atoll.training.execution import Execution
from atoll.training.optimizer import adamw
from atoll.training.recipe import Training
from atoll.training.seeds import seed_from
from atoll.training.step import FORGETTING, RATE, Graph, allow_many_shapes

ROOM = 64  # values: each tensor of a network begins at a multiple, so that products read aligned rows
CHUNK = 100  # steps whose samples are chosen at once
REPORTS = 40
LARGEST_DISAGREEMENT = 0.06  # of the gradient by the fused kernels, relative to the plain formulas' in bfloat16
Batch = dict[str, Tensor]


class Stack(nn.Module):
    """E networks of one shape as one module with one parameter, float32 [E, P].

    (x [E, B, C, H, W], time [E, B], condition's tensors [E, B, ...]) -> [E, B, ...]: what each network alone
    would answer.
    """

    def __init__(self, networks: Sequence[DiT | Router], *, device: torch.device, precision: torch.dtype) -> None:
        super().__init__()
        first = networks[0]
        trunk = first.config.trunk if isinstance(first, Router) else first.config
        if trunk.variant != "adaln-single" or trunk.condition == "tokens" or trunk.qk_norm:
            raise ValueError("a stack knows adaln-single without text tokens and without norms of queries and keys")
        self._like = [first.to(device)]  # in a list: its own weights are none of ours
        self._trunk, self._precision, self.size = trunk, precision, len(networks)
        self._shapes = {name: p.shape for name, p in first.named_parameters()}
        self._rooms = [-(-shape.numel() // ROOM) * ROOM for shape in self._shapes.values()]
        self.weights = nn.Parameter(torch.zeros(self.size, sum(self._rooms), device=device))
        with torch.no_grad():
            for row, network in enumerate(networks):
                own = dict(network.named_parameters())
                for name, view in self.tensors(self.weights).items():
                    view[row].copy_(own[name])
        self.block: Callable[..., Tensor] = block

    def tensors(self, weights: Tensor) -> dict[str, Tensor]:
        """Each parameter by its name in one network, [E, *shape]: views of `weights` [E, P]."""
        parts = torch.split(weights, self._rooms, dim=1)
        return {
            name: part[:, : shape.numel()].unflatten(1, shape) if len(shape) else part[:, 0]
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def states(self, weights: Tensor) -> list[dict[str, Tensor]]:
        """One state dict per network, copies on the CPU."""
        found = {name: value.detach().to("cpu", copy=True) for name, value in self.tensors(weights).items()}
        return [{name: value[row].clone() for name, value in found.items()} for row in range(self.size)]

    def forward(self, x: Tensor, time: Tensor, condition: Batch) -> Tensor:
        like, every = self._like[0], self.tensors(self.weights.to(self._precision))
        tokens = vmap(lambda weights, x: functional_call(like.patches, weights, (x,)))(part(every, "patches."), x)
        vector, signal = vmap(lambda weights, time, given: conditioned(like, weights, time, given))(
            part(every, "conditioning."), time, condition
        )
        if isinstance(like, Router):
            first = every["class_token"][:, None, None].expand(*tokens.shape[:2], 1, -1)
            tokens = torch.cat([first, tokens], dim=2)
        h = tokens.flatten(0, 1).contiguous()  # [E B, N, D], expert by expert
        for index in range(self._trunk.depth):
            own = part(every, f"blocks.{index}.")
            six = (signal + own["table"][:, :, None]).transpose(0, 1).flatten(1, 2)  # [6, E B, D]
            h = self.block(h, six, own, self._trunk.heads, self._trunk.mlp_norm_eps, self._trunk.activation)
        two = (vector[:, :, None] + every["head.table"][:, None]).flatten(0, 1)[:, :, None]  # [E B, 2, 1, D]
        shift, scale = two.to(h.dtype).unbind(1)
        if isinstance(like, Router):
            h = h[:, :1].contiguous()
        h = linear(modulate(h, shift, scale, NORM_EPS), every, "head.project")
        answer = h.squeeze(1) if isinstance(like, Router) else like._to_latent(h)
        return answer.unflatten(0, (self.size, -1))


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def conditioned(like: DiT | Router, weights: Batch, time: Tensor, given: Batch) -> tuple[Tensor, Tensor]:
    """One network's conditioning vector [B, D] and signal [6, B, D]."""
    condition = Condition.of(given) if given else None
    vector, signal, _text, _mask = functional_call(like.conditioning, weights, (time, condition))
    return vector, signal


def linear(x: Tensor, weights: Batch, name: str) -> Tensor:
    """[E B, N, I] -> [E B, N, O], each row by its expert's weight [E, O, I] and bias [E, O]."""
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    rows = x.reshape(len(weight), -1, x.shape[-1])
    return torch.baddbmm(bias[:, None], rows, weight.transpose(1, 2)).view(*x.shape[:-1], -1)


def block(h: Tensor, six: Tensor, own: Batch, heads: int, mlp_norm_eps: float, activation: str) -> Tensor:
    """dit.Block for tokens [E B, N, D] of all experts; six vectors [6, E B, D]."""
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = six[:, :, None].to(h.dtype).unbind(0)
    tokens, width = h.shape[1:]
    if fused.available(h):
        h, y = fused.keep_and_norm(h, shift, scale, NORM_EPS)
    else:
        y = modulate(h, shift, scale, NORM_EPS)
    qkv = linear(y, own, "attention.qkv")
    if fused.attends(h, tokens, tokens, width // heads):
        answer = fused.self_attention(qkv.unflatten(2, (3, heads, -1)))
    else:
        answer = join_heads(F.scaled_dot_product_attention(*split_heads(qkv, 3, heads)))
    branch = linear(answer, own, "attention.out")
    if fused.available(h):
        h, y = fused.add_norm_modulate(h, branch, gate, mlp_shift, mlp_scale, mlp_norm_eps)
    else:
        h = gated_add(h, gate, branch)
        y = modulate(h, mlp_shift, mlp_scale, mlp_norm_eps)
    hidden = linear(y, own, "mlp.enter")
    hidden = F.gelu(hidden, approximate="tanh") if activation == "gelu-tanh" else F.silu(hidden)
    branch = linear(hidden, own, "mlp.leave")
    return fused.gated_add(h, mlp_gate, branch) if fused.available(h) else gated_add(h, mlp_gate, branch)


@dataclass(frozen=True, eq=False)
class Pool:
    """The samples of all experts on the device: normalized latents [N, C, H, W], and what they are conditioned on.

    With `text` [M, W], the captions of sample i are its rows first[i] .. first[i] + count[i] - 1; with `labels` [N],
    its class; with neither, nothing.
    """

    latents: Tensor
    text: Tensor | None = None
    first: Tensor | None = None
    count: Tensor | None = None
    labels: Tensor | None = None

    def condition(self, rows: Tensor, which: Tensor, dropped: Tensor) -> Batch:
        """The tensors of a Condition for rows [E, B]; `which`, uniform, chooses among a sample's captions."""
        if self.labels is not None:
            return {"labels": self.labels[rows], "dropped": dropped}
        if self.text is not None and self.first is not None and self.count is not None:
            count = self.count[rows]
            caption = self.first[rows] + torch.minimum((which * count).long(), count - 1)  # u < 1, yet u n may round up
            return {"pooled": self.text[caption], "dropped": dropped}
        return {}


class Task(Protocol):
    """What a stack learns."""

    def loss(self, stack: Stack, x0: Tensor, eps: Tensor, u: Tensor, condition: Batch, rows: Tensor) -> Tensor:
        """Loss per sample [E, B]; u, uniform in (0, 1) and stratified over B, says where in time."""
        ...


@dataclass(frozen=True)
class Denoising:
    """Each network by its own objective."""

    objectives: Sequence[Objective]
    time_scale: float

    def loss(self, stack: Stack, x0: Tensor, eps: Tensor, u: Tensor, condition: Batch, rows: Tensor) -> Tensor:
        times, states, at = [], [], list[Corruption]()
        for row, objective in enumerate(self.objectives):
            t = objective.times(u[row])
            now = objective.at(t).to(dtype=torch.float32)
            x = now.noisy(x0[row], eps[row])
            scale = objective.schedule.input_scale(t)
            times.append(t)
            states.append(x if scale is None else scaled(x, scale).to(x.dtype))
            at.append(now)
        value = stack(torch.stack(states), torch.stack(times) * self.time_scale, condition)
        return torch.stack([now.loss(*own) for now, *own in zip(at, value, x0, eps, strict=True)])


@dataclass(frozen=True, eq=False)
class Telling:
    """Routers: the cluster of a noisy latent, by cross-entropy at uniform times of the reference path."""

    clusters: Tensor  # int64 [N], of every sample of the pool
    time_scale: float

    def loss(self, stack: Stack, x0: Tensor, eps: Tensor, u: Tensor, condition: Batch, rows: Tensor) -> Tensor:
        path = LinearFlow()
        alpha, sigma = (value.float().flatten() for value in (path.alpha(u), path.sigma(u)))
        x = mix(alpha, sigma, x0.flatten(0, 1), eps.flatten(0, 1)).view_as(x0)
        logits = stack(x, u * self.time_scale, condition)
        return F.cross_entropy(logits.flatten(0, 1).float(), self.clusters[rows].flatten(), reduction="none").view_as(u)


@dataclass(frozen=True, eq=False)
class Teachers:
    """The experts of some clusters as one denoiser: rows [G B] are of the first one's, then of the next one's."""

    clusters: Tensor  # int64 [G], on the device
    stack: Stack
    denoiser: Denoiser  # on the reference path
    heard_as: Objective  # their own, or what they are taken for by a student that does not hear all as a whole

    @staticmethod
    def of(
        stack: Stack,
        clusters: Tensor,
        objective: Objective,
        time_scale: float,
        limit: float | None,
        heard_as: Objective | None = None,
    ) -> Teachers:
        """Experts by one objective, and the largest sigma/alpha they may be asked at."""

        def network(x: Tensor, time: Tensor, condition: Condition | None) -> Tensor:
            given = {} if condition is None else condition.tensors()
            rows = [value.unflatten(0, (stack.size, -1)) for value in (x, time, *given.values())]
            return stack(rows[0], rows[1], dict(zip(given, rows[2:], strict=True))).flatten(0, 1)

        own = NetworkDenoiser(network, objective.schedule, objective.kind, time_scale)
        return Teachers(clusters, stack, Bridge(own, limit=limit), heard_as or objective)

    def rows(self, value: Tensor) -> Tensor:
        """Of a tensor [K, B, ...] those of these experts' clusters [G B, ...]."""
        return value.index_select(0, self.clusters).flatten(0, 1)

    def put(self, value: Tensor, rows: Tensor) -> None:
        """Into a tensor [K, B, ...] those of these experts' clusters [G B, ...]."""
        value.index_copy_(0, self.clusters, rows.to(value.dtype).unflatten(0, (-1, value.shape[1])))

    def doubted(self, objective: Objective) -> bool:
        """Whether a student with this objective does not hear them as a whole."""
        return bool(Trust(objective, [(self.heard_as.schedule, self.heard_as.kind)], "data").doubted())


@dataclass(frozen=True, eq=False)
class OnDevice:
    """`Behind`, where all of it and the samples [N, C, H, W] lie on the device, and nothing is left out.

    So it can be recorded in a graph. Rows must be of its clusters, and sigma above 0, as objectives' times see to.
    """

    behind: Behind
    latents: Tensor

    @staticmethod
    def of(behind: Behind, latents: Tensor) -> OnDevice:
        alike, anyone = (
            Blocks(each.of_row.to(latents.device), each.members.to(latents.device))
            for each in (behind.alike, behind.anyone)
        )
        return OnDevice(Behind(alike, anyone, behind.nearest), latents)

    def targets(self, at: Corruption, x0: Tensor, eps: Tensor, rows: Tensor, dropped: Tensor) -> Tensor:
        members = self.behind.members(rows, dropped)
        return mean_target(at, x0, eps, self.latents[members.clamp(min=0)].to(x0), members >= 0)


@dataclass(frozen=True, eq=False)
class Distilling:
    """One student: at each sample the velocity that the teacher of the sample's own cluster gives there (no router).

    Batches have as many samples [K, B] of every cluster, so that teachers of one objective answer as one stack. A
    sample counts `shares[k] K`, which makes the loss that of samples drawn from all data alike: sum_k share_k mean_B.
    """

    teachers: Sequence[Teachers]
    shares: Tensor  # float32 [K], of each cluster in the data; sum 1
    objective: Objective
    time_scale: float
    truth: float = 0.0  # share of the sample's own target in what is learned
    trust: TrustIn = "whole"  # what stands for teachers whose errors grow on the way
    behind: OnDevice | None = None  # for `data`: whose mean that is

    def loss(self, stack: Stack, x0: Tensor, eps: Tensor, u: Tensor, condition: Batch, rows: Tensor) -> Tensor:
        """[1, K B]."""
        t = self.objective.times(u.flatten()).view_as(u)
        now = self.objective.at(t.flatten()).to(dtype=torch.float32)
        x = now.noisy(x0.flatten(0, 1), eps.flatten(0, 1)).view_as(x0)
        own = now.target(x0.flatten(0, 1), eps.flatten(0, 1)).view_as(x0)
        wanted, shares, places = torch.empty_like(x), torch.ones_like(u), torch.arange(u.numel(), device=u.device)
        with torch.no_grad():
            for teachers in self.teachers:
                given = Condition.of({name: teachers.rows(value) for name, value in condition.items()})
                answer = taught(teachers.denoiser, self.objective, teachers.rows(x), teachers.rows(t), given)
                teachers.put(wanted, answer)
                if self.trust != "whole":
                    taken_for = teachers.heard_as
                    weight = weight_of(taken_for.schedule, taken_for.kind, self.objective, teachers.rows(t))
                    teachers.put(shares, heard(weight, self.trust))
                if self.behind is not None and teachers.doubted(self.objective):
                    here = now[teachers.rows(places.view_as(u))]
                    asked = [teachers.rows(value) for value in (x0, eps, rows, condition["dropped"])]
                    teachers.put(own, self.behind.targets(here, *asked))
        share = None if self.trust == "whole" else shares.flatten()
        target = corrected(wanted.flatten(0, 1), own.flatten(0, 1), self.truth, share)
        given = {name: value.flatten(0, 1)[None] for name, value in condition.items()}
        value = stack(x.flatten(0, 1)[None], (t * self.time_scale).flatten()[None], given)[0]
        errors = squared_error(value, target).view_as(u)
        return (errors * (self.shares * len(self.shares))[:, None]).flatten()[None]


@dataclass(frozen=True, eq=False)
class Following:
    """One student without data: its pool is of states on an ensemble's own trajectories, and what was said there."""

    t: Tensor  # float64 [N], of every state of the pool
    target: Tensor  # [N, C, H, W]
    dropped: Tensor  # bool [N]: prompts were dropped before the trajectories were walked
    time_scale: float

    def loss(self, stack: Stack, x0: Tensor, eps: Tensor, u: Tensor, condition: Batch, rows: Tensor) -> Tensor:
        """[1, B]; `x0` are states here."""
        time = self.t[rows] * self.time_scale
        value = stack(x0, time, condition | {"dropped": self.dropped[rows]})
        return squared_error(value.flatten(0, 1), self.target[rows].flatten(0, 1).float()).view_as(u)


@dataclass(frozen=True)
class Trained:
    """What a stack has become: averaged weights of each network, rows of losses [E], and how fast.

    `kept` has the averaged weights after some shares of the training too.
    """

    states: list[dict[str, Tensor]]
    kept: dict[float, list[dict[str, Tensor]]]
    rows: list[dict[str, Any]]
    seconds: float
    images_per_s: float
    fused: bool


def train_stack(
    networks: Sequence[DiT | Router],
    task: Task,
    pool: Pool,
    members: Sequence[Tensor],
    training: Training,
    *,
    seeds: Sequence[int],
    compiling: bool = False,
    precision: torch.dtype = torch.float32,
    beside: Sequence[Stack] = (),
    keep_after: Sequence[float] = (),
    watch: Callable[[int, int, float], None] | None = None,
) -> Trained:
    """Train all networks by one recipe, network e on the pool's rows `members[e]` in the order of seeds[e].

    `training.batch` and `training.images` are of one list of members (for one student of several teachers: of one
    teacher). `beside` are other stacks that the task asks. Weights are kept at the end and after the shares
    `keep_after`. `watch` sees (images of each, of all, images/s).
    """
    if training.weight_decay:
        raise ValueError("a stack does not tell matrices from biases, so it cannot decay weights: use 0")
    device = pool.latents.device
    stack = Stack(networks, device=device, precision=precision)
    optimizer = adamw(stack, training, Execution(device=str(device), compiling="none"))
    average = WeightAverage(stack, training.ema_images)
    meter = torch.zeros(len(networks), device=device)
    generator_seed = seed_from(*seeds, "stack")
    torch.manual_seed(generator_seed)  # the device's own generator: its numbers go on from replay to replay of a graph
    strata = torch.arange(training.batch, device=device, dtype=torch.float64)

    def loss_of(rows: Tensor) -> Tensor:
        shape = rows.shape
        u = (strata + torch.rand(shape, device=device, dtype=torch.float64)) / training.batch
        which, dropout = torch.rand(2, *shape, device=device).unbind(0)
        x0 = pool.latents[rows].float()
        condition = pool.condition(rows, which, dropout < training.condition_dropout)
        return task.loss(stack, x0, torch.randn_like(x0), u, condition, rows)

    def forget() -> None:
        optimizer.zero_grad(set_to_none=True)

    def compute(batch: Batch) -> None:
        forget()
        losses = loss_of(batch["rows"]).mean(1)
        losses.sum().backward()
        gradient = stack.weights.grad
        assert gradient is not None
        norm = gradient.norm(dim=1)
        finite = (torch.isfinite(losses).all() & torch.isfinite(norm).all()).float()
        if training.gradient_clip is not None:
            gradient.div_((norm / training.gradient_clip).clamp(min=1.0)[:, None])
        optimizer.found_inf, optimizer.grad_scale = 1.0 - finite, torch.ones_like(finite)
        optimizer.param_groups[0]["lr"].copy_(batch[RATE])
        optimizer.step()
        average.update(batch[FORGETTING] * finite)
        meter.add_(losses.detach() / finite)  # not finite from then on, which the next report finds

    with trusted(stack, loss_of, sample_rows(members, seeds, 0, training.batch).to(device)) as kernels:
        if compiling:
            allow_many_shapes()
            for asked in (stack, *beside):
                asked.block = torch.compile(block, fullgraph=True, dynamic=False)
        step = Graph(compute, forget) if compiling and device.type == "cuda" else compute
        rows_of_metrics: list[dict[str, Any]] = []
        kept: dict[float, list[dict[str, Tensor]]] = {}
        steps = training.images // training.batch
        began, counted = time.monotonic(), 0
        for first in range(0, steps, CHUNK):
            count = min(CHUNK, steps - first)
            for number, batch in enumerate(chunk_of(members, seeds, first, count, training, average, device)):
                step(batch)
                if first + number + 1 == min(20, steps):  # compiled and recorded by then
                    synchronize(device)
                    began, counted = time.monotonic(), first + number + 1
            done = first + count
            for share in keep_after:
                if share not in kept and done >= share * steps:
                    kept[share] = stack.states(next(iter(average.tensors.values())))
            if done * REPORTS // steps > first * REPORTS // steps or done == steps:
                synchronize(device)
                rate = (done - counted) * training.batch * len(members) / max(time.monotonic() - began, 1e-9)
                steps_since = done - sum(row["steps"] for row in rows_of_metrics)
                lost = (meter / steps_since).tolist()
                rows_of_metrics.append({"images": done * training.batch, "steps": steps_since, "loss": lost})
                meter.zero_()
                if not all(math.isfinite(value) for value in lost):
                    raise RuntimeError(f"a loss or gradient was not finite before {done} steps: {lost}")
                if watch is not None:
                    watch(done * training.batch, training.images, rate)
    synchronize(device)
    seconds = time.monotonic() - began
    total = (steps - counted) * training.batch * len(members)
    states = stack.states(next(iter(average.tensors.values())))
    return Trained(states, kept, rows_of_metrics, seconds, total / max(seconds, 1e-9), kernels)


def chunk_of(
    members: Sequence[Tensor],
    seeds: Sequence[int],
    first: int,
    count: int,
    training: Training,
    average: WeightAverage,
    device: torch.device,
) -> list[Batch]:
    """What steps first .. first + count - 1 are told: rows of the pool [E, B], learning rate, forgetting."""
    size = training.batch
    rows = sample_rows(members, seeds, first * size, count * size).view(len(members), count, size)
    rows = rows.transpose(0, 1).contiguous().to(device)
    images = [(first + number) * size for number in range(count)]
    rates = torch.tensor([training.learning_rate_at(seen) for seen in images]).to(device)
    forgets = torch.tensor([average.forgetting(seen + size, size) for seen in images]).to(device)
    return [{"rows": rows[i], RATE: rates[i], FORGETTING: forgets[i]} for i in range(count)]


def sample_rows(members: Sequence[Tensor], seeds: Sequence[int], start: int, count: int) -> Tensor:
    """Rows of the pool [E, count] that come at places start .. of every network's endless stream."""
    return torch.stack(
        [own[sample_order(len(own), seed, start, count)] for own, seed in zip(members, seeds, strict=True)]
    )


@contextlib.contextmanager
def trusted(stack: Stack, loss_of: Callable[[Tensor], Tensor], rows: Tensor) -> Iterator[bool]:
    """While inside, the fused kernels are on if this stack's gradient is the plain formulas' with them; whether."""
    fused.Switch.on = False
    if rows.device.type == "cuda":
        with torch.no_grad():
            kept = stack.weights.clone()
            stack.weights.add_(0.02 * torch.randn_like(kept))  # fresh heads are zero: anything would be right
        found = []
        for on in (False, True):
            fused.Switch.on = on
            state = torch.cuda.get_rng_state()
            (gradient,) = torch.autograd.grad(loss_of(rows).mean(1).sum(), stack.weights)
            torch.cuda.set_rng_state(state)
            found.append(gradient)
        off = ((found[1] - found[0]).norm() / found[0].norm()).item()
        with torch.no_grad():
            stack.weights.copy_(kept)
        fused.Switch.on = off < LARGEST_DISAGREEMENT
        print(f"fused kernels differ from plain formulas by {off:.2%}: {'used' if fused.Switch.on else 'NOT used'}")
    try:
        yield fused.Switch.on
    finally:
        fused.Switch.on = False


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Rates on random latents; it also leaves the compiled kernels in inductor's cache for whoever comes next."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    config = DiTConfig(latent=(32, 8, 8), patch=1, width=192, depth=6, heads=3, condition="pooled", text_width=384)
    every = torch.arange(10_000)
    ones = torch.ones(len(every), dtype=torch.int64, device=device)
    latents = torch.randn(len(every), *config.latent, device=device).half()
    pool = Pool(latents, text=torch.randn(len(every), 384, device=device), first=every.to(device), count=ones)
    for experts, batch in ((1, 1024), (8, 128)):
        began = time.monotonic()
        training = Training(
            images=batch * arguments.steps, batch=batch, learning_rate=1e-4, decay="linear", ema_images=1000, seed=0
        )
        trained = train_stack(
            [DiT(config) for _ in range(experts)],
            Denoising([OBJECTIVES["flow"]] * experts, config.time_scale),
            pool,
            [every] * experts,
            training,
            seeds=list(range(experts)),
            compiling=device.type == "cuda",
            precision=torch.bfloat16 if device.type == "cuda" else torch.float32,
        )
        found = {"experts": experts, "batch": batch, "images_per_s": round(trained.images_per_s)}
        found |= {"fused": trained.fused, "seconds_in_all": round(time.monotonic() - began, 1)}
        print(json.dumps(found | {"loss": trained.rows[-1]["loss"][0]}), flush=True)


if __name__ == "__main__":
    main()
