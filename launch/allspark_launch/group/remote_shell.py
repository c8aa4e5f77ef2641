"""What mpirun starts daemons on other hosts by: remote_shell.py HOST COMMAND …. The supervisor's agent there runs the
command, so that all processes of the group on that host are the agent's. A script of the standard library alone.
"""
import json
import os
import socket
import sys


def main() -> None:
    host, *command = sys.argv[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.connect(os.environ["ALLSPARK_SUPERVISOR"])
        supervisor.send(json.dumps({"launch": host, "command": " ".join(command)}).encode())


if __name__ == "__main__":
    main()
