"""Names that other libraries use, with their counterparts here. Only the package's error for a name uses them."""

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
}
