"""Methods on small arrays: exactness for equal heads, agreement with the definition."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gqaconvert.surgery.methods import METHODS, GroupContext
from gqaconvert.surgery.methods.mean import mean
from gqaconvert.surgery.pooling import WIDE_TYPES

NUMPY = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
CONTEXT = GroupContext(
    "model.layers.0.self_attn.k_proj.weight", 0, "key", seed=0, initializer_range=0.02
)


@pytest.mark.parametrize("tag", ["BF16", "F16", "F32"])
@given(data=st.data(), size=st.integers(1, 71))
@settings(max_examples=150, deadline=None)
def test_equal_heads_average_to_themselves_bit_for_bit(tag, data, size):
    kind = NUMPY[tag]
    bits = data.draw(arrays(np.dtype(f"u{kind.itemsize}"), 17))
    head = bits.view(kind)
    head = np.where(np.isfinite(head.astype(np.float64)), head, kind.type(1)).astype(kind)
    pooled = mean([head.astype(WIDE_TYPES[tag])] * size).astype(kind)
    zeros = head == kind.type(0)  # -0 averages to +0 with itself only in sign; compare values there
    assert (pooled.view(bits.dtype)[~zeros] == head.view(bits.dtype)[~zeros]).all()
    assert (pooled[zeros] == head[zeros]).all()


def test_equal_float64_heads_average_to_themselves():
    head = np.random.default_rng(0).standard_normal(1000)
    pooled = mean([head.astype(WIDE_TYPES["F64"])] * 7).astype(np.float64)
    assert (pooled == head).all()


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_mean_is_the_mean(size, seed):
    heads = list(np.random.default_rng(seed).standard_normal((size, 5, 3)))
    np.testing.assert_allclose(mean(heads), np.mean(heads, axis=0), rtol=1e-12, atol=1e-15)


def test_equal_heads_of_the_largest_bfloat16_survive_their_sum():
    largest = np.full(4, ml_dtypes.finfo(ml_dtypes.bfloat16).max, ml_dtypes.bfloat16)
    pooled = mean([largest.astype(WIDE_TYPES["BF16"])] * 57).astype(ml_dtypes.bfloat16)
    assert (pooled == largest).all()


def test_mean_leaves_its_input_alone():
    heads = [np.ones(3), np.zeros(3)]
    mean(heads)
    assert heads[0].tolist() == [1, 1, 1]


def test_first_keeps_the_first_head():
    heads = [np.full(3, 7.0), np.zeros(3)]
    assert METHODS["first"](heads, CONTEXT).tolist() == [7, 7, 7]


class TestRandom:
    heads = (np.full((64, 64), 9, np.float32),)

    def draw(self, **changes):
        fields = {field: getattr(CONTEXT, field) for field in CONTEXT.__slots__} | changes
        return METHODS["random"](self.heads, GroupContext(**fields))

    def test_follows_the_initialisation_of_the_class(self):
        drawn = self.draw()
        assert abs(drawn.std() / 0.02 - 1) < 0.05
        assert abs(drawn.mean()) < 0.001

    def test_depends_on_seed_tensor_and_group_alone(self):
        assert (self.draw() == self.draw()).all()
        for change in ({"seed": 1}, {"group": 1}, {"tensor": "other.weight"}, {"role": "value"}):
            assert (self.draw() != self.draw(**change)).mean() > 0.9

    def test_biases_are_zero_and_norm_gains_one(self):
        assert not self.draw(tensor="k_proj.bias").any()
        assert (self.draw(tensor="k_norm.weight", role="key_norm") == 1).all()
