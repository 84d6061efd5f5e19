"""Ways: the files and functions of the package that an eager call passes on its way, when it is traced.

`python tests/ways.py` prints a line a call. Nested functions are left out, as they stand in a function that counts.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxreplay as jr

PACKAGE = jr.__file__.rpartition("/")[0]


def ways(call):
    """Files, and functions by file and name, that `call` enters while all caches are empty."""
    found = set()

    def enter(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and "<" not in code.co_qualname:
            found.add((code.co_filename, code.co_qualname))

    jax.clear_caches()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {file for file, _ in found}, found


def calls():
    """The calls of a prioritized step, by name; each changes the state that the next one takes."""
    buffer = jr.ReplayBuffer(capacity=64, sampler=jr.Prioritized(), donate=False)
    tracer = jr.NStep(n=3, gamma=0.99, num_envs=4)
    numbers, flags = jnp.zeros(4), jnp.zeros(4, bool)
    step = numbers, numbers, numbers, flags, flags, numbers
    tracing, state = tracer.init(*step), buffer.init(tracer.spec(*step))

    def trace_and_add():
        return buffer.add(state, tracer.add(tracing, *step)[1])

    filled = buffer.add(state, tracer.add(tracer.add(tracer.add(tracing, *step)[0], *step)[0], *step)[1])
    key, td_errors = jax.random.key(0), jnp.ones(4)
    handles = buffer.sample(filled, key, 4).indices
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    sharded = jr.Sharded(buffer=buffer, mesh=mesh)
    shards = sharded.add(sharded.init(numbers), numbers)
    of_shards = sharded.sample(shards, key, 4).indices
    return {
        "update": lambda: buffer.update(filled, handles, td_errors),
        "sample": lambda: buffer.sample(filled, key, 4),
        "NStep.add, add": trace_and_add,
        "update of Sharded": lambda: sharded.update(shards, of_shards, td_errors),
    }


def main():
    jax.config.update("jax_num_cpu_devices", 2)
    for name, call in calls().items():
        files, functions = ways(call)
        print(f"{name}: {len(files)} files, {len(functions)} functions")
        if "--list" in sys.argv:
            print(*(f"  {file[len(PACKAGE) + 1 :]} {function}" for file, function in sorted(functions)), sep="\n")


if __name__ == "__main__":
    main()
