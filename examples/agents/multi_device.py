"""The DQN of dqn.py on several devices and in several processes; a killed run can be resumed.

pip install -e '.[examples]'
python examples/agents/multi_device.py --devices 4                    # four GPUs; without any, four devices of the CPU
python examples/agents/multi_device.py --devices 4 --processes 2      # as on two hosts with two devices each
python examples/agents/multi_device.py --devices 4 --checkpoint run   # when restarted, resumes from it
python examples/agents/multi_device.py --short --devices 4            # a few seconds, to see that it runs

Environments, replay items and the rows of every batch are sharded over the devices; parameters are replicated. The
agent is the same as in dqn.py, line for line. Only its buffer differs, and the sharding of its state over a mesh.
"""

import argparse
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import experiment
import jax
import jax.numpy as jnp
from experiment import Parser, integer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxreplay as jr

SAVE_EVERY = 5  # intervals

# dqn is imported by the functions below: it imports gymnax, which makes arrays, and devices have to be chosen by then.


def make_layout(mesh: Mesh) -> dict[str, Any]:
    """Shardings of a carry's leaves, as a pytree prefix. The first axis is the seeds, except for returns."""
    import dqn

    def over(*axes: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    each, envs = over(), over(None, "data")
    tracer = jr.transitions.NStepState(steps=over(None, None, "data"), cursor=each, count=each)
    learner = {"params": each, "target_params": each, "opt": each, "key": each}
    state = dqn.State(env=envs, obs=envs, episode_return=envs, tracer=tracer, buffer=envs, **learner)
    return {"state": state, "returns": over(None, None, "data"), "done": each}


def make_run(config: Any, mesh: Mesh, seed: int, seeds: int) -> tuple[Callable, Callable]:
    """Jitted functions begin() -> carry, and advance(carry) -> carry and the episodes of one more interval.

    A carry is the whole state of a run: the agents' state, the returns [warmup + steps, seeds, num_envs], NaN for steps
    not yet made, and the number of intervals done.
    """
    import dqn
    import gymnax

    first_steps, next_steps = experiment.make_loop(dqn.make_agent(config, *gymnax.make("CartPole-v1")), config)
    steps = config.steps // config.intervals

    def begin() -> dict[str, Any]:
        state, returns = first_steps(jax.random.split(jax.random.key(seed), seeds))
        returns = jnp.concatenate([returns, jnp.full((config.steps, *returns.shape[1:]), jnp.nan)])
        return {"state": state, "returns": returns, "done": jnp.zeros((), jnp.int32)}

    def advance(carry: dict[str, Any]) -> tuple[dict[str, Any], tuple[jax.Array, jax.Array]]:
        t = carry["done"] * steps
        state, new = next_steps(carry["state"], t + jnp.arange(steps))
        returns = jax.lax.dynamic_update_slice_in_dim(carry["returns"], new, config.warmup + t, axis=0)
        return {"state": state, "returns": returns, "done": carry["done"] + 1}, experiment.count_episodes(new)

    layout = make_layout(mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return (
        jax.jit(begin, out_shardings=layout),
        jax.jit(advance, donate_argnums=0, out_shardings=(layout, everywhere)),
    )


def train(args: argparse.Namespace, process: int = 0, coordinator: str | None = None) -> None:
    """Train, from the checkpoint if there is one. All processes make the same calls, and the first one reports."""
    if coordinator is not None:
        local = args.devices // args.processes
        jax.config.update("jax_num_cpu_devices", local)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        mine = list(range(process * local, (process + 1) * local))
        jax.distributed.initialize(coordinator, args.processes, process, local_device_ids=mine)
        threading.Thread(target=end_with_parent, daemon=True).start()
    import dqn

    mesh = Mesh(jax.devices()[: args.devices], ("data",))
    buffer = jr.Sharded(buffer=dqn.make_buffer(args.per, args.learning_steps), mesh=mesh)
    config = dqn.Config(buffer=buffer, steps=args.learning_steps, num_envs=args.num_envs)
    run = {"config": config, "seed": args.seed, "seeds": args.seeds}  # a checkpoint belongs to these settings

    start = time.perf_counter()
    begin, advance = make_run(config, mesh, args.seed, args.seeds)
    carry = None
    if args.checkpoint is not None:
        try:
            carry = jr.restore(args.checkpoint, run, jax.eval_shape(begin))
        except FileNotFoundError:
            pass  # the first start
        except ValueError as error:  # from a run with other arguments, or damaged
            sys.exit(f"error: {error}" if process == 0 else 1)
    carry = begin() if carry is None else carry
    done, per_interval = int(carry["done"]), config.steps // config.intervals * args.num_envs * args.seeds
    total = config.intervals * per_interval
    progress = experiment.Progress(total, initial=done * per_interval, disable=process > 0)
    advance = advance.lower(carry).compile()
    progress.bar.unpause()
    ready = time.perf_counter()
    while done < config.intervals:
        carry, episodes = advance(carry)
        done += 1
        progress.update(per_interval, *episodes)
        if args.checkpoint is not None and (done % SAVE_EVERY == 0 or done == config.intervals):
            jr.save(args.checkpoint, run, carry)
    returns = multihost_utils.process_allgather(carry["returns"], tiled=True)
    progress.bar.close()
    if process == 0:
        timing = f"compile and begin {ready - start:.1f} s, train {time.perf_counter() - ready:.1f} s"
        name = "prioritized" if args.per else "uniform"
        path, title = args.out / f"multi_device_{name}.png", f"CartPole-v1, {config.n}-step double DQN, {name} replay"
        title += f", devices: {args.devices}, processes: {args.processes}"
        settings = {"last_episodes": dqn.LAST_EPISODES, "goal": dqn.SOLVED, "ylim": (0, 520)}
        experiment.summarize(path, title, name, returns, timing, **settings)


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def start_processes(args: argparse.Namespace) -> None:
    """Run `train` in processes of this machine. If one fails, end all of them and exit with an error."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=train, args=(args, i, coordinator), name=f"{i}") for i in range(args.processes)]
    for process in running:
        process.start()
    try:
        while running:
            wait([process.sentinel for process in running])
            for process in running:
                if process.exitcode:
                    sys.exit(f"process {process.name} has failed (exit code {process.exitcode}); all are ended")
            running = [process for process in running if process.exitcode is None]
    finally:
        for process in running:
            process.kill()  # jax.distributed ignores SIGTERM; checkpoints stay intact


def parse_args() -> argparse.Namespace:
    parser = Parser("The double DQN of dqn.py on CartPole-v1, over the devices of a mesh.")
    parser.add_experiment(seeds=8)
    parser.add_count("steps", "environment steps per seed", 250_000, 3_200)
    parser.add_argument("--uniform", dest="per", action="store_false", help="uniform replay, not prioritized")
    parser.add_argument("--num-envs", type=integer(1, 2**15), default=16, help="per seed (16)")
    parser.add_argument("--devices", type=integer(1, 1024), help="total number of devices (all)")
    parser.add_argument("--processes", type=integer(1, 64), default=1, help="processes, started on this machine (1)")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint folder; the run resumes from it (none)")
    args = parser.parse()
    if args.processes > 1:
        if args.devices is None or args.devices % args.processes:
            parser.error(f"argument --devices: must be a multiple of the {args.processes} processes")
        jax.config.update("jax_platforms", "cpu")  # for this process; the others use the devices
    else:
        if args.devices is not None:
            jax.config.update("jax_num_cpu_devices", args.devices)
        found = jax.device_count()
        args.devices = args.devices or found
        if args.devices > found:
            parser.error(f"argument --devices: {args.devices} is too many, there are {found}")
    import dqn

    args.learning_steps = parser.learning_steps(args.steps, args.num_envs, dqn.Config)
    dealt = {"environments": args.num_envs, "items of a batch": dqn.Config.batch_size, "items of replay": dqn.CAPACITY}
    for name, size in dealt.items():
        if size % args.devices:
            parser.error(f"argument --devices: {size} {name} cannot be dealt out evenly to {args.devices} devices")
    return args


def main() -> None:
    args = parse_args()
    (train if args.processes == 1 else start_processes)(args)


if __name__ == "__main__":
    main()
