"""Mutants that change nothing that a user could see, by name, and why."""

BESIDE = "of a slot that does not exist nothing is kept, whatever is read there"
NONE_NEGATIVE = "no slot is negative"
EQUIVALENT = {
    "reservoir_buffer.ReservoirBuffer._claim: 1 -> 2": BESIDE,
    "reservoir_buffer.ReservoirBuffer._claim: 2 -> 3": "any numbers below those of handles are",
    "reservoir_buffer.ReservoirBuffer._claim: 0 -> 1 (#2)": BESIDE,
    "reservoir_buffer.ReservoirBuffer._claim: True -> False": "it is a promise",
    "reservoir_buffer.ReservoirBuffer._claim: False -> True": NONE_NEGATIVE,
    "reservoir_buffer.ReservoirBuffer._claim: False -> True (#2)": NONE_NEGATIVE,
    "reservoir_buffer.ReservoirBuffer._claim: False -> True (#3)": NONE_NEGATIVE,
    "reservoir_buffer.ReservoirBuffer._claim: False -> True (#4)": NONE_NEGATIVE,
    "testing._check_rows: "
    "indices, probabilities, weights = map(np.asarray, (indices, probabilities, weights)) -> pass": (
        "JAX's arrays compare and index as NumPy's do"
    ),
    "_levels.fold: x.shape[-1] % 2 -> ((x.shape[-1]) // (2))": "of an even axis what is appended is empty",
    "_levels.ascend: num_parents <= DENSE * node.size -> ((num_parents) < (DENSE * node.size))": (
        "both ways are right"
    ),
    "weights.importance_weights: 0.0 -> 1.0": "rows that were not drawn are masked in the line below",
    "weights.importance_weights: jnp.where(drawn, log_probability, jnp.inf) -> (log_probability)": (
        "it is 0 for rows that were not drawn, and at most 0 for the others"
    ),
    "weights.effective_sample_size: 1.0 -> 3.0": "it divides weights that are all 0",
    "tracing._Tracer._rollout: 1 -> 2 (#2)": "any negative start stands for none",
    "sequence_buffer.SequenceBuffer._read: "
    "jnp.where(rows >= self.length, rows - self.length, rows) -> (rows - self.length)": (
        "negative rows count from the end"
    ),
    "_common/checks.check_like: True -> False": "the structures have been found equal, so the leaves are as many",
    "difficulty_pools/_queues._joining_rows: start_queue == num_queues -> ((start_queue) != (num_queues))": (
        "any first guess leads to the same end"
    ),
    "difficulty_pools/_queues._joining_rows: "
    "(queue < num_queues) & (start_queue == num_queues) -> (start_queue == num_queues)": (
        "any first guess leads to the same end"
    ),
}
