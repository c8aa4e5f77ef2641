"""`shell_client.py HOST WORDS …` plays ssh for hosts that are namespaces; see shell_server.py."""
import json
import os
import selectors
import socket
import sys

PORT = 7722


def main() -> None:
    with socket.create_connection((sys.argv[1], PORT), timeout=3) as peer:
        peer.sendall(json.dumps(sys.argv[2:]).encode() + b"\n")
        peer.settimeout(None)
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ, lambda: (os.read(0, 1 << 16), peer.sendall))
        selector.register(peer, selectors.EVENT_READ, lambda: (peer.recv(1 << 16), sys.stdout.buffer.write))
        while True:
            for key, _ in selector.select():
                data, write = key.data()
                if not data:
                    return
                write(data)
                sys.stdout.flush()


if __name__ == "__main__":
    main()
