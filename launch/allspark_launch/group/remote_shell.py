"""mpirun's remote shell: remote_shell.py HOST COMMAND …. The supervisor's agent on that host runs the command, so all
processes of the group there are children of the agent. Needs only the standard library.
"""
import json
import os
import socket
import sys


def main() -> None:
    """Passes the command to the supervisor."""
    host, *command = sys.argv[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.connect(os.environ["ALLSPARK_SUPERVISOR"])
        supervisor.send(json.dumps({"launch": host, "command": " ".join(command)}).encode())


if __name__ == "__main__":
    main()
