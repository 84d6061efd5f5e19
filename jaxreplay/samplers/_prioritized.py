"""Prioritized: proportional prioritization, P(i) proportional to priority^alpha."""

from jaxreplay._common import checks
from jaxreplay.samplers._by_priority import ByPriority


@checks.config
class Prioritized(ByPriority):
    """Proportional prioritization, after Schaul et al. 2016 (Prioritized Experience Replay, sections 3.3 and 3.4).

    An item is drawn with probability P(i) = p_i^alpha / sum_j p_j^alpha (in float32, see `jaxreplay.sum_tree.sample`),
    where p = max(|td_error|, floor) + epsilon is its priority. A new item gets the priority of its initial TD error, or
    `max_priority` if that is unknown. The weight of a draw is (N P(i))^-beta.

    LAP (Fujimoto et al. 2020, An Equivalence between Loss Functions and Non-Uniform Sampling in Experience Replay,
    section 4.1) is `Prioritized(alpha=0.4, beta=0.0, epsilon=0.0, floor=1.0, max_priority="stored")` with a Huber loss.

    `sample` can override beta. `alpha`, `epsilon` and `floor` are the first values of arrays of the state, which
    `state.sampler.replace(alpha=alpha)` changes before the first `add`. So each lane of `jax.vmap` may have its own.

    A non-finite TD error only increments the state's counter `rejected`. Positive p^alpha are clipped to
    [2^-63, 2^63 / capacity], so that no sum overflows. If every p is 0, sampling is uniform and all weights are 1. A p
    counts as 0 if it is negative or NaN, and p^alpha as the least if alpha is NaN, as a replaced setting may be;
    `jaxreplay.diagnostics` tells.

    Attributes:
      alpha: exponent of the priorities, at least 0; 0 draws uniformly.
      beta: exponent of the weights in [0, 1], or an `optax.Schedule` of the number of `update` calls so far, an
        int32 [], such as `optax.linear_schedule(0.4, 1.0, 200_000)`; its result is clipped. A call that names no stored
        item, as in a step without a draw, does not count.
      epsilon: added to |td_error|, at least 0.
      floor: lower bound of |td_error|, at least 0.
      max_priority: priority of new items, before alpha. "ever" is the running maximum, which starts at 1 and never
        falls. "stored" is the maximum over stored items (1 if none is above 0) and costs a tree of maxima. A number
        is used as it is.
      normalize: divide the weights by the largest of the "batch", by the largest of any stored item ("global"), or not
        at all (None).
      stratified: draw once from each of batch_size equal parts of the total priority, instead of independently. The
        rows of the batch are then in slot order: permute them (`jax.random.permutation`) before a split into
        minibatches, or each minibatch comes from one part of the buffer.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(epsilon=0.0))
      >>> items = np.array([10, 20, 30, 40])
      >>> td_errors = np.array([0.0, 0.0, -2.0, 0.0])
      >>> state = buffer.add(buffer.init(items), items, td_errors=td_errors)
      >>> buffer.sample(state, jax.random.key(0), batch_size=4).items.tolist()
      [30, 30, 30, 30]
    """
