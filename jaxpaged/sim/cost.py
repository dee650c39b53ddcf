"""How long a step takes: a roofline of the bytes and operations that it needs, with constants that are fitted.

seconds = overhead + per_sequence * draws
        + max(weights / (bandwidth * weights_share), operations / (flops * compute_share))
        + KV bytes read / (bandwidth * kv_share) + operations of attention / (flops * compute_share)
        + what several devices exchange + blocks copied or swapped
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpaged.core.plan import StepPlan
from jaxpaged.sim.devices import Device
from jaxpaged.sim.shapes import ModelShape


@dataclass(frozen=True)
class StepLoad:
    """What a step computes.

    Attributes:
        tokens: of all sequences.
        draws: tokens drawn.
        context: tokens whose KV is read, summed over the sequences.
        pairs: (query token, key token) pairs of attention.
        copied_tokens: whose KV is copied on the device.
        swapped_blocks: blocks that go to the host or come back, of `block_size` tokens each.
    """

    tokens: int
    draws: int
    context: int
    pairs: int
    copied_tokens: int = 0
    swapped_blocks: int = 0
    block_size: int = 16

    @classmethod
    def of(cls, plan: StepPlan, block_size: int, extra_copied_tokens: int = 0) -> StepLoad:
        """The load of a plan of the scheduler."""
        kv_lens = plan.kv_lens
        context = pairs = int(kv_lens.sum())
        for i in range(plan.num_decodes, len(kv_lens)):
            count = int(plan.query_starts[i + 1] - plan.query_starts[i])
            length = int(kv_lens[i])
            pairs += count * length - count * (count - 1) // 2 - length
        return cls(
            plan.num_tokens,
            len(plan.sampled),
            context,
            pairs,
            len(plan.copies) * block_size + extra_copied_tokens,
            len(plan.swap_out) + len(plan.swap_in),
            block_size,
        )


@dataclass(frozen=True)
class Constants:
    """What the roofline does not know.

    The defaults are assumed, not measured; `about` says so with every result.

    Attributes:
        overhead: seconds of every step.
        per_sequence: seconds for each token drawn.
        weights_share: of the memory's bandwidth that reading weights reaches, 0 to 1.
        compute_share: of the peak operations a second.
        kv_share: of the memory's bandwidth that attention reaches.
        exchange: seconds that one exchange among several devices takes beside its bytes; there are two a layer.
        per_move: seconds that one contiguous piece takes to or from the host beside its bytes.
        error: mean of |predicted - measured| / measured over the steps of the fit; None = not fitted.
        about: where they come from.
    """

    overhead: float = 0.004
    per_sequence: float = 20e-6
    weights_share: float = 0.8
    compute_share: float = 0.55
    kv_share: float = 0.6
    exchange: float = 12e-6
    per_move: float = 10e-6
    error: float | None = None
    about: str = "assumed constants, fitted to no measurement"

    def __str__(self) -> str:
        return self.about if self.error is None else f"{self.about}; fit error {self.error:.1%} a step on average"


@dataclass(frozen=True)
class Parts:
    """Seconds of a step if the device reached its vendor's figures.

    Attributes:
        weights: to read the weights once.
        linear: operations of the layers and the output layer.
        kv: to read the KV.
        attention: operations of attention.
    """

    weights: float
    linear: float
    kv: float
    attention: float


class CostModel:
    """Seconds of each step of a model on a device."""

    def __init__(self, shape: ModelShape, device: Device, constants: Constants | None = None) -> None:
        self.shape = shape
        self.device = device
        self.constants = constants or Constants()
        self._bandwidth = device.bandwidth * device.count
        self._flops = device.flops * device.count
        self._exchanges = 2 * shape.num_layers if device.count > 1 else 0

    def parts(self, load: StepLoad) -> Parts:
        """The roofline's parts of a step."""
        shape = self.shape
        linear = 2 * (shape.matmul_params * load.tokens + shape.head_params * load.draws)
        attention = 4 * shape.attention_width * shape.num_layers * load.pairs
        return Parts(
            weights=shape.step_weights_bytes / self._bandwidth,
            linear=linear / self._flops,
            kv=load.context * shape.kv_token_bytes / self._bandwidth,
            attention=attention / self._flops,
        )

    def seconds(self, load: StepLoad) -> float:
        """Of one step."""
        c, parts = self.constants, self.parts(load)
        total = c.overhead + c.per_sequence * load.draws
        total += max(parts.weights / c.weights_share, parts.linear / c.compute_share)
        total += parts.kv / c.kv_share + parts.attention / c.compute_share
        if self._exchanges:
            total += self._exchanges * (c.exchange + self._exchanged_bytes(load) / self.device.link)
        if load.copied_tokens:  # each is read and written
            total += 2 * load.copied_tokens * self.shape.kv_token_bytes / (self._bandwidth * c.kv_share)
        if load.swapped_blocks:
            total += self.move_seconds(load.swapped_blocks, load.block_size)
        return total

    def move_seconds(self, blocks: int, block_size: int) -> float:
        """Of blocks between device and host: K and V of each layer are a piece of their own."""
        pieces = blocks * 2 * self.shape.num_layers
        num_bytes = blocks * block_size * self.shape.kv_token_bytes
        return pieces * self.constants.per_move + num_bytes / (self.device.host_link * self.device.count)

    def _exchanged_bytes(self, load: StepLoad) -> float:
        """That each device sends in one exchange of all tokens' activations (a ring: twice, but for its own part)."""
        count = self.device.count
        return 2 * (count - 1) / count * load.tokens * self.shape.hidden_size * self.shape.dtype_bytes
