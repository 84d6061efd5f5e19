"""The content of a buffer as a Minari data set: pip install 'jaxreplay[datasets]'."""

import gymnasium
import jax
import minari
import numpy as np

import jaxreplay as jr

num_envs, num_steps = 4, 300
envs = gymnasium.make_vec("CartPole-v1", num_envs=num_envs)
envs.action_space.seed(0)
buffer = jr.SequenceBuffer(length=200, num_envs=num_envs, sequence_length=2)


def episodes(buffer, replay):
    """Stored episodes, stream by stream; the oldest of a stream may lack its start."""
    handles = buffer.newest(replay, int(buffer.size(replay)))
    # Each row and the next, [n, 2, ...]; the streams alternate.
    pairs = jax.tree.map(np.asarray, buffer.get(replay, handles))
    for env in range(num_envs):
        stream = {name: x[env::num_envs] for name, x in pairs.items()}
        rows = {name: x[:, 0] for name, x in stream.items()}
        steps = np.flatnonzero(rows["step"])
        over = rows["terminated"][steps] | rows["truncated"][steps]
        for at in filter(len, np.split(steps, np.flatnonzero(over) + 1)):
            last = stream["observation"][at[-1], 1]
            terminated = rows["terminated"][at]
            yield minari.data_collector.EpisodeBuffer(
                observations=np.append(rows["observation"][at], last[None], axis=0),
                actions=rows["action"][at],
                rewards=rows["reward"][at],
                terminations=terminated,
                # An episode that goes on is cut at its last stored observation.
                truncations=(at == at[-1]) & ~terminated,
            )


obs, over, replay = envs.reset(seed=0)[0], np.zeros(num_envs, bool), None
for _ in range(num_steps):
    action = envs.action_space.sample()
    # A call after an episode resets; the last observation is a row without a step.
    next_obs, reward, terminated, truncated, _ = envs.step(action)
    row = {"observation": obs, "action": action, "reward": reward, "step": ~over}
    row |= {"terminated": terminated, "truncated": truncated}
    row = jax.tree.map(lambda x: np.asarray(x)[None], row)
    if replay is None:
        replay = buffer.init(row)
    replay = buffer.add(replay, row)
    obs, over = next_obs, terminated | truncated

dataset = minari.create_dataset_from_buffers(
    "cartpole/replay-v0",
    list(episodes(buffer, replay)),
    observation_space=envs.single_observation_space,
    action_space=envs.single_action_space,
)
lengths = [len(episode) for episode in dataset.iterate_episodes()]
print(f"{len(lengths)} episodes of {min(lengths)} to {max(lengths)} steps written")
