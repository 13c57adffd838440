"""The backbone: a diffusion transformer, complete in one file.

    noisy latent + time + condition  ->  one prediction per latent value

Two ways to let time steer a block (`variant`):
  adaln         DiT: every block has its own map from the conditioning vector to six vectors
  adaln-single  PixArt-alpha: one map for all blocks, plus one learned table of six vectors per block
and five things to be conditioned on (`condition`):
  none    nothing
  labels  one class per image, added to the time embedding
  words   word ids; the mean of the network's own word vectors, added to the time embedding
  pooled  one text vector per image, projected and added to the time embedding
  tokens  text token embeddings, read by cross-attention in every block

Shapes: B images, C x H x W latent, p patch, N = (H/p)(W/p) image tokens, D width, L text tokens.
No loss, no device policy: what the numbers mean is diffusion/'s business, where they live the caller's.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import kernels
from ..diffusion.condition import Condition

TIME_FREQUENCIES = 256
LONGEST_PERIOD = 10_000.0
NORM_EPS = 1e-6


def option(help: str, default: Any = MISSING) -> Any:
    """A field with a line of help."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Everything that decides the weights' shapes and the function they compute."""

    latent: tuple[int, int, int] = option("channels, height, width: as the data has them")
    patch: int = option("side of the squares of the latent that become tokens")
    width: int = option("values of a token")
    depth: int = option("transformer blocks")
    heads: int = option("attention heads; they divide the width")
    mlp_ratio: float = option("width of a block's MLP, in widths of a token", 4.0)
    variant: Literal["adaln", "adaln-single"] = option(
        "how time steers a block: as in DiT, or in PixArt", "adaln-single"
    )
    condition: Literal["none", "labels", "words", "pooled", "tokens"] = option("what it reads of an image", "none")
    classes: int | None = option("of condition labels: how many", None)
    vocabulary: int | None = option("of condition words: how many", None)
    text_width: int | None = option("of pooled and tokens: width of an embedding", None)
    text_length: int | None = option("of tokens: text tokens per image; of words: at most", None)
    positions: Literal["sincos", "learned"] = option("where a token lies: waves, or learned vectors", "sincos")
    position_scale: float = option("divides grid coordinates (PixArt at 1024 px: 2)", 1.0)
    qk_norm: bool = option("normalize queries and keys: steadier in bfloat16", False)
    activation: Literal["gelu-tanh", "silu"] = option("between the layers of a block's MLP", "gelu-tanh")
    out_channels: int | None = option("channels of the output; none: the latent's", None)
    frequency_shift: Literal[0, 1] = option("of time frequencies; 1 in diffusers' DiT", 0)
    mlp_norm_eps: float = option("of the norm before an MLP; 1e-5 in diffusers' DiT", NORM_EPS)
    time_scale: float = option("the network reads time_scale * t; 1 for a SiT", 999.0)

    def __post_init__(self) -> None:
        channels, height, width = self.latent
        if min(channels, height, width, self.patch, self.width, self.depth, self.heads) < 1:
            raise ValueError("latent, patch, width, depth and heads must all be at least 1")
        if height % self.patch or width % self.patch:
            raise ValueError(f"patch {self.patch} does not divide the latent {height}x{width}; use a smaller patch")
        if self.width % self.heads:
            raise ValueError(f"heads {self.heads} does not divide width {self.width}; change one of them")
        if self.width % 4:
            raise ValueError(f"width {self.width} must be a multiple of 4: a sine and a cosine for each of two axes")
        for name in ("mlp_ratio", "position_scale", "mlp_norm_eps", "time_scale"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)}")
        if self.out_channels is not None and self.out_channels < 1:
            raise ValueError(f"out_channels must be at least 1, got {self.out_channels}")
        self._check_choices()
        self._check_condition()

    def _check_choices(self) -> None:
        for name, hint in get_type_hints(DiTConfig).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ValueError(f"{name} must be one of {list(get_args(hint))}, got {getattr(self, name)!r}")

    def _check_condition(self) -> None:
        needs = {"labels": ["classes"], "words": ["vocabulary"], "pooled": ["text_width"]}.get(self.condition, [])
        if self.condition == "tokens":
            needs = ["text_width", "text_length"]
        for name in ("classes", "vocabulary", "text_width", "text_length"):
            value = getattr(self, name)
            if name in needs and (value is None or value < 1):
                raise ValueError(f"condition {self.condition!r} needs {name} of at least 1, got {value}")
            if name not in needs and value is not None and (self.condition, name) != ("words", "text_length"):
                raise ValueError(f"{name} {value} has no meaning for condition {self.condition!r}; leave it out")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.latent[1] // self.patch, self.latent[2] // self.patch

    @property
    def image_tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def mlp_width(self) -> int:
        return round(self.width * self.mlp_ratio)

    @property
    def channels_out(self) -> int:
        return self.latent[0] if self.out_channels is None else self.out_channels


class DiT(nn.Module):
    """The network of one expert: (x [B, C, H, W], time [B], condition) -> [B, channels_out, H, W].

    `time` is time_scale * t.
    """

    def __init__(self, config: DiTConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.patches = Patches(config)
        self.conditioning = Conditioning(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.head = Head(config)
        initialize(self, config, generator)

    def forward(self, x: Tensor, time: Tensor, condition: Condition | None = None) -> Tensor:
        vector, signal, text, mask = self.conditioning(time, condition)
        h = self.patches(x)
        for block in self.blocks:
            h = block(h, signal, text, mask)
        return self._to_latent(self.head(h, vector)).to(x.dtype)

    def _to_latent(self, h: Tensor) -> Tensor:
        """[B, N, p p C'] -> [B, C', H, W]; within a patch: row, column, channel."""
        (rows, columns), p, channels = self.config.grid, self.config.patch, self.config.channels_out
        h = h.reshape(-1, rows, columns, p, p, channels)
        return h.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, rows * p, columns * p)


class Patches(nn.Module):
    """Latent [B, C, H, W] -> tokens [B, N, D]: cut into patches, project, add positions."""

    positions: Tensor

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.latent, self.patch, self.grid = tuple(config.latent), config.patch, config.grid
        self.project = nn.Linear(config.latent[0] * config.patch**2, config.width)
        table = sincos_positions(config.grid, config.width, config.position_scale)
        if config.positions == "learned":
            self.positions = nn.Parameter(table)  # learning starts from the fixed table
        else:
            self.register_buffer("positions", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.latent:
            raise ValueError(f"this network takes latents of shape {list(self.latent)}, got {list(x.shape[1:])}")
        (rows, columns), p = self.grid, self.patch
        x = x.reshape(len(x), -1, rows, p, columns, p).permute(0, 2, 4, 1, 3, 5)  # B, rows, columns, C, p, p
        h: Tensor = self.project(x.reshape(len(x), rows * columns, -1).to(self.project.weight.dtype))
        return h + self.positions.to(h.dtype)


class Conditioning(nn.Module):
    """Time and condition -> what the blocks read.

    vector  [B, D]       time embedding + label, words or pooled text: the head reads it
    signal  [B, D] for adaln (SiLU of the vector), [6, B, D] for adaln-single (the shared map)
    text    [B, L, D] and mask [B, 1, 1, L] for `tokens`, else None
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.time = Projection(TIME_FREQUENCIES, width, nn.SiLU())
        if config.variant == "adaln-single":
            self.modulation = nn.Linear(width, 6 * width)
        if config.condition == "labels":
            assert config.classes is not None
            self.labels = embedding(config.classes + 1, width)  # the last row is the null label
        elif config.condition == "words":
            assert config.vocabulary is not None
            self.words = embedding(config.vocabulary + 1, width)  # the last row is the null word
        elif config.condition in ("pooled", "tokens"):
            assert config.text_width is not None
            length = (config.text_length,) if config.condition == "tokens" else ()
            self.text = Projection(config.text_width, width, nn.GELU(approximate="tanh"))
            self.null_text = nn.Parameter(torch.empty(*length, config.text_width))

    def forward(self, time: Tensor, condition: Condition | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        # float32 always, and no buffer that `.bfloat16()` would round: these are sines of large numbers
        angles = time.to(torch.float32)[:, None] * time_frequencies(self.config.frequency_shift, time.device)
        waves = torch.cat([angles.cos(), angles.sin()], dim=1)
        vector = self.time(waves.to(self.time.enter.weight.dtype))

        text = mask = None
        match self.config.condition:
            case "labels":
                vector = vector + self._label(condition)
            case "words":
                vector = vector + self._words(condition)
            case "pooled":
                vector = vector + self._pooled(condition)
            case "tokens":
                text, mask = self._tokens(condition)

        signal = F.silu(vector)
        if self.config.variant == "adaln-single":
            # six tables of vectors, each in one piece: a kernel that reads one of them copies nothing
            signal = self.modulation(signal).unflatten(1, (6, self.config.width)).transpose(0, 1).contiguous()
        return vector, signal, text, mask

    def _label(self, condition: Condition | None) -> Tensor:
        condition, labels = self._require("labels", condition)
        missing = labels < 0  # -1 says that the image has no label
        if condition.dropped is not None:
            missing = missing | condition.dropped
        embedded: Tensor = self.labels(labels.masked_fill(missing, self.labels.num_embeddings - 1))
        return embedded

    def _words(self, condition: Condition | None) -> Tensor:
        """Mean of the word vectors of a caption; no words at all is the null caption."""
        condition, words = self._require("tokens", condition)
        longest = self.config.text_length
        if words.is_floating_point() or words.ndim != 2 or (longest is not None and words.shape[1] > longest):
            raise ValueError(
                f"condition 'words' takes int64 word ids [B, {longest or 'L'}], got {words.dtype} {list(words.shape)}"
            )
        present = torch.ones_like(words, dtype=torch.bool) if condition.mask is None else condition.mask
        null = ~present.any(1)
        if condition.dropped is not None:
            null = null | condition.dropped
        words = words.masked_fill(null[:, None], self.words.num_embeddings - 1)
        weights = (present | null[:, None]).to(self.words.weight.dtype)
        weights = weights / weights.sum(1, keepdim=True)
        return torch.bmm(weights[:, None], self.words(words)).squeeze(1)  # [B, 1, L] @ [B, L, D]

    def _pooled(self, condition: Condition | None) -> Tensor:
        condition, pooled = self._require("pooled", condition)
        self._check_width(pooled, (self.config.text_width,))
        pooled = pooled.to(self.null_text.dtype)
        if condition.dropped is not None:
            pooled = torch.where(condition.dropped[:, None], self.null_text, pooled)
        projected: Tensor = self.text(pooled)
        return projected

    def _tokens(self, condition: Condition | None) -> tuple[Tensor, Tensor | None]:
        """Projected text tokens and their attention mask. A caption without tokens is the null caption."""
        condition, tokens = self._require("tokens", condition)
        self._check_width(tokens, (self.config.text_length, self.config.text_width))
        tokens = tokens.to(self.null_text.dtype)
        null, mask = condition.dropped, condition.mask
        if mask is not None:
            empty = ~mask.any(1)
            null = empty if null is None else null | empty
            mask = (mask | null[:, None])[:, None, None]  # the null caption is read whole
        if null is not None:
            tokens = torch.where(null[:, None, None], self.null_text, tokens)
        return self.text(tokens), mask

    def _require(self, field: str, condition: Condition | None) -> tuple[Condition, Tensor]:
        value = None if condition is None else getattr(condition, field)
        if condition is None or value is None:
            raise ValueError(
                f"this network is conditioned on {self.config.condition} and needs Condition.{field}; "
                "for an unconditional call pass condition.null()"
            )
        return condition, value

    def _check_width(self, text: Tensor, wanted: tuple[int | None, ...]) -> None:
        if tuple(text.shape[1:]) != wanted:
            raise ValueError(
                f"this network takes text of shape [B, {', '.join(map(str, wanted))}], got {list(text.shape)}"
            )


class Block(nn.Module):
    """Attention, cross-attention for text tokens, MLP; shifted, scaled and gated by time and condition.

    With `recompute` it keeps its input alone and computes its activations again in the backward pass; that changes
    memory and speed, not the result. `fused`, here and in other modules: see kernel_check.py.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.recompute = False
        self.fused = False
        self.config = config
        width = config.width
        self.attention = SelfAttention(width, config.heads, config.qk_norm)
        self.cross = CrossAttention(width, config.heads, config.qk_norm) if config.condition == "tokens" else None
        activation = nn.GELU(approximate="tanh") if config.activation == "gelu-tanh" else nn.SiLU()
        self.mlp = Projection(width, width, activation, hidden=config.mlp_width)
        if config.variant == "adaln":
            self.modulation = nn.Linear(width, 6 * width)
            self.table = None
        else:
            self.table = nn.Parameter(torch.empty(6, width))

    def forward(self, h: Tensor, signal: Tensor, text: Tensor | None, mask: Tensor | None) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            output: Tensor = checkpoint(
                self._compute, h, signal, text, mask, use_reentrant=False, preserve_rng_state=False
            )
            return output
        return self._compute(h, signal, text, mask)

    def _compute(self, h: Tensor, signal: Tensor, text: Tensor | None, mask: Tensor | None) -> Tensor:
        if self.table is None:
            six = self.modulation(signal).unflatten(1, (6, 1, self.config.width)).transpose(0, 1)
        else:
            six = (signal + self.table[:, None])[:, :, None]
        # autocast adds a float32 table in float32; tokens of that type would double every pass over them
        vectors = six.to(h.dtype).unbind(0)  # each [B, 1, D]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = vectors
        y = norm_modulate(h, shift, scale, NORM_EPS, self.fused)
        h = gated_add(h, gate, self.attention(y), self.fused)
        if self.cross is not None:
            h = h + self.cross(h, text, mask)
        y = norm_modulate(h, mlp_shift, mlp_scale, self.config.mlp_norm_eps, self.fused)
        return gated_add(h, mlp_gate, self.mlp(y), self.fused)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.fused = False
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = HeadNorm(width // heads) if qk_norm else None
        self.out = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        """[B, N, D] -> [B, N, D]."""
        qkv = self.qkv(h)
        if self.fused and self.norm is None and kernels.can_attend(qkv, None, self.heads):
            fused: Tensor = self.out(kernels.attend(qkv, None, None, self.heads))
            return fused
        q, k, v = split_heads(qkv, 3, self.heads)
        if self.norm is not None:
            q, k = self.norm(q, k)
        output: Tensor = self.out(join_heads(F.scaled_dot_product_attention(q, k, v)))
        return output


class CrossAttention(nn.Module):
    """Image tokens [B, N, D] read text tokens [B, L, D]; mask [B, 1, 1, L] is True where text is."""

    def __init__(self, width: int, heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.fused = False
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.norm = HeadNorm(width // heads) if qk_norm else None
        self.out = nn.Linear(width, width)

    def forward(self, h: Tensor, text: Tensor, mask: Tensor | None) -> Tensor:
        q, kv = self.q(h), self.kv(text)
        if self.fused and self.norm is None and kernels.can_attend(q, kv, self.heads):
            fused: Tensor = self.out(kernels.attend(q, kv, None if mask is None else mask.flatten(1), self.heads))
            return fused
        if mask is not None and h.is_cuda:
            # torch copies a mask whose rows are not aligned, in every block; padding is masked
            missing = -text.shape[1] % 16
            kv, mask = F.pad(kv, (0, 0, 0, missing)), F.pad(mask, (0, missing))
        (q,) = split_heads(q, 1, self.heads)
        k, v = split_heads(kv, 2, self.heads)
        if self.norm is not None:
            q, k = self.norm(q, k)
        output: Tensor = self.out(join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
        return output


class HeadNorm(nn.Module):
    """RMS norm of queries and keys within each head: keeps logits bounded in low precision."""

    def __init__(self, head_width: int) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.ones(head_width))
        self.k = nn.Parameter(torch.ones(head_width))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (
            F.rms_norm(q, self.q.shape, self.q.to(q.dtype), NORM_EPS),
            F.rms_norm(k, self.k.shape, self.k.to(k.dtype), NORM_EPS),
        )


class Head(nn.Module):
    """Tokens [B, N, D] + conditioning vector [B, D] -> patches [B, N, p p C']."""

    def __init__(self, config: DiTConfig, outputs: int | None = None) -> None:
        super().__init__()
        self.fused = False
        width = config.width
        if config.variant == "adaln":
            self.modulation = nn.Linear(width, 2 * width)
            self.table = None
        else:
            self.table = nn.Parameter(torch.empty(2, width))
        self.project = nn.Linear(width, config.patch**2 * config.channels_out if outputs is None else outputs)

    def forward(self, h: Tensor, vector: Tensor) -> Tensor:
        if self.table is None:
            two = self.modulation(F.silu(vector)).unflatten(1, (2, 1, -1))
        else:
            two = (vector[:, None] + self.table)[:, :, None]
        shift, scale = two.to(h.dtype).unbind(1)
        patches: Tensor = self.project(norm_modulate(h, shift, scale, NORM_EPS, self.fused))
        return patches


class Projection(nn.Module):
    """Linear, activation, linear."""

    def __init__(self, inputs: int, outputs: int, activation: nn.Module, hidden: int | None = None) -> None:
        super().__init__()
        hidden = outputs if hidden is None else hidden
        self.enter = nn.Linear(inputs, hidden)
        self.activation = activation
        self.leave = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.leave(self.activation(self.enter(x)))
        return y


def norm_modulate(h: Tensor, shift: Tensor, scale: Tensor, eps: float, fused: bool = False) -> Tensor:
    """LayerNorm(h) (1 + scale) + shift, with shift and scale [B, 1, D]. Its kernel has no gradient."""
    if fused and not torch.is_grad_enabled() and kernels.available(h):
        return kernels.norm_modulate(h, shift, scale, eps)
    return torch.addcmul(shift, F.layer_norm(h, h.shape[-1:], eps=eps), 1.0 + scale)


def gated_add(h: Tensor, gate: Tensor, branch: Tensor, fused: bool = False) -> Tensor:
    """h + gate branch, with gate [B, 1, D]. Its kernel has no gradient."""
    if fused and not torch.is_grad_enabled() and kernels.available(h):
        return kernels.gated_add(h, gate, branch)
    return torch.addcmul(h, gate, branch)


def embedding(rows: int, width: int) -> nn.Embedding:
    """Not drawn yet: initialize() does. On the meta device torch would load its compiler to draw."""
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
    return table


def split_heads(h: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """[B, N, parts D] -> `parts` tensors [B, heads, N, D / heads]."""
    return h.reshape(*h.shape[:2], parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def join_heads(h: Tensor) -> Tensor:
    """[B, heads, N, D / heads] -> [B, N, D]."""
    return h.transpose(1, 2).flatten(2)


def time_frequencies(shift: int, device: torch.device) -> Tensor:
    """Angular frequencies of the time embedding, falling from 1 to about 1/10000: float32 [128]."""
    half = TIME_FREQUENCIES // 2
    steps = torch.arange(half, dtype=torch.float32, device=device)
    return torch.exp(-math.log(LONGEST_PERIOD) * steps / (half - shift))


def sincos_positions(grid: tuple[int, int], width: int, scale: float) -> Tensor:
    """Fixed 2-D positions [N, D]: the first half of D encodes the column, the second the row.

    On the CPU even where modules are built on the meta device, since no checkpoint holds this table.
    """
    rows, columns = (torch.arange(n, dtype=torch.float64, device="cpu") / scale for n in grid)
    frequencies = LONGEST_PERIOD ** -(torch.arange(width // 4, dtype=torch.float64, device="cpu") / (width // 4))

    def encode(places: Tensor) -> Tensor:
        angles = places[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1)  # [n, D / 2]

    by_column = encode(columns)[None].expand(len(rows), -1, -1)
    by_row = encode(rows)[:, None].expand(-1, len(columns), -1)
    return torch.cat([by_column, by_row], dim=2).flatten(0, 1).float()


@torch.no_grad()
def initialize(network: nn.Module, config: DiTConfig, generator: torch.Generator | None) -> None:
    """Fresh weights as DiT and PixArt-alpha start: the network's first output is zero.

    DiT also starts every block as the identity (zero modulation); PixArt's blocks start active (random
    tables), but with silent cross-attention.
    """
    if network.patches.project.weight.is_meta:  # type: ignore[union-attr]
        return  # there is nothing to draw, and torch would load its compiler for it
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=generator)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02, generator=generator)

    for module in network.modules():
        if isinstance(module, Conditioning):
            quiet = [module.time.enter, module.time.leave]
            if config.variant == "adaln-single":
                quiet.append(module.modulation)
            if config.condition in ("pooled", "tokens"):
                quiet += [module.text.enter, module.text.leave]
                assert config.text_width is not None
                nn.init.normal_(module.null_text, std=config.text_width**-0.5, generator=generator)
            for linear in quiet:
                nn.init.normal_(linear.weight, std=0.02, generator=generator)
        elif isinstance(module, CrossAttention):
            nn.init.zeros_(module.out.weight)
        elif isinstance(module, Head):
            nn.init.zeros_(module.project.weight)
        if isinstance(module, Block | Head):
            if module.table is None:
                nn.init.zeros_(module.modulation.weight)
            else:
                nn.init.normal_(module.table, std=config.width**-0.5, generator=generator)
