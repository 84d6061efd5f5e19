"""Mutants that no default test need notice, by name, and why."""

BESIDE = "of a slot that does not exist nothing is kept, whatever is read there"
NONE_NEGATIVE = "no slot is negative"
PROMISE = "it is a promise, and changes no value"
BOTH_RIGHT = "both ways are right"
AS_MANY = "they are known to be as many"
GPU_ALONE = "it is for a GPU alone, and changes no value"
TEXT = "it is a text for people"
ANY_GUESS = "any first guess leads to the same end"
EQUIVALENT = {
    "_common/checks.check_like: True -> False": "the structures have been found equal, so the leaves are as many",
    '_common/xla.is_tracing: _current_trace(convention="flax") -> _current_trace()': "JAX makes no use of it",
    "_common/duplicates.last_of_each: True -> False": PROMISE,
    "_common/duplicates.last_of_each: lax.sort((numbers, jnp.arange(numbers.size, dtype=jnp.int32)), num_keys=2) -> "
    "lax.sort((numbers, jnp.arange(numbers.size, dtype=jnp.int32)))": "the sort is stable, and the rows are in order",
    "_common/duplicates.last_of_each: numbers.size <= ALL_PAIRS -> ((numbers.size) < (ALL_PAIRS))": BOTH_RIGHT,
    "_common/ring.Ring.newest: jnp.clip(count, 0, self.size) -> jnp.clip(0, count, self.size)": (
        "the larger of 0 and the count comes first in both"
    ),
    "wrappers/_mixture.Mixture._weigh: True -> False": AS_MANY,
    "buffers/_reservoir.ReservoirBuffer._claim: 1 -> 2": BESIDE,
    "buffers/_reservoir.ReservoirBuffer._claim: 2 -> 3": "any numbers below those of handles are",
    "buffers/_reservoir.ReservoirBuffer._claim: 0 -> 1 (#2)": BESIDE,
    "buffers/_reservoir.ReservoirBuffer._claim: True -> False": PROMISE,
    "buffers/_reservoir.ReservoirBuffer._claim: False -> True": NONE_NEGATIVE,
    "buffers/_reservoir.ReservoirBuffer._claim: False -> True (#2)": NONE_NEGATIVE,
    "buffers/_reservoir.ReservoirBuffer._claim: False -> True (#3)": NONE_NEGATIVE,
    "buffers/_reservoir.ReservoirBuffer._claim: False -> True (#4)": NONE_NEGATIVE,
    "buffers/_reservoir.ReservoirBuffer._own_handles: False -> True": NONE_NEGATIVE,
    "buffers/_reservoir.ReservoirBuffer._own_handles: "
    'state.handles.at[slots].get(mode="promise_in_bounds", wrap_negative_indices=False) -> '
    'state.handles.at[slots].get(mode="promise_in_bounds")': NONE_NEGATIVE,
    "buffers/_chosen_sequences.advance: new, old, gone = xla.read_once((new, old, gone)) -> pass": GPU_ALONE,
    "curricula/_pool_moves._entries: "
    "counts & (limit[rows.start] < 0) -> ((counts) | (limit[rows.start] < 0))": ANY_GUESS,
    "curricula/_pool_moves._entries: limit[rows.start] < 0 -> ((limit[rows.start]) <= (0))": ANY_GUESS,
    "buffers/_uses.Uses.update: (slots >= 0) & (slots < capacity) -> ((slots >= 0) | (slots < capacity))": BESIDE,
    "samplers/_weights.effective_sample_size: 1.0 -> 3.0": "it divides weights that are all 0",
    "samplers/_weights.effective_sample_size: 1.0 -> 3.0 (#2)": "it divides a sum that is 0",
    "samplers/_weights.importance_weights: 0.0 -> 1.0": "rows that were not drawn are masked in the line below",
    "samplers/_weights.importance_weights: jnp.where(drawn, log_probability, jnp.inf) -> (log_probability)": (
        "it is 0 for rows that were not drawn, and at most 0 for the others"
    ),
    "sum_tree/_levels.ascend: children.size // fanout <= max(DENSE * node.size, FEW) -> "
    "((children.size // fanout) < (max(DENSE * node.size, FEW)))": BOTH_RIGHT,
    "sum_tree/_range._sums_at_ends: restricted.size > 0 -> ((restricted.size) >= (0))": (
        "both ends of an empty run are in one node, and the second's value counts"
    ),
    "testing/_buffers.check_rows: "
    "indices, probabilities, weights = map(np.asarray, (indices, probabilities, weights)) -> pass": (
        "JAX's arrays compare and index as NumPy's do"
    ),
    "transitions/_n_step.NStep._rollout: 1 -> 2 (#2)": "any negative start stands for none",
    '__main__.main: parser.add_argument("checkpoint", help="the path passed to jr.save") -> '
    'parser.add_argument("checkpoint")': TEXT,
    "_common/checks.as_count: 1 -> 2": "no item has that age",
    "_common/xla.after: 1.0 -> 3.0": "any number below 0 will do",
    "_common/xla.read_once: lax.platform_dependent(*leaves, cuda=barrier, rocm=barrier, "
    "default=lambda *leaves: leaves) -> "
    "lax.platform_dependent(*leaves, rocm=barrier, default=lambda *leaves: leaves)": GPU_ALONE,
    "buffers/_base.Buffer.handles: 0 -> 1 (#2)": BESIDE,
    "buffers/_later_steps.geometric: fallen < -0.5 -> ((fallen) <= (-0.5))": BOTH_RIGHT,
    "buffers/_reservoir._plus: 1 -> 2 (#3)": "no run adds as many items",
    "buffers/_state.kind.sizes: x.minima is None -> ((x.minima) is not (None))": "it is only compared with itself",
    "buffers/_uses.Uses.update: "
    'self.of_slots.at[jnp.where(inside, slots, 0)].get(mode="promise_in_bounds", wrap_negative_indices=False) -> '
    'self.of_slots.at[jnp.where(inside, slots, 0)].get(mode="promise_in_bounds")': NONE_NEGATIVE,
    "checkpoint/_checkpoint._check: 1 -> 2": "any number above 0 will do",
    "checkpoint/_checkpoint._check_same: json.dumps(content, sort_keys=True) -> json.dumps(content)": (
        "all processes write it in one order"
    ),
    'checkpoint/_files.Writing.__init__: super().__init__(name="jaxreplay save") -> super().__init__()': TEXT,
    'checkpoint/_files.load: _file_of(folder, name, "") -> _file_of(folder, "", name)': "both are joined to one path",
    "curricula/_tasks.Tasks.probabilities: total > 0 -> ((total) >= (0)) (#2)": "what is divided by 0 is not selected",
    "datasets/_rows.transitions: 2**31 - 1 -> ((2**31) + (1))": "nobody has memory for as many rows",
    "inspection/_diagnostics._masses: x[None] <= tops[:, None] -> ((x[None]) < (tops[:, None]))": (
        "at a point of the curve, both lines that meet there have its value"
    ),
    "sum_tree/_levels.last_occurrence: rows > 2**24 -> ((rows) >= (2**24))": BOTH_RIGHT,
    "sum_tree/_range._sums_at_ends: fanout >= _levels.WIDE -> ((fanout) > (_levels.WIDE))": BOTH_RIGHT,
    "testing/_buffers.same: chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6) -> "
    "chex.assert_trees_all_close(found, expected, atol=1e-6)": "results of the tests are nearer than that",
    "transitions/_windows._at: num_rows == 1 or is_small(leaf) -> ((num_rows == 1) and (is_small(leaf)))": BOTH_RIGHT,
    "wrappers/_limiter.Limiter.passes: change > 0 -> ((change) >= (0))": "a change of 0 has passed above",
    "wrappers/_mixture.Mixture._pairs: True -> False": AS_MANY,
    "wrappers/_turns.Turns.__init__: 0 -> 1": "it is only compared with itself",
}

# What several processes do: a slow test was seen to fail.
KILLED_BY_SLOW = {
    "checkpoint/_migration._on_host: x = multihost_utils.process_allgather(x, tiled=True) -> pass": (
        "test_two_processes_one_of_them_killed_and_both_resumed_equal_one_process"
    )
}
