"""What is static about one compilation of the kernel, and the constants its parts share."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._compat import cdiv, round_up
from ..api import AttentionCall
from ..tuning import Blocks

LOG2_E = math.log2(math.e)
# Stands for -inf in scores and maxima: differences of it are 0, not NaN. Real scores never come near it.
MASKED = -1e30
LANES = 128


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is static in the kernel."""

    call: AttentionCall
    blocks: Blocks
    compute_dtype: Any  # of the matrix products' operands
    interpret: bool

    @property
    def group(self) -> int:
        return self.call.num_q_heads // self.call.num_kv_heads

    @property
    def q_heads(self) -> int:
        """Query heads with those added that fill the last register of 8; a copy cannot end within one."""
        return round_up(self.call.num_q_heads, 8)

    @property
    def lane_tiles(self) -> int:
        return cdiv(self.call.head_dim, LANES)

    @property
    def lanes(self) -> int:
        return min(self.call.head_dim, LANES)

    @property
    def pages_per_block(self) -> int:
        return self.blocks.kv_tokens // self.call.page_size

    @property
    def precision(self) -> Any:
        return jax.lax.Precision.HIGHEST if self.compute_dtype == jnp.float32 else jax.lax.Precision.DEFAULT

    @property
    def ids_per_row(self) -> int:
        """Entries of a row of the page table, with those added that make it whole lanes; copies want that."""
        return round_up(self.call.pages_per_seq, LANES)
