"""Names that other libraries use, with their counterparts here. Only errors for names use them."""

from typing import Any

SEQUENCES = "jr.SequenceBuffer(length=..., num_envs=..., sequence_length=...)"
NAMES_FOR = {
    "jr.ReplayBuffer(capacity=..., sampler=jr.Prioritized())": (
        "PER PrioritizedReplayBuffer PrioritizedBuffer make_prioritised_flat_buffer"
    ),
    "jr.ReplayBuffer(capacity=...)": "UniformReplayBuffer SimpleReplayBuffer make_flat_buffer make_item_buffer",
    SEQUENCES: "TrajectoryBuffer make_trajectory_buffer",
    SEQUENCES + " with windows='episodes'": "EpisodeBuffer",
    SEQUENCES + " with sampler=jr.Prioritized()": "make_prioritised_trajectory_buffer",
    "jr.Prioritized": "Prioritised",
    "jr.NStep": "NStepTracer",
    "jr.hindsight": "HER",
    # Methods and fields.
    "add(state, items)": "extend insert append",
    "update(state, sample.indices, td_errors)": "update_priorities update_priority set_priorities",
    "sample(state, key, batch_size)": "sample_batch",
    "size(state)": "get_stored_size len",
    "sample.items": "experience",
}
FOR_NAMES = {name: advice for advice, names in NAMES_FOR.items() for name in names.split()}


def advice(name: str) -> str:
    """The end of the error for a name that does not exist."""
    return f"; use {FOR_NAMES[name]}" if name in FOR_NAMES else ""


def missing(self: Any, name: str) -> Any:
    """Raise the error for an attribute that an object does not have."""
    found = f"{type(self).__name__!r} object has no attribute {name!r}"
    raise AttributeError(f"{found}{advice(name)}", name=name, obj=self)
