"""rejax's SAC, original and ported: Pendulum-v1 with the settings of rejax's repository.

pip install -e . rejax==0.1.3 gymnax==0.0.9
python examples/ports/rejax_sac.py           # 8 seeds, minutes on two CPU cores
python examples/ports/rejax_sac.py --speed   # time of short runs, with buffers of several sizes
python examples/ports/rejax_sac.py --check   # checks of both versions against correct values
python examples/ports/rejax_sac.py --short   # a minute, mostly compilation

Tested with jax 0.10.2. Pendulum ends only at its time limit. The second port, `EndedSAC`, bootstraps there.
"""

from typing import Any

import measure
import rejax_checks
from rejax import SAC
from rejax_adapter import Ended, KeepsEnds, OnReplayBuffer, Replay, run

TASK = "Pendulum-v1"
AGENT = {"agent_kwargs": {"activation": "swish"}, "learning_rate": 0.01, "polyak": 0.98, "normalize_observations": True}
SIZES = {"num_envs": 1, "buffer_size": 10_000, "fill_buffer": 256, "batch_size": 256, "num_epochs": 1}
STEPS = {"total_timesteps": 10_000, "eval_freq": 500, "skip_initial_evaluation": True}
SETTINGS = {**AGENT, **SIZES, **STEPS}


class PortedSAC(OnReplayBuffer, SAC):
    """The same agent on another buffer."""


class EndedSAC(PortedSAC):
    """Bootstraps from the final observation at a time limit; its environment is wrapped in `KeepsEnds`."""

    def collect_transitions(self, ts: Any) -> tuple[Any, Any]:
        ts, step = super().collect_transitions(ts)
        return ts, step._replace(next_obs=ts.env_state.obs, done=ts.env_state.terminated)


PORTS = {
    "buffer only": (PortedSAC, measure.count_lines(Replay, OnReplayBuffer, PortedSAC)),
    "truncation": (EndedSAC, measure.count_lines(Replay, OnReplayBuffer, PortedSAC, Ended, KeepsEnds, EndedSAC)),
}

if __name__ == "__main__":
    few = {"total_timesteps": 1_000}
    run("SAC", SAC, PORTS, TASK, SETTINGS, short=few, check=lambda: rejax_checks.time_limits(SAC, EndedSAC))
