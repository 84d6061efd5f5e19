"""Names that other libraries use, with their counterparts here. Only error messages use them."""

from typing import Any

PRIORITIZED = "jr.ReplayBuffer(capacity=..., sampler=jr.Prioritized())"
UNIFORM = "jr.ReplayBuffer(capacity=...)"
SEQUENCES = "jr.SequenceBuffer(length=..., num_envs=..., sequence_length=...)"
UPDATE = "update(state, sample.indices, td_errors)"
ADD = "add(state, items)"

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
}
FOR_METHODS = {
    "update_priorities": UPDATE,
    "set_priorities": UPDATE,
    "update_priority": UPDATE,
    "insert": ADD,
    "push": ADD,
    "append": ADD,
    "extend": ADD,
    "sample_batch": "sample(state, key, batch_size)",
}
FOR_ARGUMENTS = {
    "max_length": "capacity",
    "max_size": "capacity",
    "buffer_size": "capacity",
    "size": "capacity",
    "alpha": "sampler=jr.Prioritized(alpha=...)",
    "priority_exponent": "sampler=jr.Prioritized(alpha=...)",
    "beta": "sampler=jr.Prioritized(beta=...)",
    "gamma": "jr.NStep(n=..., gamma=...)",
    "n_step": "jr.NStep(n=..., gamma=...)",
    "batch_size": "sample(state, key, batch_size)",
    "sample_batch_size": "sample(state, key, batch_size)",
    "min_length": "can_sample(state, batch_size)",
    "device": "jax.default_device, or items on the device for init",
}
FOR_ARGUMENTS_OF_SEQUENCES = FOR_ARGUMENTS | {
    "capacity": "length",
    "max_length": "length",
    "max_size": "length",
    "buffer_size": "length",
    "size": "length",
    "max_length_time_axis": "length",
    "add_batch_size": "num_envs",
    "sample_sequence_length": "sequence_length",
    "period": "stride",
}


def missing(owner: str, name: str, known: dict[str, str]) -> AttributeError:
    """The error for an attribute that does not exist."""
    advice = f"; use {known[name]}" if name in known else ""
    return AttributeError(f"{owner} has no attribute {name!r}{advice}", name=name)


def check_arguments(cls: type, kwargs: dict[str, Any], known: dict[str, str]) -> None:
    """Raise a `TypeError` for arguments that have another name here."""
    fields = cls.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
    for name in kwargs:
        if name not in fields and name in known:
            raise TypeError(f"{cls.__name__}: no argument {name!r}; use {known[name]}")
