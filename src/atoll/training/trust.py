"""Are the fused kernels right on this card? Asked once, at the start of a training, with its own shapes.

They were checked on one kind of card with one version of Triton. A kernel that is wrong elsewhere would not crash: it
would train a worse expert. So one block of the network, with random weights, answers a few samples and takes their
gradients with the kernels and by the plain formulas, both are compared with float32, and what is wrong is not used.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .. import kernels
from ..artifacts import UserError
from .execution import Execution, autocast
from .recipe import Training
from .step import Learner, eager

SAMPLES = 4
WEIGHT_STD = 0.05  # of the noise on the weights: fresh networks have gates of zero, behind which anything is right
SLACK = 3.0, 0.02  # a kernel may be off by three times what the plain formula is, and by 2 % of a tensor's norm
ROUNDED_SLACK = 0.15  # of a tensor's norm: numbers of three bits are off by 3 %, and several products follow another


@contextmanager
def trusted_kernels(
    learner: Learner, training: Training, execution: Execution, doubt: str | None = None
) -> Iterator[str | None]:
    """While inside, the fused kernels are on if they agree with the plain formulas; if not, a line for the user.

    They are on or off for all networks of a process, so `doubt`, such a line about others that answer meanwhile, is
    reason enough to do without them.
    """
    if doubt is None and next(learner.network.parameters()).device.type == "cuda":
        wrong = disagreements(learner, training, execution)
        kernels.Switch.on = not wrong
        doubt = told(wrong) if wrong else None
    if doubt is not None and execution.precision == "float8":
        raise UserError(f"precision float8: {doubt}; use --set precision=bfloat16")
    try:
        yield doubt
    finally:
        kernels.Switch.on = False


def told(wrong: dict[str, float]) -> str:
    """One line about what is wrong: the tensor that is furthest off, NaN being nearer than any number."""
    worst = max(wrong, key=lambda name: -1.0 if math.isnan(wrong[name]) else wrong[name])
    return f"the fused kernels are {wrong[worst]:.0%} off on this card in {worst}: computing without them, and slower"


def disagreements(learner: Learner, training: Training, execution: Execution) -> dict[str, float]:
    """Relative errors of the tensors in which the kernels are further from the truth than they may be.

    The truth is the plain formula in float32. Products in 8 bits are looked at after all else was found right.
    """
    block, inputs = one_block(learner, training, execution)
    precise = execution.model_copy(update={"precision": "float32"})
    kernels.Switch.on = False
    truth, plain = answers(block, widened(inputs), precise), answers(block, inputs, execution)
    kernels.Switch.on = True
    try:
        wrong = further_off(truth, plain, answers(block, inputs, execution))
        if not wrong and execution.precision == "float8":
            block.float8 = True  # type: ignore[assignment]
            wrong = further_off(truth, plain, answers(block, inputs, execution), ROUNDED_SLACK)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001, whatever keeps a kernel from running, a training can do without it
        return {f"all of it ({type(error).__name__})": 1.0}
    finally:
        kernels.Switch.on = False
    return wrong


def further_off(
    truth: dict[str, Tensor], plain: dict[str, Tensor], ours: dict[str, Tensor], slack: float = SLACK[1]
) -> dict[str, float]:
    """Relative errors of what is further from the truth than the plain formula is, and than it may be."""
    wrong = {}
    for name, true in truth.items():
        given = (found.get(name, torch.zeros_like(true)) for found in (ours, plain))  # no gradient is a gradient of 0
        mine, usual = ((x - true).norm().item() / max(true.norm().item(), 1e-12) for x in given)
        if not mine <= SLACK[0] * usual + slack:  # also if it is NaN
            wrong[name] = mine
    return wrong


@torch.no_grad()
def answering_disagreements(network: nn.Module, ask: Callable[[], object]) -> dict[str, float]:
    """The same for a network of bfloat16 weights that only answers: `ask` asks it about a few rows.

    The kernels then need no gradient, and GELU is part of a matrix product.
    """
    given: list[tuple[Tensor | None, ...]] = []
    blocks = network.blocks
    assert isinstance(blocks, nn.ModuleList)
    hook = blocks[0].register_forward_pre_hook(lambda _, inputs: given.append(inputs))
    ask()
    hook.remove()
    block, inputs = noisy(blocks[0]), given[0]
    h = inputs[0]
    assert h is not None

    def added(block: nn.Module, inputs: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
        # what was there before would hide an error in what is small beside it
        return {"what a block adds": block(*inputs).float() - h.float()}

    before, kernels.Switch.on = kernels.Switch.on, False
    try:
        plain, truth = added(block, inputs), added(copy.deepcopy(block).float(), widened(inputs))
        kernels.Switch.on = True
        ours = added(block, inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001, whatever keeps a kernel from running, it can be done without
        return {f"all of it ({type(error).__name__})": 1.0}
    finally:
        kernels.Switch.on = before
    return further_off(truth, plain, ours)


def widened(inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The same numbers in float32; masks stay as they are."""
    return tuple(x.float() if x is not None and x.is_floating_point() else x for x in inputs)


def one_block(
    learner: Learner, training: Training, execution: Execution
) -> tuple[nn.Module, tuple[Tensor | None, ...]]:
    """The first block with noise on its weights, and what it is given for the first samples of the training."""
    device = next(learner.network.parameters()).device
    blocks = learner.network.blocks
    assert isinstance(blocks, nn.ModuleList)
    given: list[tuple[Tensor | None, ...]] = []
    hook = blocks[0].register_forward_pre_hook(lambda _, inputs: given.append(inputs))
    drawn = learner.draw(0, training.batch, slice(0, min(SAMPLES, training.batch)))
    batch = {name: value.to(device) for name, value in drawn.items()}
    with torch.no_grad(), eager(), autocast(execution):
        learner.loss(learner.network, batch)
    hook.remove()
    return noisy(blocks[0]), given[0]


@torch.no_grad()
def noisy(block: nn.Module) -> nn.Module:
    """A copy with noise on its weights."""
    block = copy.deepcopy(block)
    device = next(block.parameters()).device
    numbers = torch.Generator(device).manual_seed(0)
    for parameter in block.parameters():
        noise = torch.randn(parameter.shape, generator=numbers, device=device, dtype=parameter.dtype)
        parameter.add_(WEIGHT_STD * noise)
    return block


def answers(block: nn.Module, inputs: tuple[Tensor | None, ...], execution: Execution) -> dict[str, Tensor]:
    """The block's answer and the gradients of its weights and first input, for a fixed random pull; float32."""
    block.zero_grad(set_to_none=True)
    h = inputs[0]
    assert h is not None
    h = h.detach().clone().requires_grad_()
    with eager():
        with autocast(execution):
            answer = block(h, *inputs[1:])
        pull = torch.randn(answer.shape, generator=torch.Generator(h.device).manual_seed(1), device=h.device)
        torch.autograd.backward(answer, pull.to(answer.dtype))
    found = {f"the gradient of {name}": parameter.grad for name, parameter in block.named_parameters()}
    found |= {"the answer": answer.detach(), "the gradient of its input": h.grad}
    return {name: value.float() for name, value in found.items() if value is not None}
