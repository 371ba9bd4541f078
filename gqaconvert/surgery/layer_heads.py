"""The attention of one layer in one form, whatever the layout it is stored in.

Calibrated methods work on this form; how a checkpoint stores it is `surgery.layer_tensors`' affair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class KeyFreedom:
    """What the position encoding and norms leave free in the keys of a head.

    Attributes:
        planes: (P, 2) pairs of dimensions that RoPE turns together: a key may be multiplied by one
            complex number a plane.
        free: (F,) dimensions without position: a key may be multiplied by any invertible matrix
            among them.
        fixed: why keys may not be changed at all beyond moving heads ("per-head key norm", ...);
            None where planes and free dimensions say it.
        angles: (P,) radians that RoPE turns each plane by from one token to the next; None where
            unknown. With them slow planes may mix as far as distances allow.
    """

    planes: NDArray[np.intp]
    free: NDArray[np.intp]
    fixed: str | None = None
    angles: Floats | None = None


@dataclass(frozen=True)
class LayerHeads:
    """Projections of one attention block, head by head.

    Query head h reads KV head h // (H // K). Inputs are extended by a constant 1, so the last
    column of q, k and v is the bias (zero where there is none).

    Attributes:
        query: (H, D, M+1).
        key: (K, D, M+1).
        value: (K, Dv, M+1).
        output: (M, H, Dv): columns of the output projection; its bias never changes and is left
            out.
        has_bias: which of query, key and value are stored with a bias; a method must leave the
            others' last column zero or say that it cannot.
        freedom: of the keys.
    """

    query: Floats
    key: Floats
    value: Floats
    output: Floats
    has_bias: tuple[bool, bool, bool]
    freedom: KeyFreedom

    @property
    def num_heads(self) -> int:
        """Query heads H."""
        return int(self.query.shape[0])

    @property
    def num_kv_heads(self) -> int:
        """KV heads K."""
        return int(self.key.shape[0])


@dataclass(frozen=True)
class LayerStatistics:
    """Second moments of one layer's attention input x, extended by a constant 1.

    Attributes:
        inputs: (M+1, M+1): E[x xᵀ] over tokens.
        averaged: (M+1, M+1): E[z zᵀ], z_i = Σ_j a_ij x_j, averaged over query heads; None where it
            was not gathered.
        attended: (M+1, M+1): E Σ_j a_ij x_j x_jᵀ, averaged over query heads; None where it was not
            gathered.
        tokens: how many tokens they were taken over.
    """

    inputs: Floats
    averaged: Floats | None
    attended: Floats | None
    tokens: int


@dataclass(frozen=True)
class LayerReport:
    """What pooling one layer keeps and loses, before anything is written.

    Attributes:
        groups: source KV heads of each shared head, in output order.
        key_energy_lost: share of the keys' weighted energy that the shared keys do not hold, 0..1.
        value_energy_lost: the same of the values.
        output_error: expected squared error of the attention output that comes from the values,
            relative to the output's mean square; None where it cannot be told.
        notes: what could not be done here and what was done instead, in words.
    """

    groups: tuple[tuple[int, ...], ...]
    key_energy_lost: float
    value_energy_lost: float
    output_error: float | None
    notes: tuple[str, ...] = ()
