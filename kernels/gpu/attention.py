"""The kernel: tiles of queries over runs of paged keys and values, on Hopper's tensor cores.

A thread block runs on one SM and works through units: a work item (`work.py`) and one KV head. The queries of the
item's tokens that share the head are packed into rows, 64 to a warpgroup: row `i` of warpgroup `w` is token
`w * (64 / group) + i // group` of the item, head `i % group` of the group. So decoding and prefill are one kernel
that differs in its work items, and query heads that share keys read them once.

    producer warpgroup    page ids -> TMA copies of K and V blocks into a ring in shared memory, `stages` ahead, on
                          into the next unit; and the next unit's queries
    converter, if any     8-bit K and V -> what the queries are, in a ring of its own (`convert.py`)
    each consumer         S = Q K^T (wgmma), online softmax in float32, O += P V (wgmma)

The online softmax is that of FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 3.1); the producer and its ring
are those of FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608, section 3.1).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _compat, convert
from .tiles import ROWS, Tiles, swizzle_bytes
from .work import Item, KvBlocks, Work

_LOG2_E = math.log2(math.e)
_COPIERS = 2  # warps of the producer that copy K; as many copy V
_MATRIX = plgpu.Layout.WGMMA
_COLUMN = plgpu.Layout.WGMMA.reduce(1)


class _Refs(NamedTuple):
    """What the kernel is given: operands and results in global memory, then scratch in shared memory."""

    items: Any  # i32[max_items, len(Item)]
    num_items: Any  # i32[1]
    page_indices: Any  # i32[max_seqs, pages_per_seq]
    scales: Any  # f32[2]
    q: Any  # [max_tokens, num_kv_heads * group, head_dim]
    kv_pages: Any  # [num_pages, page_size, 2 * num_kv_heads, head_dim]
    out: Any
    lse: Any
    q_stage: Any  # [consumers, tokens, group, head_dim], as it lies in global memory
    q_rows: Any  # [consumers, ROWS, head_dim], as wgmma reads it
    out_stage: Any  # as q_stage
    k: Any  # [ring, block_kv, head_dim], as wgmma reads it
    v: Any
    q_ready: Any  # barriers: one per consumer
    q_free: Any
    k_ready: Any  # one per entry of the ring
    k_free: Any
    v_ready: Any
    v_free: Any
    v_clean: Any = None  # one, of the consumers, where they clean values
    fetched_k: Any = None  # [stages, block_kv, head_dim] in 8 bits, and its barriers, where there is a converter
    fetched_v: Any = None
    fetched_k_ready: Any = None
    fetched_k_free: Any = None
    fetched_v_ready: Any = None
    fetched_v_free: Any = None


class _Unit(NamedTuple):
    """What a thread block does next: i32 scalars."""

    items: Any  # the table
    number: jax.Array  # of units that the thread block did before
    item: jax.Array
    head: jax.Array  # of the KV heads
    blocks_before: jax.Array  # entries of the ring that its earlier units took

    def read(self, column: Item) -> jax.Array:
        """A column of the item. Read where it is used: held through the loops it would cost registers."""
        return self.items[self.item, column]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All that is static about a launch.

    `one_token`: items are of one token. `partial_output`: they may be parts of one token's keys, so each has its own
    output, in float32.
    """

    name: str
    tiles: Tiles
    group: int  # query heads to a KV head, a power of two
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_tokens: int
    dtype: jnp.dtype  # of the queries and the output
    kv_dtype: jnp.dtype  # the same, or of 8 bits
    one_token: bool
    partial_output: bool
    causal: bool
    sliding_window: int | None
    soft_cap: float | None
    interpret: Any

    @property
    def tokens(self) -> int:
        """Tokens whose rows one warpgroup takes."""
        return ROWS // self.group

    @property
    def tokens_per_item(self) -> int:
        return self.tiles.consumers * self.tokens

    @property
    def smem_bytes(self) -> int:
        return self.tiles.smem_bytes(self.head_dim, self.dtype.itemsize, self.kv_dtype.itemsize)

    @property
    def bytes_in_flight(self) -> int:
        return self.tiles.bytes_in_flight(self.head_dim, self.kv_dtype.itemsize)

    @property
    def warpgroups(self) -> int:
        """Consumers, then the producer, then the converter if there is one."""
        return self.tiles.consumers + (2 if self.tiles.converted else 1)

    @property
    def ring(self) -> int:
        """Entries of the ring that consumers read."""
        return self.tiles.converted or self.tiles.stages

    @property
    def _pages_per_block(self) -> int:
        """Each is one copy, and each copy one arrival."""
        return max(self.tiles.block_kv // self.page_size, 1)

    @property
    def kv_blocks(self) -> KvBlocks:
        return KvBlocks(self.tiles.block_kv, self.page_size, self.causal, self.sliding_window)

    def __call__(
        self, work: Work, page_indices: jax.Array, scales: jax.Array, q: jax.Array, kv_pages: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Runs it.

        Args:
            page_indices: i32[max_seqs, pages_per_seq].
            scales: f32[2], what multiplies the logits, and what multiplies the output.
            q: bf16|f16[max_tokens, num_kv_heads * group, head_dim].
            kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim].

        Returns:
            out, of q's shape and dtype, written where an item's tokens are; or, if partial,
                f32[max_items, num_kv_heads, consumers * ROWS, head_dim].
            lse, f32[max_items, num_kv_heads, consumers * ROWS]: natural logs. Rows beyond an item's tokens, and
                items from num_items on, are arbitrary in both.
        """
        call = plgpu.kernel(
            self._body,
            out_type=self.results(work.items.shape[0]),
            scratch_types=tuple(self._scratch().values()),
            grid=(self.tiles.num_blocks,),
            grid_names=("block",),
            num_threads=self.warpgroups,
            thread_name="warpgroup",
            kernel_name=self.name,
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=self.interpret,
        )
        out, lse = call(*work, page_indices, self.in_powers_of_two(scales), q, kv_pages)
        return out, lse

    def results(self, max_items: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of out and lse."""
        slots = (max_items, self.num_kv_heads, self.tiles.consumers * ROWS)
        out = jax.ShapeDtypeStruct((*slots, self.head_dim), jnp.float32)
        if not self.partial_output:
            heads = self.num_kv_heads * self.group
            out = jax.ShapeDtypeStruct((self.max_tokens, heads, self.head_dim), self.dtype)
        return out, jax.ShapeDtypeStruct(slots, jnp.float32)

    def in_powers_of_two(self, scales: jax.Array) -> jax.Array:
        """The scales as the kernel uses them: powers are of two inside, but a soft cap needs natural logits first."""
        return scales * jnp.asarray([_LOG2_E if self.soft_cap is None else 1.0, 1.0], jnp.float32)

    def _scratch(self) -> dict[str, Any]:
        """What is in shared memory, in this order: with K before the queries, heads of 256 spill 68 bytes."""
        t = self.tiles
        stage = plgpu.SMEM((t.consumers, self.tokens, self.group, self.head_dim), self.dtype)
        kv = self._swizzled((self.ring, t.block_kv), self.dtype)
        barrier = partial(plgpu.Barrier, num_barriers=self.ring)
        ready = barrier(num_arrivals=1 if t.converted else self._pages_per_block)
        free = barrier(num_arrivals=t.consumers)
        scratch = {
            "q_stage": stage,
            "q_rows": self._swizzled((t.consumers, ROWS), self.dtype),
            "out_stage": stage,
            "k": kv,
            "v": kv,
            "q_ready": plgpu.Barrier(num_barriers=t.consumers),
            "q_free": plgpu.Barrier(num_barriers=t.consumers),
            "k_ready": ready,
            "k_free": free,
            "v_ready": ready,
            "v_free": free,
        }
        if not t.converted:
            return scratch | {"v_clean": plgpu.Barrier(num_arrivals=t.consumers)}
        for ring in ("fetched_k", "fetched_v"):
            scratch |= {
                ring: self._swizzled((t.stages, t.block_kv), self.kv_dtype),
                f"{ring}_ready": plgpu.Barrier(num_arrivals=self._pages_per_block, num_barriers=t.stages),
                f"{ring}_free": plgpu.Barrier(num_barriers=t.stages),
            }
        # Alphabetical: of the orders tried this one spills nothing with heads of 256; the other spills 12 bytes.
        return dict(sorted(scratch.items()))

    def _swizzled(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
        transforms = _compat.swizzled(swizzle_bytes(self.head_dim, dtype.itemsize), dtype.itemsize)
        return plgpu.SMEM((*shape, self.head_dim), dtype, transforms=transforms)

    def _body(self, *args: Any) -> None:
        names = self._scratch()
        refs = _Refs(*args[: -len(names)], **dict(zip(names, args[-len(names) :])))
        warpgroup, consumers = lax.axis_index("warpgroup"), self.tiles.consumers
        pl.when(warpgroup == consumers)(partial(self._be_producer, refs))
        if self.tiles.converted:
            pl.when(warpgroup == consumers + 1)(partial(self._be_converter, refs))
        pl.when(warpgroup < consumers)(partial(self._be_consumer, refs, warpgroup))

    def _be_consumer(self, refs: _Refs, w: jax.Array) -> None:
        plgpu.set_max_registers(self._registers.consumer, action="increase")
        self._for_each_unit(refs, partial(self._consume, refs, w))
        if not self.partial_output:
            plgpu.wait_smem_to_gmem(0)

    def _be_producer(self, refs: _Refs) -> None:
        plgpu.set_max_registers(self._registers.producer, action="decrease")

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            units, blocks = self._for_each_unit(refs, partial(self._produce, refs, warp))
            if self.interpret:
                for w in range(self.tiles.consumers):
                    pl.when((units > 0) & (warp == w))(partial(_wait, refs, "q_free", w))
                for is_v, ring in enumerate(self._fetched):
                    pl.when(self._copies(warp, is_v))(
                        partial(self._see_last_arrivals, refs, ring, blocks, self.tiles.stages)
                    )

    def _be_converter(self, refs: _Refs) -> None:
        num = self._registers.converter
        plgpu.set_max_registers(num, action="decrease" if num < 128 else "increase")
        _, blocks = self._for_each_unit(refs, partial(self._convert, refs))
        if self.interpret:
            for ring in ("k", "v"):
                self._see_last_arrivals(refs, ring, blocks, self.ring)

    @property
    def _registers(self) -> "_Registers":
        return _REGISTERS[self.warpgroups, self.tiles.consumers]

    def _see_last_arrivals(self, refs: _Refs, ring: str, blocks: jax.Array, entries: int) -> None:
        """Waits until what was last in a ring is used: the interpreter of jax 0.11 takes less for an error."""
        for slot in range(entries):
            pl.when(blocks > slot)(partial(_wait, refs, f"{ring}_free", slot))

    def _for_each_unit(self, refs: _Refs, do: Callable[[_Unit], None]) -> tuple[jax.Array, jax.Array]:
        """Calls `do` for each of this thread block's units; says how many there were, and of how many blocks."""
        first = lax.axis_index("block")
        num_units = refs.num_items[0] * self.num_kv_heads
        steps = lax.div(num_units - first + (self.tiles.num_blocks - 1), jnp.int32(self.tiles.num_blocks))

        def step(i: jax.Array, blocks_before: jax.Array) -> jax.Array:
            # Heads first: their pages are neighbours in memory. Items last to first: later tokens see more keys, and
            # what takes longest should start first.
            index = num_units - 1 - (first + i * self.tiles.num_blocks)
            index, head = lax.div(index, jnp.int32(self.num_kv_heads)), lax.rem(index, jnp.int32(self.num_kv_heads))
            unit = _Unit(refs.items, i, index, head, blocks_before)
            do(unit)
            return blocks_before + unit.read(Item.NUM_BLOCKS)

        return steps, lax.fori_loop(0, steps, step, jnp.int32(0))

    # --- the producer ---

    @property
    def _fetched(self) -> tuple[str, str]:
        """The rings that K and V are copied into."""
        return ("fetched_k", "fetched_v") if self.tiles.converted else ("k", "v")

    def _copies(self, warp: jax.Array, is_v: int) -> jax.Array:
        """Whether a warp of the producer copies into a ring. Who does not must not wait for its entries.

        It could miss that an entry was free: the others would go on, and it would be in use again.
        """
        first = is_v * _COPIERS
        return (warp >= first) & (warp < first + min(self._pages_per_block, _COPIERS))

    def _produce(self, refs: _Refs, warp: jax.Array, unit: _Unit) -> None:
        """The copies of a unit, as far as this warp starts them: two of the four copy K, and two V."""
        token, heads = unit.read(Item.TOKEN), pl.ds(unit.head * self.group, self.group)
        for w in range(self.tiles.consumers):

            @pl.when(warp == w)
            def _(w: int = w) -> None:
                pl.when(unit.number > 0)(partial(_wait, refs, "q_free", w))
                tokens = pl.ds(token + w * self.tokens, self.tokens)
                plgpu.copy_gmem_to_smem(refs.q.at[tokens, heads], refs.q_stage.at[w], refs.q_ready.at[w])

        row, kv_len, kv_start = unit.read(Item.ROW), unit.read(Item.KV_LEN), unit.read(Item.KV_START)

        @pl.loop(0, unit.read(Item.NUM_BLOCKS))
        def _(j: jax.Array) -> None:
            entry, position = unit.blocks_before + j, kv_start + j * self.tiles.block_kv
            slot = lax.rem(entry, jnp.int32(self.tiles.stages))
            for is_v, ring in enumerate(self._fetched):

                @pl.when(self._copies(warp, is_v))
                def _(is_v: int = is_v, ring: str = ring) -> None:
                    pl.when(entry >= self.tiles.stages)(partial(_wait, refs, f"{ring}_free", slot))
                    for first in range(0, self._pages_per_block, _COPIERS):
                        i = first + lax.rem(warp, jnp.int32(min(self._pages_per_block, _COPIERS)))
                        self._copy_page(refs, 2 * unit.head + is_v, ring, slot, row, position, kv_len, i)

    def _copy_page(
        self, refs: _Refs, head: jax.Array, ring: str, slot: jax.Array, row: Any, position: Any, kv_len: Any, i: Any
    ) -> None:
        """Starts the copy of page `i`, or the piece of one, of the block at `position`.

        Beyond the row's last page it is that page again: what is copied there is not used, but it may be read.
        """
        rows = min(self.page_size, self.tiles.block_kv)
        # As a product, so that the compiler knows it for a multiple of the tiles in shared memory.
        offset = lax.rem(lax.div(position, jnp.int32(rows)), jnp.int32(self.page_size // rows)) * rows
        page = lax.div(lax.min(position + i * rows, kv_len - 1), jnp.int32(self.page_size))
        page_ref = refs.kv_pages.at[refs.page_indices[row, page], pl.ds(offset, rows), head]
        target = getattr(refs, ring).at[slot, pl.ds(i * rows, rows)]
        plgpu.copy_gmem_to_smem(page_ref, target, getattr(refs, f"{ring}_ready").at[slot])

    # --- the converter ---

    def _convert(self, refs: _Refs, unit: _Unit) -> None:
        kv_len, kv_start = unit.read(Item.KV_LEN), unit.read(Item.KV_START)

        @pl.loop(0, unit.read(Item.NUM_BLOCKS))
        def _(j: jax.Array) -> None:
            entry, num_valid = unit.blocks_before + j, kv_len - (kv_start + j * self.tiles.block_kv)
            source, target = (lax.rem(entry, jnp.int32(n)) for n in (self.tiles.stages, self.ring))
            for ring in ("k", "v"):
                _wait(refs, f"fetched_{ring}_ready", source)
                pl.when(entry >= self.ring)(partial(_wait, refs, f"{ring}_free", target))
                converted = getattr(refs, ring).at[target]
                convert.convert(getattr(refs, f"fetched_{ring}").at[source], converted)
                if ring == "v":
                    pl.when(num_valid < self.tiles.block_kv)(partial(convert.zero_from, converted, num_valid))
                plgpu.commit_smem()
                plgpu.barrier_arrive(getattr(refs, f"fetched_{ring}_free").at[source])
                plgpu.barrier_arrive(getattr(refs, f"{ring}_ready").at[target])

    # --- a consumer ---

    def _consume(self, refs: _Refs, w: jax.Array, unit: _Unit) -> None:
        _wait(refs, "q_ready", w)
        refs.q_rows[w] = self._load_rows(refs.q_stage.at[w])
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.q_free.at[w])

        acc = plgpu.layout_cast(jnp.zeros((ROWS, self.head_dim), jnp.float32), _MATRIX)
        row_max = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _COLUMN)
        row_sum = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _COLUMN)
        step = partial(self._attend_to_block, refs, w, unit)
        acc, row_max, row_sum = lax.fori_loop(0, unit.read(Item.NUM_BLOCKS), step, (acc, row_max, row_sum))

        seen = row_sum > 0
        row_sum = jnp.where(seen, row_sum, 1.0)
        acc = acc * lax.broadcast_in_dim(refs.scales[1] / row_sum, acc.shape, [0])
        lse = jnp.where(seen, (row_max + jnp.log2(row_sum)) / _LOG2_E, -jnp.inf)
        slot = (unit.item, unit.head, pl.ds(w * ROWS, ROWS))
        _compat.store(refs.lse.at[slot], lse)
        if self.partial_output:
            _compat.store(refs.out.at[slot], acc)
        else:
            self._store_tokens(refs, w, unit, acc.astype(self.dtype))

    def _attend_to_block(self, refs: _Refs, w: jax.Array, unit: _Unit, j: jax.Array, carry: Any) -> Any:
        acc, row_max, row_sum = carry
        slot = lax.rem(unit.blocks_before + j, jnp.int32(self.ring))
        kv_start = unit.read(Item.KV_START) + j * self.tiles.block_kv
        kv_end, kv_len = kv_start + self.tiles.block_kv, unit.read(Item.KV_LEN)

        _wait(refs, "k_ready", slot)
        s = self._scores(refs.q_rows.at[w], refs.k.at[slot])
        plgpu.barrier_arrive(refs.k_free.at[slot])

        s = s * refs.scales[0]
        if self.soft_cap is not None:
            # tanh(x) = 1 - 2 / (e^2x + 1): the hardware's own tanh is exact to 11 bits only.
            s = self.soft_cap * _LOG2_E * (1.0 - 2.0 / (jnp.exp2(s * (2 * _LOG2_E / self.soft_cap)) + 1.0))
        all_seen = kv_end <= kv_len
        if self.causal:
            all_seen &= kv_end <= unit.read(Item.POSITION) + 1
        if self.sliding_window is not None:
            last_position = unit.read(Item.POSITION) + unit.read(Item.NUM_TOKENS) - 1
            all_seen &= kv_start > last_position - self.sliding_window
        s = lax.cond(all_seen, lambda s: s, partial(self._mask, w, unit, kv_start), s)

        new_max = jnp.maximum(row_max, jnp.max(s, axis=1))
        # exp2(-inf - -inf) would be NaN, in rows that have seen nothing yet.
        finite_max = jnp.where(new_max == -jnp.inf, 0.0, new_max)
        shrink = jnp.exp2(row_max - finite_max)
        p = jnp.exp2(s - lax.broadcast_in_dim(finite_max, s.shape, [0]))
        row_sum = row_sum * shrink + jnp.sum(p, axis=1)
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])

        _wait(refs, "v_ready", slot)
        if not self.tiles.converted:  # the converter has done it
            pl.when(kv_end > kv_len)(partial(self._clean_values, refs, w, slot, kv_len - kv_start))
        acc = self._add_values(acc, p.astype(self.dtype), refs.v.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return acc, new_max, row_sum

    def _scores(self, q: Any, k: Any) -> jax.Array:
        def multiply(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, q, k.transpose((1, 0)))
            return ref[...]

        self._read_plainly(q, k)
        return pl.run_scoped(multiply, _compat.ACC((ROWS, self.tiles.block_kv), jnp.float32))

    def _add_values(self, acc: jax.Array, p: jax.Array, v: Any) -> jax.Array:
        if self.interpret:  # which has no wgmma with an operand in registers; a plain read also shows races
            acc = acc + jnp.dot(p, v[...], preferred_element_type=jnp.float32)
            plgpu.commit_smem()
            return acc
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, v))(_compat.ACC.init(acc))

    def _mask(self, w: jax.Array, unit: _Unit, kv_start: jax.Array, s: jax.Array) -> jax.Array:
        """-inf for keys that a row may not see."""
        iota = partial(plgpu.broadcasted_iota, jnp.int32, s.shape, layout=_MATRIX)
        kv_pos = kv_start + iota(1)
        token = w * self.tokens + lax.shift_right_logical(iota(0), jnp.int32(self.group.bit_length() - 1))
        q_pos = unit.read(Item.POSITION) + token
        seen = kv_pos < unit.read(Item.KV_LEN)
        if self.causal:
            seen &= kv_pos <= q_pos
        if self.sliding_window is not None:
            seen &= kv_pos > q_pos - self.sliding_window
        return jnp.where(seen, s, -jnp.inf)

    def _clean_values(self, refs: _Refs, w: jax.Array, slot: jax.Array, num_valid: jax.Array) -> None:
        """Zeroes values that are no token's: their weight is 0, but what lies there may be NaN."""

        @pl.when(w == 0)
        def _() -> None:
            convert.zero_from(refs.v.at[slot], num_valid)
            plgpu.commit_smem()

        # All consumers of a block meet here, at most once in an item.
        plgpu.barrier_arrive(refs.v_clean)
        plgpu.barrier_wait(refs.v_clean)

    def _store_tokens(self, refs: _Refs, w: jax.Array, unit: _Unit, out: jax.Array) -> None:
        """Writes the item's tokens and no others: what follows in memory is another row's."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous unit's, out of the same stage
        self._store_rows(refs.out_stage.at[w], out)
        plgpu.commit_smem()
        token = unit.read(Item.TOKEN) + w * self.tokens
        num_tokens = jnp.clip(unit.read(Item.NUM_TOKENS) - w * self.tokens, 0, self.tokens)
        heads = pl.ds(unit.head * self.group, self.group)
        # A copy has a static size, so the count is made up of powers of two.
        n = 1 if self.one_token else self.tokens
        while n:
            if n <= self.max_tokens:
                done = lax.div(num_tokens, jnp.int32(2 * n)) * (2 * n)

                @pl.when(num_tokens - done >= n)
                def _(n: int = n, done: jax.Array = done) -> None:
                    plgpu.copy_smem_to_gmem(
                        refs.out_stage.at[w, pl.ds(done, n)], refs.out.at[pl.ds(token + done, n), heads]
                    )

            n //= 2

    # [tokens, group, head_dim] in shared memory as [ROWS, head_dim]. The interpreter can reshape values, not refs.

    def _load_rows(self, ref: Any) -> jax.Array:
        if self.interpret:
            return ref[...].reshape(ROWS, self.head_dim)
        return plgpu.load(ref.reshape(ROWS, self.head_dim), layout=_MATRIX, optimized=False)

    def _store_rows(self, ref: Any, rows: jax.Array) -> None:
        if self.interpret:
            ref[...] = rows.reshape(ref.shape)
        else:
            _compat.store(ref.reshape(ROWS, self.head_dim), rows)

    def _read_plainly(self, *refs: Any) -> None:
        """Under interpretation, reads what wgmma is about to read, which the race detector does not watch."""
        if self.interpret:
            for ref in refs:
                ref[...]
            plgpu.commit_smem()  # a copy may overwrite what was read


def _wait(refs: _Refs, barrier: str, index: Any) -> None:
    plgpu.barrier_wait(getattr(refs, barrier).at[index])


class _Registers(NamedTuple):
    """Per thread. What the producer gives up the others get."""

    producer: int
    consumer: int
    converter: int = 0


# By warpgroups and the consumers among them. At the launch all have the same share of an SM's 65,536: 248, 168 or 128.
_REGISTERS = {
    (2, 1): _Registers(producer=40, consumer=248),
    (3, 2): _Registers(producer=40, consumer=232),
    (3, 1): _Registers(producer=56, consumer=248, converter=200),
    (4, 2): _Registers(producer=56, consumer=200, converter=56),
}
