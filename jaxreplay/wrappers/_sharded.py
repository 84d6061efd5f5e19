"""Sharded: a buffer spread over the devices of a mesh."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, cast, overload

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxreplay._common import checks, ring, shards
from jaxreplay._common.checks import check_integer
from jaxreplay._common.devices import on_device_of
from jaxreplay._common.meshes import OnMesh, mesh_here
from jaxreplay._common.xla import alive, jit_method
from jaxreplay.buffers import _later_steps
from jaxreplay.buffers._base import Buffer, S
from jaxreplay.buffers._replay import ReplayState
from jaxreplay.buffers._reservoir import ReservoirState
from jaxreplay.buffers._sample import Sample, check_draw, check_drawn
from jaxreplay.buffers._sequence import SequenceState
from jaxreplay.buffers._shards import part_of, shards_of


@checks.keywords_only
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharded(OnMesh, Generic[S]):
    """A buffer cut into D equal shards, one for each device along an axis of a mesh.

    It has the buffer's methods, on global arrays. A method's docstring says only what differs from the buffer's.

    **Rows.** A batch has D equal parts, in the order of the shards: `add` gives each shard its part (for a
    `SequenceBuffer`, its streams), and each shard draws its part. `batch_size`, `n` and B are multiples of D. Items
    laid out by `items_sharding` never leave their device; devices exchange a few numbers a call. One shard gives bit
    for bit the results of the buffer alone. All methods work in `jax.jit`, `lax.scan` and `jax.vmap`. They also work on
    the devices of several processes, if all processes make the same calls.

    **Law.** A row of the batch is item i with probability P(i) = p_i / (D * total of p in its shard). The weights
    follow this law over the items of all shards: N counts all items, and weights are divided by the largest of any
    shard. Shards may hold different numbers of items with any priorities; weighted means stay unbiased. Rows of an
    empty shard have handle -1, probability 0 and weight 0. New items get the largest priority of all shards.

    **Handles** also name the shard. Give them to `update`, `get`, `set` and `later` in the rows in which they were
    drawn. A handle in another shard's part of the batch is ignored (`get`: zeros), like one whose item was overwritten.

    Attributes:
      buffer: a `ReplayBuffer`, `ReservoirBuffer` or `SequenceBuffer`. Its `capacity`, or `num_envs`, counts all shards
        and is a multiple of D. Eager calls donate the state if its `donate` is True.
      mesh: the devices. Shards are replicated along the mesh's other axes.
      axis: the mesh axis with one device for each shard.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))  # two devices
      >>> buffer = jr.Sharded(buffer=jr.ReplayBuffer(capacity=4), mesh=mesh)
      >>> items = jnp.array([10, 20, 30, 40])
      >>> state = buffer.add(buffer.init(items), items)  # 10 and 20 to the first device
      >>> (buffer.sample(state, jax.random.key(0), batch_size=4).items > 20).tolist()
      [False, False, True, True]
    """

    buffer: Buffer[S]
    mesh: Mesh
    axis: str = "data"

    def __post_init__(self):
        if not isinstance(self.buffer, Buffer):
            raise ValueError(f"buffer={self.buffer!r}: must be a ReplayBuffer, ReservoirBuffer or SequenceBuffer.")
        if not isinstance(self.mesh, Mesh):
            raise ValueError(f"mesh={self.mesh!r}: must be a jax.sharding.Mesh, such as jax.make_mesh returns.")
        if self.axis not in self.mesh.axis_names:
            raise ValueError(f"axis={self.axis!r}: must be one of the mesh's axes, {self.mesh.axis_names}.")
        part_of(self.buffer, self.num_shards)  # for its checks

    @property
    def donate(self) -> bool:
        """True if eager calls donate the state."""
        return self.buffer.donate

    @property
    def num_shards(self) -> int:
        """D, the number of shards."""
        return self.mesh.shape[self.axis]

    @property
    def items_sharding(self) -> NamedSharding:
        """The sharding of items and steps that `add` need not move.

        With several processes, `jax.make_array_from_process_local_data(buffer.items_sharding, rows)` makes the global
        array from the rows of each process.
        """
        return NamedSharding(self.mesh, self._items_spec)

    @property
    def state_sharding(self) -> NamedSharding:
        """The sharding of all leaves of a state, and of a drawn batch."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis))

    def init(self, items: Any) -> S:
        """An empty buffer on the mesh: the leaves of its state have a leading axis [D].

        Raises:
          ValueError: as the buffer's `init`; or the rows are not a multiple of D.
        """
        spec = checks.as_spec(items)
        jax.eval_shape(lambda: self.buffer.init(spec))  # for its checks
        leaves, treedef = jax.tree.flatten(spec)
        with on_device_of(self.state_sharding):
            return _init(self, treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))

    @overload
    def add(
        self: "Sharded[ReplayState]", state: ReplayState, items: Any, *, mask: Any = None, td_errors: Any = None
    ) -> ReplayState: ...

    @overload
    def add(
        self: "Sharded[ReservoirState]",
        state: ReservoirState,
        items: Any,
        key: jax.Array,
        *,
        mask: Any = None,
        td_errors: Any = None,
    ) -> ReservoirState: ...

    @overload
    def add(
        self: "Sharded[SequenceState]",
        state: SequenceState,
        steps: Any,
        *,
        ends: Any = None,
        td_errors: Any = None,
        drawable: Any = None,
    ) -> SequenceState: ...

    def add(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Insert a batch with the buffer's `add`, each shard its part of the rows, with a key of its own from `key`.

        Raises:
          ValueError: as the buffer's `add`; or the rows are not a multiple of D (pad and mask them).
        """
        given = _signature(type(self.buffer)).bind(self.buffer, state, *args, **kwargs)
        _, _, (_, items), *others = given.arguments.items()
        return self._add(state, items, dict(others))

    @jit_method(donates=True)
    def _add(self, state: S, items: Any, others: dict[str, Any]) -> S:
        self._check_state(state)
        items, others = checks.as_arrays((items, others))
        spec, others_spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (items, others))
        jax.eval_shape(self.buffer.add, self.buffer._abstract(spec), spec, **others_spec)  # for its checks
        self._check_divides("batch", jax.tree.leaves(items)[0].shape[self.buffer._batch_axes - 1])
        key = others.pop("key", None)

        def add(state: S, key: jax.Array | None, items: Any, others: dict[str, Any]) -> S:
            own = {} if key is None else {"key": self._shard_key(key)}
            return self._part.add(state, items, **others, **own)

        specs = PartitionSpec(), self._items_spec, self._items_spec
        return self._on_shards(add, specs, state, key, items, others)

    def sample(
        self,
        state: S,
        key: jax.Array,
        batch_size: int,
        *,
        beta: Any = None,
        max_age: jax.Array | int | None = None,
    ) -> Sample:
        """Draw batch_size / D items from each shard.

        Args:
          key: the same in all processes.
          max_age: for a `ReplayBuffer`, each shard draws from its newest max_age / D items, rounded up; `Sample.age` is
            D times the number of later insertions into the item's shard.

        Raises:
          ValueError: an invalid argument, as in the buffer's `sample`; `batch_size` is not a multiple of D; or
            all shards are empty and the call is eager.
        """
        batch_size = check_draw(batch_size, beta, max_age)
        return check_drawn(self, state, self._draw(state, key, batch_size, beta, max_age))

    @jit_method(static=("batch_size",))
    def _draw(self, state: S, key: jax.Array, batch_size: int, beta: Any, max_age: Any) -> Sample:
        self._check_state(state)
        self._check_divides("batch_size", batch_size)
        share = batch_size // self.num_shards

        def draw(state: S, key: jax.Array, beta: Any, max_age: Any) -> Sample:
            one_key = getattr(self.buffer.sampler, "shares_key", False)
            own = key if one_key else self._shard_key(key)
            return self._part._draw(state, own, share, beta, max_age)

        return self._on_shards(draw, (PartitionSpec(),) * 3, state, key, beta, max_age, rows=0)

    def epoch(self, state: S, key: jax.Array, batch_size: int, *, step: jax.Array | int) -> Sample:
        """Batch number `step` of a pass in which each shard passes over its own items, batch_size / D a batch.

        A shard with fewer items than another has rows with handle -1 before the pass ends.

        Raises:
          ValueError: as the buffer's `epoch`; or `batch_size` is not a multiple of D.
        """
        batch_size = check_draw(batch_size)
        check_integer("step", step, 0, 2**31 - 1, "the number of a batch", traced=None)
        return check_drawn(self, state, self._epoch(state, key, batch_size, step))

    @jit_method(static=("batch_size",))
    def _epoch(self, state: S, key: jax.Array, batch_size: int, step: jax.Array | int) -> Sample:
        self._check_state(state)
        self._check_divides("batch_size", batch_size)
        share = batch_size // self.num_shards

        def epoch(state: S, key: jax.Array, step: jax.Array) -> Sample:
            return self._part._epoch(state, self._shard_key(key), share, step)

        return self._on_shards(epoch, (PartitionSpec(),) * 2, state, key, step, rows=0)

    def num_batches(self, state: S, batch_size: int) -> jax.Array:
        """Number of batches of an `epoch`, which is that of the fullest shard, int32 []."""
        batch_size = check_draw(batch_size)
        self._check_divides("batch_size", batch_size)
        return jnp.max(-(-alive(state.ring.size) // (batch_size // self.num_shards)), axis=-1)

    @jit_method(donates=True, handles="indices")
    def update(self, state: S, indices: jax.Array, td_errors: jax.Array) -> S:
        """Give each shard's sampler the TD errors of its part of the batch.

        Args:
          indices: int [B], handles in the rows in which they were drawn.

        Raises:
          ValueError: as the buffer's `update`; or B is not a multiple of D.
        """
        self._check_state(state)
        rows = checks.check_td_errors(indices, td_errors)
        self._check_divides("indices", rows[0].size)
        return self._on_shards(self._part.update, (PartitionSpec(self.axis),) * 2, state, *rows)

    @jit_method(donates=True, handles="indices")
    def set(self, state: S, indices: jax.Array, values: Any, *, mask: jax.Array | None = None) -> S:
        """Write leaves of stored items in place.

        Args:
          indices: int [B], handles in the rows in which they were drawn.

        Raises:
          ValueError: as the buffer's `set`; or B is not a multiple of D.
        """
        self._check_state(state)
        indices = checks.check_indices(indices)
        self._check_divides("indices", indices.size)
        arguments = indices, checks.as_arrays(values), None if mask is None else jnp.asarray(mask)
        for leaf in jax.tree.leaves(arguments):
            checks.check_rows(leaf, indices.size)

        def write(state: S, indices: jax.Array, values: Any, mask: jax.Array | None) -> S:
            return self._part.set(state, indices, values, mask=mask)

        return self._on_shards(write, (PartitionSpec(self.axis),) * 3, state, *arguments)

    def newest(self, state: S, n: int) -> jax.Array:
        """Handles of the newest n / D insertions of each shard, int32 [n], in the order of the shards.

        Raises:
          ValueError: `n` is not a positive multiple of D.
        """
        return self._newest(state, check_integer("n", n, 1, ring.MAX_CAPACITY, "the number of insertions"))

    @jit_method(static=("n",))
    def _newest(self, state: S, n: int) -> jax.Array:
        self._check_state(state)
        self._check_divides("n", n)
        return self._on_shards(lambda state: self._part._newest(state, n // self.num_shards), (), state, rows=0)

    @jit_method(handles="indices")
    def get(self, state: S, indices: jax.Array) -> Any:
        """Items [B, ...] by their handles, int [B], in the rows in which they were drawn; zeros if not stored.

        Raises:
          ValueError: as the buffer's `get`; or B is not a multiple of D.
        """
        return self._of_rows(self._part.get, state, "indices", indices)

    @jit_method(handles="slots")
    def handles(self, state: S, slots: jax.Array) -> jax.Array:
        """`Buffer.handles` of slots within shards, int [B]; each shard has B / D rows, in the order of the shards."""
        return self._of_rows(self._part.handles, state, "slots", slots)

    @jit_method(handles="indices")
    def slots(self, state: S, indices: jax.Array) -> jax.Array:
        """`Buffer.slots` of items within their shards; handles, int [B], in the rows in which they were drawn."""
        return self._of_rows(self._part.slots, state, "indices", indices)

    @jit_method(handles="indices")
    def priorities(self, state: S, indices: jax.Array) -> jax.Array:
        """`Buffer.priorities` of items; handles, int [B], in the rows in which they were drawn."""
        return self._of_rows(self._part.priorities, state, "indices", indices)

    @jit_method(handles="indices")
    def age(self, state: S, indices: jax.Array) -> jax.Array:
        """`Buffer.age` of items; handles, int [B], in the rows in which they were drawn."""
        return self._of_rows(self._part.age, state, "indices", indices)

    def _of_rows(self, method: Callable[..., Any], state: S, name: str, rows: jax.Array) -> Any:
        """A method of each shard for its part of `rows`, the argument `name`."""
        self._check_state(state)
        rows = checks.check_indices(rows, name=name)
        self._check_divides(name, rows.size)
        return self._on_shards(method, (PartitionSpec(self.axis),), state, rows, rows=0)

    def later(self, state: S, key: jax.Array, indices: jax.Array, *, law: Any = "uniform", gamma: Any = 0.99) -> Any:
        """`SequenceBuffer.later` for handles, int [B], in the rows in which they were drawn.

        Raises:
          ValueError: as `SequenceBuffer.later`; or B is not a multiple of D.
        """
        return self._draw_later(state, key, indices, law, _later_steps.checked(self.buffer, law, gamma))

    @jit_method(static=("law",), handles="indices")
    def _draw_later(self, state: S, key: jax.Array, indices: jax.Array, law: str, log_gamma: Any) -> Any:
        self._check_state(state)
        self._check_divides("indices", checks.check_indices(indices).size)

        def later(state: S, key: jax.Array, *others: Any) -> Any:
            return cast(Any, self._part)._draw_later(state, self._shard_key(key), others[0], law, others[1])

        specs = PartitionSpec(), PartitionSpec(self.axis), PartitionSpec()
        return self._on_shards(later, specs, state, key, indices, log_gamma, rows=0)

    def size(self, state: S) -> jax.Array:
        """Number of drawable items in all shards, int32 []."""
        alive(state.ring.size)
        return jnp.sum(jax.vmap(self._part._num_drawable)(state), axis=-1, dtype=jnp.int32)

    def stored_steps(self, state: S) -> jax.Array:
        """Number of steps stored in all shards of a `SequenceBuffer`, int32 []."""
        return jnp.sum(cast(Any, self._part).stored_steps(state), axis=-1, dtype=jnp.int32)

    def is_empty(self, state: S) -> jax.Array:
        """True if no shard holds a drawable item, bool []."""
        return jnp.logical_not(ring.at_least(self.size(state), 1))

    def is_full(self, state: S) -> jax.Array:
        """True if the next insertion overwrites in every shard, bool []."""
        return jnp.all(self._part.is_full(state), axis=-1)

    def can_sample(self, state: S, batch_size: int = 1) -> jax.Array:
        """True if all shards together hold at least `batch_size` drawable items, bool []."""
        batch_size = check_integer("batch_size", batch_size, 0, 2**31 - 1, "a number of items")
        return ring.at_least(self.size(state), batch_size)

    @property
    def _part(self) -> Buffer[S]:
        """The configuration of one shard."""
        return part_of(self.buffer, self.num_shards, self._axis_name)

    @property
    def _axis_name(self) -> str | None:
        """The mapped axis over the shards; None for a single shard."""
        return self.axis if self.num_shards > 1 else None

    def _part_spec(self, spec: Any) -> Any:
        """The spec of one shard's part of items like `spec`."""
        axis = self.buffer._batch_axes - 1
        self._check_divides("batch", jax.tree.leaves(spec)[0].shape[axis])

        def part(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = (*x.shape[:axis], x.shape[axis] // self.num_shards, *x.shape[axis + 1 :])
            return jax.ShapeDtypeStruct(shape, x.dtype)

        return jax.tree.map(part, spec)

    def _shard_key(self, key: jax.Array) -> jax.Array:
        checks.check_key(key)
        return key if self._axis_name is None else jax.random.fold_in(key, shards.index(self._axis_name))

    @property
    def _items_spec(self) -> PartitionSpec:
        return PartitionSpec(*[None] * (self.buffer._batch_axes - 1), self.axis)

    def _check_state(self, state: S) -> None:
        checks.check_state(self, state, self.buffer._state_kind)
        if state.ring.size.shape != (self.num_shards,):
            raise ValueError(
                f"{self.num_shards} shards: this state has leading axes {list(state.ring.size.shape)}; use the buffer "
                "that made it, and jax.vmap for a stack of states."
            )
        self._part._check_state(shards_of(self).part_spec(state))

    def _check_divides(self, name: str, size: int) -> None:
        if size % self.num_shards:
            raise ValueError(
                f"{name}={size}: must be a multiple of {self.num_shards}, the number of shards (mesh axis "
                f"{self.axis!r})."
            )

    def _on_shards(
        self,
        method: Callable[..., Any],
        specs: tuple[PartitionSpec, ...],
        state: S,
        *arguments: Any,
        rows: int | None = None,
    ) -> Any:
        """Apply `method` to each shard's state and its part of the arguments, partitioned by `specs`.

        The method returns a state. With `rows` it returns the shard's part of a batch, whose axis `rows` is divided.
        """

        def on_shard(shard: S, *arguments: Any) -> Any:
            # The vmap removes the leading axis of 1. With reshapes instead, XLA copies the whole storage.
            result = jax.vmap(lambda state: method(state, *arguments))(shard)
            return result if rows is None else jax.tree.map(lambda x: x.reshape(x.shape[1:]), result)

        return self._map(on_shard, (PartitionSpec(self.axis), *specs), state, *arguments, divided=rows or 0)

    def _map(
        self, function: Callable[..., Any], specs: tuple[PartitionSpec, ...], *arguments: Any, divided: int = 0
    ) -> Any:
        """Apply `function` to each device's part of the arguments, partitioned by `specs`.

        The devices' results are parts along the axis `divided`.
        """
        mesh = mesh_here(self.mesh)
        if mesh.axis_types[mesh.axis_names.index(self.axis)] == AxisType.Explicit:
            layout = [NamedSharding(mesh, spec) for spec in specs]
            arguments = tuple(jax.tree.map(jnp.asarray, arguments))
            arguments = tuple(
                jax.tree.map(lambda x, s=s: jax.sharding.reshard(x, s), a)
                for a, s in zip(arguments, layout, strict=True)
            )
        out_specs = PartitionSpec(*[None] * divided, self.axis)
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs)(*arguments)


@functools.cache
def _signature(kind: type[Buffer]) -> inspect.Signature:
    return inspect.signature(kind.add)


def _init_impl(sharded: Sharded[S], treedef: Any, leaves: tuple[tuple[tuple[int, ...], Any], ...]) -> S:
    spec = sharded._part_spec(jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves]))

    def init() -> S:
        shard = sharded._part
        state: Any = shard.init(spec)
        state = dataclasses.replace(state, ring=ring.init(shard._num_slots, sharded.num_shards))
        return jax.tree.map(lambda x: x.reshape(1, *x.shape), state)

    return sharded._map(init, ())


_init = jax.jit(_init_impl, static_argnums=(0, 1, 2))
