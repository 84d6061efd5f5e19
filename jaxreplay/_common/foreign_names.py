"""Names that other libraries use, with their counterparts here, for the errors of unknown names."""

from typing import Any

SEQUENCES = "jr.SequenceBuffer(length=..., num_envs=..., sequence_length=...)"

# Each counterpart with the names that stand for it elsewhere.
_NAMES = {
    "jr.ReplayBuffer(capacity=..., sampler=jr.Prioritized())": "PER PrioritizedReplayBuffer PrioritizedBuffer "
    "TensorDictPrioritizedReplayBuffer make_prioritised_flat_buffer",
    "jr.ReplayBuffer(capacity=...)": "UniformReplayBuffer SimpleReplayBuffer TensorDictReplayBuffer ReplayMemory "
    "OutOfGraphReplayBuffer DictReplayBuffer make_flat_buffer make_item_buffer",
    SEQUENCES: "TrajectoryBuffer SequenceReplayBuffer make_trajectory_buffer make_trajectory_queue SliceSampler",
    SEQUENCES + " with windows='episodes'": "EpisodeBuffer EpisodicReplayBuffer",
    SEQUENCES + " with sampler=jr.Prioritized()": "make_prioritised_trajectory_buffer",
    "jr.Prioritized": "Prioritised PrioritizedSampler PrioritizedSamplingDistribution",
    "jr.Uniform": "RandomSampler UniformSamplingDistribution",
    "jr.Uniform(replacement=False)": "SamplerWithoutReplacement",
    "jr.NStep": "NStepTracer NStepReplayBuffer TransitionAccumulator",
    "jr.hindsight": "HER HerReplayBuffer HindsightReplayBuffer",
    # Methods and fields.
    "add(state, items)": "extend insert append push put store remember add_batch",
    "that of the buffer, or of jr.bind(buffer, state)": "add sample update size is_full can_sample",
    "update(state, sample.indices, td_errors)": "update_priorities update_priority set_priorities",
    "sample(state, key, batch_size)": "sample_batch sample_transition_batch batch_size sample_batch_size",
    "clear(state)": "reset empty",
    "size(state)": "get_stored_size get_buffer_size len",
    "jr.save(path, buffer, state)": "dump save_transitions state_dict",
    "jr.restore(path, buffer, like=state)": "load load_transitions load_state_dict",
    "sample.items": "experience data",
    "sample.indices": "index indexes",
    "sample.weights": "weight is_weights",
    # Arguments.
    "capacity": "max_size max_length replay_capacity buffer_size",
    "num_envs": "n_envs add_batch_size",
    "sequence_length": "sample_sequence_length slice_len",
    "stride": "period",
    "sampler=jr.Prioritized(alpha=...)": "alpha beta priority_exponent",
    "td_errors": "priorities",
    "ends (of a buffer), terminated and truncated (of a tracer), or In == 0 (of a TransitionBatch)": "done dones",
    "Rn (of a TransitionBatch), the sum of a window's discounted rewards": "reward rewards",
    "In (of a TransitionBatch), the factor of the bootstrapped value": "discount discounts",
    "S, A and S_next (of a TransitionBatch)": "obs observation action next_obs next_observation",
}
FOR_NAMES = {name: ours for ours, names in _NAMES.items() for name in names.split()}


def advice(name: str) -> str:
    """The end of the error for a name that does not exist."""
    return f"; use {FOR_NAMES[name]}" if name in FOR_NAMES else ""


def missing(self: Any, name: str) -> Any:
    """Raise the error for an attribute that an object does not have."""
    kind = type(self).__name__
    raise AttributeError(f"{kind!r} object has no attribute {name!r}{advice(name)}", name=name, obj=self)
