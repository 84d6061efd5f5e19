"""Index: keeps a leaf for each slot, and draws slots by the leaves."""

import dataclasses
from typing import Any

import jax

from jaxreplay import sum_tree
from jaxreplay._common import ring
from jaxreplay.sum_tree._restricted import Restricted
from jaxreplay.sum_tree._tree import emptied


@dataclasses.dataclass(frozen=True)
class Index:
    """A leaf for each slot, and the distribution from which a sampler with priorities draws.

    A leaf is priority^alpha, or 0 if the slot may not be drawn. This class keeps the leaves in a sum tree and draws in
    proportion to them. A subclass draws otherwise:

    - It overrides `masses` if each draw may cost O(capacity). All else then follows, from a sum tree of the masses.
    - Else it has arrays of its own, a pytree with an attribute `capacity`, and overrides all methods.

    The arrays are the field `tree` of the sampler's state. Methods take the whole state, so that the distribution may
    depend on settings such as `state.alpha`. `init`, `advance`, `write`, `emptied` and `restrict` return the
    new `tree`.

    Examples:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Best(jr.samplers.Index):
      ...     def masses(self, state):
      ...         leaves = super().masses(state)
      ...         return jnp.where(leaves == jnp.max(leaves), leaves, 0.0)
      >>> @dataclasses.dataclass(frozen=True)
      ... class Greedy(jr.samplers.ByPriority):
      ...     index = Best()
      >>> Greedy().index, Greedy().index.is_proportional
      (Best(), False)
    """

    is_proportional = property(lambda self: type(self).masses is Index.masses, doc="True if the masses are the leaves.")

    def init(self, capacity: int, *, track_minimum: bool = False, track_maximum: bool = False) -> Any:
        """Make the arrays; all leaves are 0.

        Args:
          capacity: number of slots.
          track_minimum: True if `minimum` will be asked for, and the masses are the leaves.
          track_maximum: True if `maximum` will be asked for.

        Examples:
          >>> jr.samplers.Index().init(4).capacity
          4
        """
        return sum_tree.init(capacity, track_minimum=track_minimum, track_maximum=track_maximum)

    def advance(self, state: Any, slots: jax.Array, is_item: jax.Array) -> Any:
        """Note insertions before their `write`; by default there is nothing to note.

        Args:
          state: the sampler's state.
          slots: int32 [B], distinct where in range, in order of insertion.
          is_item: bool [B], True for new items, False for slots that are emptied.

        Examples:
          >>> sampler, both = jr.Prioritized(half_life=1.0), np.array([True, True])
          >>> tree = sampler.index.advance(sampler.init(4), np.array([0, 1]), both)
          >>> int(tree.fading.newest)
          1
        """
        return state.tree

    def write(self, state: Any, slots: jax.Array, leaves: jax.Array, *, is_new: bool, mask: Any = None) -> Any:
        """Set leaves.

        Args:
          state: the sampler's state.
          slots: int32 [B]; outside [0, capacity) they are ignored.
          leaves: float32 [B].
          is_new: True for insertions (static): distinct slots in their order, also those that may not be drawn. False
            for updates: the last occurrence of a repeated slot counts.
          mask: bool [B] for updates; rows where it is False are ignored.

        Examples:
          >>> index, state = jr.samplers.Index(), jr.Prioritized().init(4)
          >>> tree = index.write(state, np.array([2, 2]), np.array([3.0, 1.0]), is_new=False)
          >>> index.masses(state.replace(tree=tree)).tolist()
          [0.0, 0.0, 1.0, 0.0]
        """
        return sum_tree.update(state.tree, slots, leaves, mask=mask, unique_indices=is_new)

    def emptied(self, state: Any) -> Any:
        """All leaves 0 again, in place where XLA can.

        Examples:
          >>> index, state = jr.samplers.Index(), jr.Prioritized().init(4)
          >>> index.masses(state.replace(tree=index.emptied(state))).tolist()
          [0.0, 0.0, 0.0, 0.0]
        """
        return emptied(state.tree)

    def get(self, state: Any, slots: jax.Array) -> jax.Array:
        """Leaves of `slots`, int32 [B] in [0, capacity); float32 [B].

        Examples:
          >>> index, state = jr.samplers.Index(), jr.Prioritized().init(4)
          >>> index.get(state, np.array([2])).tolist()
          [0.0]
        """
        return sum_tree.get(state.tree, slots)

    def maximum(self, state: Any) -> jax.Array:
        """Largest leaf, float32 []; asked for with `max_priority="stored"`.

        Examples:
          >>> sampler = jr.Prioritized(max_priority="stored")
          >>> float(sampler.index.maximum(sampler.init(4)))
          0.0
        """
        return sum_tree.maximum(state.tree)

    def masses(self, state: Any) -> jax.Array:
        """Numbers in proportion to the probabilities of all slots, float32 [capacity]; 0 where the leaf is 0.

        Examples:
          >>> jr.samplers.Index().masses(jr.Prioritized().init(4)).tolist()
          [0.0, 0.0, 0.0, 0.0]
        """
        return sum_tree.leaves(state.tree)

    def restrict(self, state: Any, live: ring.Live) -> Any:
        """The distribution restricted to `live`, for `draw`, `total` and `minimum`.

        Examples:
          >>> index, state = jr.samplers.Index(), jr.Prioritized().init(4)
          >>> live = jr.samplers.Live(jnp.int32(3), jnp.int32(2), capacity=4)
          >>> int(index.restrict(state, live).size)
          2
        """
        return sum_tree.restrict(self._sums(state), live.start, live.size)

    def draw(self, state: Any, bits: Any, *, stratified: bool) -> tuple[jax.Array, jax.Array]:
        """Slots, int32 [B], from `bits` (two uint32 [B]), and their masses, float32 [B]; any slots if `total` is 0.

        Examples:
          >>> index, state = jr.samplers.Index(), jr.Prioritized().init(4)
          >>> slots, leaves = np.array([2, 2]), np.array([3.0, 1.0])
          >>> state = state.replace(tree=index.write(state, slots, leaves, is_new=False))
          >>> bits = tuple(np.zeros((2, 4), np.uint32))
          >>> slots, masses = index.draw(state, bits, stratified=True)
          >>> slots.tolist(), masses.tolist()
          ([2, 2, 2, 2], [1.0, 1.0, 1.0, 1.0])
        """
        return sum_tree.sample_with(self._sums(state), bits, stratified=stratified)

    def total(self, state: Any) -> jax.Array:
        """Sum of the masses, float32 [].

        Examples:
          >>> float(jr.samplers.Index().total(jr.Prioritized().init(4)))
          0.0
        """
        return sum_tree.total(self._sums(state))

    def minimum(self, state: Any) -> jax.Array:
        """Smallest positive mass, float32 []; inf if there is none. Asked for with `normalize="global"`.

        Examples:
          >>> sampler = jr.Prioritized(normalize="global")
          >>> float(sampler.index.minimum(sampler.init(4)))
          inf
        """
        return sum_tree.minimum(self._sums(state))

    def _sums(self, state: Any) -> sum_tree.SumTree | Restricted:
        if self.is_proportional or isinstance(state.tree, Restricted):
            return state.tree
        return sum_tree.of_leaves(self.masses(state), track_minimum=True)
