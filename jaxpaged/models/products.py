"""How a decoder multiplies activations by weights: what its caller decides and the families need not know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpaged.models.layers import Linear, Matrix, RMSNorm
from jaxpaged_kernels import linear


@partial(jax.tree_util.register_dataclass, data_fields=["num_tokens"], meta_fields=["implementation"])
@dataclass(frozen=True)
class Products:
    """How, as arguments of `jaxpaged_kernels.linear`.

    Attributes:
        num_tokens: [] int32, of a batch that is padded; results of padding are then anything. None = not padded.
        implementation: of `jaxpaged_kernels.linear`.
    """

    num_tokens: jax.Array | None = None
    implementation: str = "xla"

    def project(
        self,
        x: jax.Array,
        *layers: Linear,
        norm: RMSNorm | None = None,
        swiglu: bool = False,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """x [T, in] through `layers`, one result each; with `norm`, x is normalized first."""
        return linear(
            x,
            [layer.matrix() for layer in layers],
            [None if layer.bias is None else layer.bias[...] for layer in layers],
            norm=None if norm is None else norm.weight[...],
            eps=0.0 if norm is None else norm.eps,
            swiglu=swiglu,
            residual=residual,
            num_tokens=self.num_tokens,
            implementation=self.implementation,
        )

    def logits(self, hidden: jax.Array, head: Matrix) -> jax.Array:
        """Hidden states [N, E], none of them padding, times the head's weight [V, E] -> [N, V] float32."""
        (logits,) = linear(hidden, [head.matrix()], out_dtype=jnp.float32, implementation=self.implementation)
        return logits


# Runs on every device and can be differentiated.
PLAIN_PRODUCTS = Products()
