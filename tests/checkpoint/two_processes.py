"""Programs of two processes of `jax.distributed`."""

import socket

import jax
from faults import LONG


def _body(index, port, num_devices, function, arguments, connection):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    assert (len(jax.devices()), len(jax.local_devices())) == (2 * num_devices, num_devices)
    connection.send(function(*arguments))
    jax.distributed.shutdown()


def start(children, num_devices, function, *arguments):
    """Both processes, each of so many devices, with connections that give what the function returns."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    started = []
    for index in range(2):
        ours, theirs = children.Pipe(duplex=False)
        given = index, port, num_devices, function, arguments, theirs
        process = children.Process(target=_body, args=given, daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    return started


def results(started):
    """What the function returned in each."""
    found = []
    for _, connection in started:
        assert connection.poll(LONG), "hangs"
        found.append(connection.recv())
    for process, _ in started:
        process.join(LONG)
        assert process.exitcode == 0
    return found
