"""Plays sshd for hosts that are namespaces: runs the command that a connection names, with the socket as standard input
and output.
"""
import json
import socket
import subprocess

PORT = 7722


def main() -> None:
    with socket.create_server(("", PORT)) as listener:
        print("listening", flush=True)
        while True:
            peer, _ = listener.accept()
            with peer, peer.makefile("rb", buffering=0) as lines:
                words = json.loads(lines.readline())
                subprocess.Popen(words, stdin=peer, stdout=peer, start_new_session=True)


if __name__ == "__main__":
    main()
