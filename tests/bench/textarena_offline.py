"""A zygote for `textarena_games` whose environments can connect to nothing, as on a machine without a network."""

import os
import socket
import sys

from actor.environments import fork_server


def _refuse(self: socket.socket, address: object) -> None:
    raise OSError(f"no network: {address}")


if __name__ == "__main__":
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    socket.socket.connect = _refuse  # pyright: ignore[reportAttributeAccessIssue]
    fork_server.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
