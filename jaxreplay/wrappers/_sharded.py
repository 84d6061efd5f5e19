"""Sharded: a buffer spread over the devices of a mesh."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Generic

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxreplay._common import checks, devices, meshes
from jaxreplay._common.calls import Call, forwarded
from jaxreplay.buffers import SequenceBuffer
from jaxreplay.buffers._base import Buffer
from jaxreplay.buffers._sample import BATCH_SIZE
from jaxreplay.buffers._shards import part_of, shards_of
from jaxreplay.buffers._state import S, Sized, check_once


@checks.config
class Sharded(Sized, Generic[S]):
    """A buffer cut into D equal shards, one for each device along an axis of a mesh.

    It has the buffer's methods, on global arrays. A method's docstring says only what differs from the buffer's.

    **Rows.** A batch has D equal parts, in the order of the shards: `add` gives each shard its part (for a
    `SequenceBuffer`, its streams), and each shard draws its part. `batch_size`, `n` and B are multiples of D. Items
    laid out by `items_sharding` never leave their device; devices exchange a few numbers a call. One shard gives bit
    for bit the results of the buffer alone. All methods work in `jax.jit`, `lax.scan` and `jax.vmap`. They also work on
    the devices of several processes, if all processes make the same calls.

    **Distribution.** A row of the batch is item i with probability P(i) = p_i / (D * total of p in its shard). The
    weights follow it over the items of all shards: N counts all items, and weights are divided by the largest of any
    shard. Shards may hold different numbers of items with any priorities; weighted means stay unbiased. Rows of an
    empty shard have handle -1, probability 0 and weight 0. New items get the largest priority of all shards.

    **Handles** also name the shard. Give them to `update`, `get`, `set` and `later` in the rows in which they were
    drawn. A handle in another shard's part of the batch is ignored (`get`: zeros), like one whose item was overwritten.
    A `Mixture` takes them in any order.

    **Draws.** Give the same key in all processes. In a `ReplayBuffer` `Sample.age` is D times the number of later
    insertions into the item's shard, to which `max_age` applies; in a `SequenceBuffer` ages count the sequences of a
    stream, which is in one shard. In a pass of `epoch`, a shard with fewer items than another has rows with handle
    -1 before the pass ends.

    **Errors** are as in the buffer's methods; and a `ValueError` if rows are not a multiple of D.

    Attributes:
      buffer: a `ReplayBuffer`, `ReservoirBuffer` or `SequenceBuffer`. Its `capacity`, or `num_envs`, counts all shards
        and is a multiple of D. Eager calls donate the state if its `donate` is True.
      mesh: the devices. Shards are replicated along the mesh's other axes.
      axis: the mesh axis with one device for each shard.

    Examples:
      >>> mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))  # two devices
      >>> buffer = jr.Sharded(buffer=jr.ReplayBuffer(capacity=4), mesh=mesh)
      >>> items = np.array([10, 20, 30, 40])
      >>> state = buffer.add(buffer.init(items), items)  # 10 and 20 to the first device
      >>> (buffer.sample(state, key, batch_size=4).items > 20).tolist()
      [False, False, True, True]
    """

    buffer: Buffer[S]
    mesh: Mesh
    axis: str = "data"
    is_sharded: ClassVar[bool] = True

    def _check_fields(self) -> None:
        if not isinstance(self.buffer, Buffer):
            raise ValueError(f"buffer={checks.brief(self.buffer)}: must be a buffer; give a Mixture Sharded ones.")
        if not isinstance(self.mesh, Mesh):
            raise ValueError(f"mesh={self.mesh!r}: must be a jax.sharding.Mesh(jax.devices(), ({self.axis!r},)).")
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
        return NamedSharding(self.mesh, PartitionSpec(*[None] * (self.buffer._batch_axes - 1), self.axis))

    @property
    def state_sharding(self) -> NamedSharding:
        """The sharding of all leaves of a state, and of a drawn batch."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis))

    def init(self, items: Any) -> S:
        """An empty buffer on the mesh: the leaves of its state have a leading axis [D].

        Raises:
          ValueError: as the buffer's `init`; or the rows are not a multiple of D.
        """
        leaves, treedef = jax.tree.flatten(checks.as_spec(items))
        return devices.init_on(self.state_sharding, lambda: _init(self, treedef, tuple(leaves)))

    def add(self, state: S, *args: Any, **kwargs: Any) -> S:
        """Insert a batch with the buffer's `add`, each shard its part of the rows, with a key of its own from `key`.

        Raises:
          ValueError: as the buffer's `add`; or the rows are not a multiple of D (pad and mask them).
        """
        return _forwarded(type(self.buffer).add, "")(self, state, *args, **kwargs)

    sample = forwarded(Buffer.sample, "Draw batch_size / D items of each shard; max_age / D in a `ReplayBuffer`.")
    epoch = forwarded(Buffer.epoch, "Batch number `step` of a pass in which each shard passes over its own items.")
    update = forwarded(Buffer.update, "Give each shard's sampler the TD errors of its part of the batch.")
    clear = forwarded(Buffer.clear, "Empty all shards; the storage stays, and handles go on.")
    set = forwarded(Buffer.set, "Write leaves of stored items in place, each shard its part of the rows.")
    newest = forwarded(Buffer.newest, "Handles of the newest n / D insertions of each shard, int32 [n], by shard.")
    get = forwarded(Buffer.get, "Items [B, ...] by their handles, int [B]; zeros if not stored.")
    handles = forwarded(Buffer.handles, "`Buffer.handles` of slots within shards, int [B]; each shard has B / D rows.")
    slots = forwarded(Buffer.slots, "`Buffer.slots`, within its shard, of each of the handles, int [B].")
    priorities = forwarded(Buffer.priorities, "`Buffer.priorities` of the handles, int [B].")
    age = forwarded(Buffer.age, "`Buffer.age` of the handles, int [B].")
    later = forwarded(SequenceBuffer.later, "`SequenceBuffer.later` of the handles, int [B].")
    end_streams = forwarded(SequenceBuffer.end_streams, "Close streams, each shard its part of the mask.")

    def num_batches(self, state: S, batch_size: int) -> jax.Array:
        """Number of batches of an `epoch`, the largest number of any shard, int32 []."""
        batch_size = checks.check_integer("batch_size", batch_size, *BATCH_SIZE)
        self._check_divides("batch_size", batch_size)
        return self._reduced(jnp.max, self._part.num_batches, state, batch_size // self.num_shards)

    def size(self, state: S) -> jax.Array:
        """Number of drawable items in all shards, int32 []."""
        return self._reduced(_sum, self._part.size, state)

    def stored_steps(self, state: S) -> jax.Array:
        """Number of steps stored in all shards of a `SequenceBuffer`, int32 []."""
        part: Any = self._part
        return self._reduced(_sum, part.stored_steps, state)

    def is_full(self, state: S) -> jax.Array:
        """True if the next insertion overwrites in every shard, bool []."""
        return self._reduced(jnp.all, self._part.is_full, state)

    def _reduced(self, reduce: Callable[..., jax.Array], method: Callable[..., jax.Array], state: S, *args: Any) -> Any:
        """The results of a method of each shard, reduced by `reduce(results, axis=)`."""
        check_once(self, state)
        return reduce(jax.vmap(lambda shard: method(shard, *args))(state), axis=0)

    @property
    def num_slots(self) -> int:
        """Number of slots of a shard, which `slots` numbers within each."""
        return self._part.num_slots

    @property
    def _part(self) -> Buffer[S]:
        """The configuration of one shard."""
        return part_of(self.buffer, self.num_shards, self.axis if self.num_shards > 1 else None)

    def _part_spec(self, spec: Any) -> Any:
        """The spec of one shard's part of items like `spec`."""
        axis = self.buffer._batch_axes - 1
        size = checks.leading_axes(spec, axis + 1, "a batch")[axis]
        self._check_divides("batch", size)
        part = (size // self.num_shards,)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[:axis] + part + x.shape[axis + 1 :], x.dtype), spec)

    def _check_state(self, state: S) -> None:
        checks.check_state(self, state, self.buffer._state_kind)
        if (axes := list(state.ring.size.shape)) != [self.num_shards]:
            found = f"{self.num_shards} shards: this state has leading axes {axes}"
            raise ValueError(f"{found}; use the buffer that made it, and jax.vmap for a stack of states.")
        self._part._check_state(shards_of(self).part_spec(state))

    def _check_divides(self, name: str, size: int) -> None:
        if size % self.num_shards:
            raise ValueError(f"{name}={size}: must be a multiple of {self.num_shards}, the size of axis {self.axis!r}.")

    def _run(self, name: str, call: Call, state: S, arguments: dict[str, Any]) -> Any:
        """The buffer's method `name` on each shard and its part of the rows."""
        part, method = self._part, getattr(type(self.buffer), name)
        static = {x: arguments.pop(x) for x in call.every_static}
        if call.num_rows:
            self._check_divides(call.num_rows, static[call.num_rows])
            static[call.num_rows] //= self.num_shards
        axis = self.buffer._batch_axes - 1 if call.is_batch else 0
        specs = dict.fromkeys(arguments, PartitionSpec())
        if call.rows:
            specs |= dict.fromkeys(call.rows, PartitionSpec(*[None] * axis, self.axis))
            self._check_divides(call.rows[0], checks.num_rows(call.rows, arguments, axis))

        def on_shard(shard: S, arguments: dict[str, Any]) -> Any:
            # The vmap removes the leading axis of 1. With reshapes instead, XLA copies the whole storage.
            result = self._on_part(jax.vmap(lambda state: method.body(part, state, **arguments, **static)), shard)
            return result if call.donates else jax.tree.map(lambda x: x.reshape(x.shape[1:]), result)

        return self._map(on_shard, (PartitionSpec(self.axis), specs), state, arguments)

    def _on_part(self, method: Callable[[Any], Any], argument: Any) -> Any:
        """The result of a method of one shard; its errors describe the shard's part of the arguments."""
        try:
            return method(argument)
        except ValueError as error:
            raise ValueError(f"each of {self.num_shards} shards: {error}") from error

    def _map(self, function: Callable[..., Any], specs: tuple[Any, ...], *arguments: Any) -> Any:
        """Apply `function` to each device's part of the arguments, partitioned by `specs`; join parts of the result."""
        mesh = meshes.mesh_here(self.mesh)
        if self.axis in mesh.explicit_axes:

            def laid_out(spec: PartitionSpec, argument: Any) -> Any:
                sharding = NamedSharding(mesh, spec)
                return jax.tree.map(lambda x: jax.sharding.reshard(jnp.asarray(x), sharding), argument)

            arguments = jax.tree.map(laid_out, specs, arguments)
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(self.axis))(*arguments)


_sum = functools.partial(jnp.sum, dtype=jnp.int32)
_forwarded: Any = functools.cache(forwarded)  # compiles once for each class of buffers


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _init(sharded: Sharded[S], treedef: Any, leaves: tuple[jax.ShapeDtypeStruct, ...]) -> S:
    spec = sharded._part_spec(jax.tree.unflatten(treedef, leaves))

    def init() -> S:
        return jax.tree.map(lambda x: x.reshape(1, *x.shape), sharded._on_part(sharded._part.init, spec))

    return sharded._map(init, ())
