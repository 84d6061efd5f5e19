"""Programs of two processes of `jax.distributed`."""

import socket

import jax
from faults import LONG, Child


def _body(index, port, num_devices, function, arguments, connection):
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    assert (len(jax.devices()), len(jax.local_devices())) == (2 * num_devices, num_devices)
    connection.send(function(*arguments))
    jax.distributed.shutdown()


def start(children, num_devices, function, *arguments):
    """Both processes, each of so many devices, which send what the function returns."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return [Child(children, _body, index, port, num_devices, function, arguments) for index in range(2)]


def results(started):
    """What the function returned in each."""
    found = []
    for child in started:
        assert child.ours.poll(LONG), "hangs"
        found.append(child.ours.recv())
    assert [child.ended() for child in started] == [0, 0]
    return found
