"""What the tables of photographs train and measure: sizes, models, ensembles, arms.

Chosen before any of it was run, but for what says otherwise: `beyond`, and table R with the students of its experts.

benchmarks/tables.py makes it, benchmarks/table_report.py writes it down. A new comparison is a line in MODELS or
ENSEMBLES and an arm in its table.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from atoll.distill.plan import TrustIn
from atoll.models.accounting import flops_forward
from atoll.models.dit import DiTConfig
from atoll.planning import recipes
from atoll.process import EDM, CosineVP, Kind, Objective
from atoll.process.objective import MinSNR
from atoll.router.recipes import router_network
from atoll.training.recipe import Training

CLUSTERS = 8
ROUTER_SHARE = 0.04  # of the experts' training, in operations: DDM's
BRANCH = 0.25  # of all images, seen by the common start of branched experts
NOISE_EXPERTS = 2  # of the mixed ensemble: on the clusters with most detail, as `atoll plan` deals them
STUDENT_SHARE = 1 / 3  # of the monolith's training, in operations: DDM's, the teachers' answers counted
CURVE = (0.125, 0.25, 0.5)  # of the training, where quality is measured on the way
RESAMPLES = 20
FUSIONS = ("bridge", "paper")

OBJECTIVES: Mapping[str, Objective] = recipes.OBJECTIVES | {  # those of `atoll plan`, and two for table F
    "x0": Objective(schedule=CosineVP(), kind=Kind.X0, weighting=MinSNR()),
    "edm": Objective(schedule=EDM(), kind=Kind.X0, weighting=MinSNR()),
}


@dataclass(frozen=True)
class Scale:
    """Everything that decides how much is computed."""

    width: int = 192
    depth: int = 6
    heads: int = 3
    patch: int = 1
    batch: int = 128  # of one expert
    steps: int = 12_000
    learning_rate: float = 4e-4
    router_batch: int = 1024
    samples: int = 10_000
    sample_batch: int = 5_000
    sampling_steps: int = 50
    guidances: tuple[float, ...] = (1.5, 2.0, 3.0)
    beyond: tuple[float, ...] = (4.5, 6.0)  # added after seed 0: both models were best at the end of `guidances`
    text_samples: int = 2_000
    warm_up: float = 0.04  # of the budget
    average: float = 0.02  # half-life of the weights' average, of the budget
    small: int = 128  # table C: widths, with heads of the same size
    large: int = 256

    def of_size(self, size: str) -> Scale:
        """With networks of another width; `size` is small, large or, as it is, nothing."""
        width = {"": self.width, "small": self.small, "large": self.large}[size]
        return replace(self, width=width, heads=width * self.heads // self.width)


SCALES = {
    "photographs": Scale(),
    "toy": Scale(
        *(32, 1, 2, 4, 8, 8),
        router_batch=32,
        samples=48,
        sample_batch=32,
        sampling_steps=3,
        guidances=(2.0,),
        beyond=(),
        text_samples=16,
        small=16,
        large=48,
    ),  # that it runs, in seconds on a CPU
}


# -- what is trained ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Networks of one shape that are trained together; as it stands, a flow expert for every cluster."""

    learns: Literal["experts", "everything", "clusters", "teachers"] = "experts"
    objectives: tuple[str, ...] = ("flow",)  # each in turn for every cluster
    most_detailed: int = CLUSTERS  # only for so many clusters, those with most detail first
    size: str = ""
    partition: str = "clusters"  # the name of its tensor in the set
    share: float = 1.0  # of the budget
    start: str | None = None  # whose weights it begins from: a model, or of a student's teachers best or average
    blind: bool = False  # a router that is not told the prompt
    alone: bool = False  # a student's operations without its teachers
    teachers: str = "flow8"  # a student's: a model or an ensemble
    samples: bool = False  # a student without data, on its teachers' own trajectories, answered by their top-1
    rate: float = 1.0  # times an expert's learning rate
    longer: int = 1  # a student's steps: so many times an expert's, with as much less of the batch
    truth: float = 0.0  # share of the sample's own target in what a student learns
    unprompted: float = 0.1  # share of what is learned without a prompt
    trust: TrustIn = "whole"  # what stands for teachers whose errors grow on the way to the student
    heard_as: str | None = None  # as if the teachers were those of this ensemble: the same shares, of other teachers

    @property
    def count(self) -> int:
        """Of clusters."""
        return {"clusters-4": 4, "clusters-16": 16}.get(self.partition, CLUSTERS)

    @property
    def student(self) -> bool:
        return self.learns == "teachers" or self.alone


def taught_by(
    teachers: str = "flow8-x4",
    *,
    start: str | None = "best",
    samples: bool = False,
    rate: float = 4,
    truth: float = 0.0,
    longer: int = 1,
    unprompted: float = 0.1,
    trust: TrustIn = "whole",
    heard_as: str | None = None,
) -> Model:
    """A student that begins at the best of its teachers, by default of experts at four times the tables' rate."""
    own = Model("teachers", start=start, teachers=teachers, samples=samples, rate=rate, truth=truth, longer=longer)
    return replace(own, unprompted=unprompted, trust=trust, heard_as=heard_as)


FIFTH = 0.2
STUDENT_RECIPES: Mapping[str, dict[str, Any]] = {
    "": {},
    "-half-x8": {"truth": 0.5, "rate": 8},
    "-half-long": {"truth": 0.5, "longer": 2},
}
PARTITIONS = {"random": "clusters-random", "label": "clusters-label", "4": "clusters-4", "16": "clusters-16"}
MODELS: Mapping[str, Model] = {
    "monolith": Model("everything"),
    "flow8": Model(),
    "router": Model("clusters"),
    "blind": Model("clusters", blind=True),
    "start": Model("everything", share=BRANCH),
    "branched": Model(share=1.0 - BRANCH, start="start"),
    "noise2": Model(objectives=("ddpm",), most_detailed=NOISE_EXPERTS),
    "noise8": Model(objectives=("ddpm",)),
    "kinds": Model(objectives=("v", "x0", "edm"), most_detailed=NOISE_EXPERTS),
    "student": Model("teachers"),
    "student-best": Model("teachers", start="best"),
    "student-average": Model("teachers", start="average"),
    "alone": Model("everything", alone=True),
    **{f"student-best-x{rate}": Model("teachers", start="best", rate=rate) for rate in (2, 4)},
    **{f"alone-x{rate}": Model("everything", alone=True, rate=rate) for rate in (2, 4, 8)},
    "alone-long-x4": Model("everything", alone=True, rate=4, longer=2),
    **{f"monolith-x{rate}": Model("everything", rate=rate) for rate in (4, 8, 16)},
    **{f"flow8-x{rate}": Model(rate=rate) for rate in (2, 4, 8)},
    **{
        f"{kind}2-x{rate}": Model(objectives=(kind,), most_detailed=NOISE_EXPERTS, rate=rate)
        for kind in ("ddpm", "v")
        for rate in (4, 8)
    },
    "student-of-x4": taught_by(),
    "student-half-of-x4": taught_by(truth=0.5),
    "student-half-x8-of-x4": taught_by(truth=0.5, rate=8),
    "student-long-of-x4": taught_by(longer=2),  # as `atoll distill` does where nothing is said: an expert's batch
    "student-half-long-of-x4": taught_by(truth=0.5, longer=2),
    **{f"student-{k}-of-x4": taught_by(f"2{k}-x4") for k in ("ddpm", "v")},
    **{f"student-half-x8-{k}-of-x4": taught_by(f"2{k}-x4", truth=0.5, rate=8) for k in ("ddpm", "v")},
    **{f"student-half-long-{k}-of-x4": taught_by(f"2{k}-x4", truth=0.5, longer=2) for k in ("ddpm", "v")},
    "student-x8-of-x8": taught_by("flow8-x8", rate=8),
    "student-half-x8-of-x8": taught_by("flow8-x8", truth=0.5, rate=8),
    **{f"student-half-x8-{k}-of-x8": taught_by(f"2{k}-x8", truth=0.5, rate=8) for k in ("ddpm", "v")},
    "student-trust-ddpm-of-x4": taught_by("2ddpm-x4", trust="kind"),
    "student-half-x8-trust-ddpm-of-x4": taught_by("2ddpm-x4", truth=0.5, rate=8, trust="kind"),
    "student-half-long-trust-ddpm-of-x4": taught_by("2ddpm-x4", truth=0.5, longer=2, trust="kind"),
    "student-half-x8-trust-ddpm-of-x8": taught_by("2ddpm-x8", truth=0.5, rate=8, trust="kind"),
    # flow teachers with the shares of the truth that noise teachers leave: what of `trust` is the truth's own gain
    "student-control-of-x4": taught_by(trust="kind", heard_as="2ddpm-x4"),
    "student-half-x8-control-of-x4": taught_by(truth=0.5, rate=8, trust="kind", heard_as="2ddpm-x4"),
    "student-half-long-control-of-x4": taught_by(truth=0.5, longer=2, trust="kind", heard_as="2ddpm-x4"),
    "student-half-x8-control-of-x8": taught_by("flow8-x8", truth=0.5, rate=8, trust="kind", heard_as="2ddpm-x8"),
    # the data's own mean with what noise teachers say, and in the place of as much of what flow teachers say
    **{
        f"student{how}-data-{who}-of-x{rate}": taught_by(
            teachers, trust="data", heard_as=None if who == "ddpm" else f"2ddpm-x{rate}", **options
        )
        for rate, how, options in (
            *((4, how, options) for how, options in STUDENT_RECIPES.items()),
            (8, "-half-x8", STUDENT_RECIPES["-half-x8"]),
        )
        for who, teachers in (("ddpm", f"2ddpm-x{rate}"), ("control", f"flow8-x{rate}"))
    },
    # one lesson in five without a prompt, as `atoll distill` does, and as much for those without teachers
    **{
        f"student{how}-fifth{data}-of-x4": taught_by(teachers, trust=trust, unprompted=FIFTH, **options)
        for how, options in STUDENT_RECIPES.items()
        for data, teachers, trust in (("", "flow8-x4", "whole"), ("-data-ddpm", "2ddpm-x4", "data"))
    },
    **{
        f"student-{what}-fifth-of-x4": taught_by(start=start, samples="samples" in what, unprompted=FIFTH)
        for what, start in (("random", None), ("average", "average"), ("samples", None), ("samples-average", "average"))
    },
    "alone-fifth-x8": Model("everything", alone=True, rate=8, unprompted=FIFTH),
    "monolith-fifth-x4": Model("everything", rate=4, unprompted=FIFTH),
    **{f"monolith-{size}": Model("everything", size=size) for size in ("small", "large")},
    **{f"flow8-{size}": Model(size=size) for size in ("small", "large")},
    **{f"router-{size}": Model("clusters", size=size) for size in ("small", "large")},
    **{f"flow-{name}": Model(partition=tensor) for name, tensor in PARTITIONS.items()},
    **{f"router-{name}": Model("clusters", partition=tensor) for name, tensor in PARTITIONS.items()},
}
STUDENTS = tuple(name for name, model in MODELS.items() if model.student)
W = "-w"  # of students in the record from before `heard`: noise and v teachers' answers counted w (docs/log.md)
FEW = "-few-steps"  # of students in the record from before `student_recipe`: a quarter of the steps, the whole batch


@dataclass(frozen=True)
class Ensemble:
    """Experts of `base`, and in the `count` clusters with most detail those of another model, of one objective."""

    other: str
    objective: str
    count: int
    base: str = "flow8"


ENSEMBLES: Mapping[str, Ensemble] = {
    "mixed": Ensemble("noise2", "ddpm", NOISE_EXPERTS),
    **{
        f"2{kind}-x{rate}": Ensemble(f"{kind}2-x{rate}", kind, NOISE_EXPERTS, base=f"flow8-x{rate}")
        for kind in ("ddpm", "v")
        for rate in (4, 8)
    },
    **{f"{n}ddpm:{CLUSTERS - n}flow": Ensemble("noise8", "ddpm", n) for n in (1, 2, 4)},
    "8ddpm": Ensemble("noise8", "ddpm", CLUSTERS),
    **{f"2{kind}:6flow": Ensemble("kinds", kind, NOISE_EXPERTS) for kind in MODELS["kinds"].objectives},
    "4small:4flow": Ensemble("flow8-small", "flow", CLUSTERS // 2),
}


def needed(model: str) -> list[str]:
    """Models that must be there first, in order, with `model` itself if that is one."""
    if model in ENSEMBLES:
        return [ENSEMBLES[model].base, ENSEMBLES[model].other]
    before = needed(MODELS[model].teachers) if MODELS[model].learns == "teachers" else []
    before += ["router"] if MODELS[model].samples else []
    start = MODELS[model].start
    return [*before, *([start] if start in MODELS else []), model]


# -- what is measured ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to sample. `compared` is the arm it is divided by."""

    table: str
    model: str  # of MODELS or ENSEMBLES
    route: str | None = None
    guidance: float = 1.0
    router: str | None = "router"
    fusion: str = "bridge"
    prompts: str = "train"  # or: text, captions and descriptions that no training has seen
    compared: str = "monolith"
    after: float = 1.0  # this share of the training

    @property
    def weights(self) -> str:
        return named_after(self.model, self.after)

    @property
    def name(self) -> str:
        parts = [self.weights, self.route, "blind" if self.router == "blind" else None]
        parts += [None if self.fusion == "bridge" else self.fusion, f"g{self.guidance:g}"]
        parts += [None if self.prompts == "train" else self.prompts]
        return "-".join(part for part in parts if part)

    def key(self, seed: int) -> str:
        """In the record."""
        return f"{self.name}-s{seed}"


def named_after(model: str, share: float) -> str:
    return model if share == 1.0 else f"{model}@{share:g}"


def monolith(table: str, guidance: float = 1.0, prompts: str = "train", after: float = 1.0) -> Arm:
    return Arm(table, "monolith", guidance=guidance, router=None, prompts=prompts, after=after)


def table_a(scale: Scale) -> dict[str, list[Arm]]:
    """In parts, the most telling first."""
    guided = scale.guidances
    return {
        "main": [
            *(monolith("A", g) for g in (1.0, *guided)),
            *(Arm("A", "flow8", "top-1", g) for g in (1.0, *guided)),
            *(Arm("A", "flow8", route) for route in ("fixed", "top-2")),
        ],
        "text": [
            monolith("A", guided[-1], "text"),
            Arm("A", "flow8", "top-1", guided[-1], prompts="text"),
        ],
        "curve": [
            arm for share in CURVE for arm in (monolith("A", after=share), Arm("A", "flow8", "top-1", after=share))
        ],
        "beyond": [
            *(monolith("A", g) for g in scale.beyond),
            *(Arm("A", "flow8", "top-1", g) for g in scale.beyond),
        ],
        "branched": [*(Arm("A", "branched", "top-1", g) for g in (1.0, *guided)), Arm("A", "branched", "fixed")],
        "full": [Arm("A", "flow8", "full")],
        "blind": [Arm("A", "flow8", "top-1", router="blind")],
    }


def table_b(scale: Scale) -> dict[str, list[Arm]]:
    return {
        "main": [Arm("B", "mixed", "top-1", g, compared="flow8") for g in (1.0, *scale.guidances)],
        "fusion": [
            Arm("B", "mixed", "top-1", fusion="paper", compared="flow8"),
            *(Arm("B", "mixed", "top-2", fusion=fusion, compared="flow8") for fusion in FUSIONS),
        ],
    }


def table_c(scale: Scale) -> dict[str, list[Arm]]:
    """Networks of another width, each ensemble beside the monolith of its own size; 1 and the best guidance of A."""
    guidances = (1.0, scale.guidances[-1])
    return {
        size: [
            *(Arm("C", f"monolith-{size}", guidance=g, router=None, compared=f"monolith-{size}") for g in guidances),
            *(
                Arm("C", f"flow8-{size}", "top-1", g, router=f"router-{size}", compared=f"monolith-{size}")
                for g in guidances
            ),
        ]
        for size in ("small", "large")
    }


def table_d(scale: Scale) -> dict[str, list[Arm]]:
    routes = ("threshold-0.2", "top-3", "sampled", "nucleus-0.9")
    return {"main": [Arm("D", "flow8", route) for route in routes]}


def table_e(scale: Scale) -> dict[str, list[Arm]]:
    """Other partitions, beside the monolith: its images are as many, whatever the number of experts."""
    guidances = (1.0, scale.guidances[-1])
    return {
        name: [Arm("E", f"flow-{name}", "top-1", g, router=f"router-{name}") for g in guidances] for name in PARTITIONS
    }


def table_f(scale: Scale) -> dict[str, list[Arm]]:
    """Other mixes, beside eight flow experts; router and experts are shared wherever two have the same."""

    def parts(*models: str) -> list[Arm]:
        return [Arm("F", model, "top-1", compared="flow8") for model in models]

    return {
        "shares": parts("1ddpm:7flow", "2ddpm:6flow", "4ddpm:4flow", "8ddpm"),
        "literal": [Arm("F", m, "top-1", fusion="paper", compared="flow8") for m in ("2ddpm:6flow", "8ddpm")],
        "kinds": parts("2v:6flow", "2x0:6flow", "2edm:6flow"),
        "sizes": parts("4small:4flow"),
    } | {
        f"of-x{rate}": [
            Arm("F", f"2{kind}-x{rate}", "top-1", g, compared=f"flow8-x{rate}")
            for kind in ("ddpm", "v")
            for g in (1.0, scale.guidances[-1])
        ]
        for rate in (4, 8)
    }


def table_s(scale: Scale) -> dict[str, list[Arm]]:
    """One dense network out of eight, at one expert's cost per step; `alone` is the same compute without teachers."""
    guidances = (1.0, *scale.guidances)
    return {
        name: [Arm("S", student, guidance=g, router=None) for student in students for g in guidances]
        for name, students in {
            "main": ("student", "alone"),
            "best": ("student-best",),
            "average": ("student-average",),
        }.items()
    } | {
        # two and four times an expert's rate for twice its batch: twice is `atoll distill`'s own rate over batch. They
        # showed that the tables' rate is too low for all; students of experts at four times it came after that
        name: [Arm("S", student, guidance=g, router=None) for student in students for g in (1.0, guidances[-1])]
        for name, students in {
            "rate": ("student-best-x2", "student-best-x4"),
            "rate-alone": ("alone-x2", "alone-x4"),
            "of-x4": ("student-of-x4", "student-half-of-x4"),
            # chosen when of-x4 had been measured, and none of these
            "kinds-of-x4": ("student-ddpm-of-x4", "student-v-of-x4"),
            "more-alone": ("alone-x8", "alone-long-x4"),
            "long-of-x4": ("student-long-of-x4", "student-half-long-of-x4"),
            "x8-of-x4": ("student-half-x8-of-x4",),
            "long-kinds-of-x4": ("student-half-long-ddpm-of-x4", "student-half-long-v-of-x4"),
            # chosen when all of these had been measured
            "x8-kinds-of-x4": ("student-half-x8-ddpm-of-x4", "student-half-x8-v-of-x4"),
            # and these, when students of noise teachers had been found a little worse, first by another rule (W);
            # the control, when that was measured
            "trust-of-x4": tuple(f"student{how}-trust-ddpm-of-x4" for how in ("", "-half-x8", "-half-long")),
            "control-of-x4": tuple(f"student{how}-control-of-x4" for how in ("", "-half-x8", "-half-long")),
            "of-x8": ("student-half-x8-of-x8", "student-x8-of-x8"),
            "trust-of-x8": tuple(f"student-half-x8-{which}-of-x8" for which in ("trust-ddpm", "control")),
            # and these, when a mean of the data had been tried on digits
            "data-of-x4": tuple(f"student{how}-data-ddpm-of-x4" for how in ("", "-half-x8", "-half-long")),
            "data-control-of-x4": tuple(f"student{how}-data-control-of-x4" for how in ("", "-half-x8", "-half-long")),
            "data-of-x8": tuple(f"student-half-x8-data-{who}-of-x8" for who in ("ddpm", "control")),
            "kinds-of-x8": tuple(f"student-half-x8-{kind}-of-x8" for kind in ("ddpm", "v")),
            # and these, when one lesson in five without a prompt had been tried on digits
            "fifth-of-x4": ("student-fifth-of-x4", "student-fifth-data-ddpm-of-x4"),
            "fifth-half-x8-of-x4": ("student-half-x8-fifth-of-x4", "student-half-x8-fifth-data-ddpm-of-x4"),
            "fifth-alone": ("alone-fifth-x8",),
            "fifth-half-long-of-x4": ("student-half-long-fifth-of-x4", "student-half-long-fifth-data-ddpm-of-x4"),
            "fifth-monolith": ("monolith-fifth-x4",),
            # and these at last, for what digits' table has and this one had not
            "starts-of-x4": ("student-random-fifth-of-x4", "student-average-fifth-of-x4"),
            "samples-of-x4": ("student-samples-fifth-of-x4", "student-samples-average-fifth-of-x4"),
        }.items()
    }


def table_r(scale: Scale) -> dict[str, list[Arm]]:
    """Other learning rates. Added after table S showed that the tables' own is too low, mostly for the monolith."""
    guidances = (1.0, scale.guidances[-1])
    return {
        name: [Arm("R", name, route, g, router=router) for g in guidances]
        for name, route, router in (
            *((f"monolith-x{rate}", None, None) for rate in (4, 8, 16)),
            *((f"flow8-x{rate}", "top-1", "router") for rate in (4, 2, 8)),
        )
    }


TABLES = {
    "A": table_a,
    "B": table_b,
    "C": table_c,
    "D": table_d,
    "E": table_e,
    "F": table_f,
    "S": table_s,
    "R": table_r,
}


def schedule(
    tables: Sequence[str], seeds: Sequence[int], scale: Scale, done: Container[str] = ()
) -> list[tuple[str | Arm, int]]:
    """Models and arms: all seeds of the most telling part first, each model just before its first arm.

    Arms that are `done`, by their key in the record, are left out, and what only they need.
    """
    found: list[tuple[str | Arm, int]] = []
    seen: set[tuple[str, int]] = set()
    for asked in tables:
        table, _, only = asked.partition(".")
        for part, group in TABLES[table](scale).items():
            for seed in seeds if only in ("", part) else ():
                for arm in group:
                    if arm.key(seed) in done:
                        continue
                    for model in (*needed(arm.model), *([arm.router] if arm.route and arm.router else [])):
                        if (model, seed) not in seen:
                            seen.add((model, seed))
                            found.append((model, seed))
                    found.append((arm, seed))
    return found


# -- how much of it -----------------------------------------------------------------------------------------


def expert_network(scale: Scale, latent: tuple[int, int, int], text_width: int) -> DiTConfig:
    return DiTConfig(
        latent=latent,
        patch=scale.patch,
        width=scale.width,
        depth=scale.depth,
        heads=scale.heads,
        condition="pooled",
        text_width=text_width,
    )


def recipe(scale: Scale, *, share: float = 1.0, batch: int | None = None) -> Training:
    """An expert's steps, or a share of them (or more), with its batch or another one."""
    batch = batch or scale.batch
    images = round(scale.steps * share) * batch
    return Training(
        images=images,
        batch=batch,
        learning_rate=scale.learning_rate,
        warmup_images=round(scale.warm_up * images),
        decay="linear",
        ema_images=max(1, round(scale.average * images)),
        seed=0,
    )


def recipe_of(model: Model, scale: Scale) -> Training:
    """Of one network of a model, or of a student's part from one teacher.

    DDM's protocol: equal steps, the monolith's batch divided among the experts, so equal images however many there are.
    """
    whole = scale.batch * CLUSTERS
    if model.student:
        groups = 0 if model.alone else 1 if model.samples else CLUSTERS
        training = student_recipe(scale, groups, model.longer)
    else:
        batch = whole if model.learns == "everything" else whole // model.count
        training = recipe(scale, share=model.share, batch=batch)
    return at_rate(training, model.rate).model_copy(update={"condition_dropout": model.unprompted})


def at_rate(training: Training, times: float) -> Training:
    """The same at so many times the learning rate."""
    return training.model_copy(update={"learning_rate": times * training.learning_rate})


def student_recipe(scale: Scale, teachers: int, longer: int = 1) -> Training:
    """DDM's: an expert's steps, a quarter of the monolith's batch, of which each teacher has its part (all are one
    where states come from their samples).

    Or `longer` times an expert's steps, with the batch divided by that; of eight experts at 2 the batch is an expert's.

    A sample with a teacher costs 4 forwards of one network, one without costs 3. With no teachers the batch is a third
    of the monolith's: equal operations, equal steps.
    """
    whole = STUDENT_SHARE * scale.batch * CLUSTERS / longer
    return recipe(scale, share=longer, batch=round(whole * 3 / 4 / teachers) if teachers else round(whole))


def router_recipe(scale: Scale, expert: DiTConfig) -> Training:
    """As many images as make the router's training ROUTER_SHARE of the experts'."""
    whole = recipe(scale, batch=scale.batch * CLUSTERS).images * flops_forward(expert)
    steps = max(4, int(ROUTER_SHARE * whole / flops_forward(router_network(expert)) / scale.router_batch))
    images = steps * scale.router_batch
    return Training(
        images=images,
        batch=scale.router_batch,
        learning_rate=1e-3,
        warmup_images=images // 25,
        decay="linear",
        ema_images=max(1, images // 50),
        seed=0,
    )
