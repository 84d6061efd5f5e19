"""Names that other libraries use, with their counterparts here. Only errors for names use them."""

from typing import Any

PRIORITIZED = "jr.ReplayBuffer(capacity=..., sampler=jr.Prioritized())"
UNIFORM = "jr.ReplayBuffer(capacity=...)"
SEQUENCES = "jr.SequenceBuffer(length=..., num_envs=..., sequence_length=...)"

FOR_NAMES = {
    "PER": PRIORITIZED,
    "PrioritizedReplayBuffer": PRIORITIZED,
    "PrioritizedBuffer": PRIORITIZED,
    "make_prioritised_flat_buffer": PRIORITIZED,
    "UniformReplayBuffer": UNIFORM,
    "SimpleReplayBuffer": UNIFORM,
    "make_flat_buffer": UNIFORM,
    "make_item_buffer": UNIFORM,
    "TrajectoryBuffer": SEQUENCES,
    "EpisodeBuffer": SEQUENCES + " with windows='episodes'",
    "make_trajectory_buffer": SEQUENCES,
    "make_prioritised_trajectory_buffer": SEQUENCES + " with sampler=jr.Prioritized()",
    "Prioritised": "jr.Prioritized",
    "NStepTracer": "jr.NStep",
    "HER": "jr.hindsight",
    # Methods and fields.
    "extend": "add(state, items)",
    "insert": "add(state, items)",
    "append": "add(state, items)",
    "update_priorities": "update(state, sample.indices, td_errors)",
    "update_priority": "update(state, sample.indices, td_errors)",
    "set_priorities": "update(state, sample.indices, td_errors)",
    "sample_batch": "sample(state, key, batch_size)",
    "get_stored_size": "size(state)",
    "len": "size(state)",
    "experience": "sample.items",
}


def advice(name: str) -> str:
    """The end of the error for a name that does not exist."""
    return f"; use {FOR_NAMES[name]}" if name in FOR_NAMES else ""


def missing(self: Any, name: str) -> Any:
    """Raise the error for an attribute that an object does not have."""
    found = f"{type(self).__name__!r} object has no attribute {name!r}"
    raise AttributeError(f"{found}{advice(name)}", name=name, obj=self)
