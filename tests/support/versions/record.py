"""Records what a client and a server of one version say to each other:

    python record.py TREE FILE      TREE: a checkout with its stubs built; FILE: gets JSON

Both sides are that tree's: its client, and its service around the fake engine of its tests.
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import script
import wire

SERVER = Path(__file__).with_name("server.py")
LOST_AFTER = 6      # tokens of the request [5, 5, 5]


def main():
    """Records into the file."""
    from allspark_client import ClientEngine, convert
    from allspark_client._proto import allspark_pb2 as pb

    tree, file = Path(sys.argv[1]).resolve(), sys.argv[2]
    lost = []

    def breaks(sessions):
        if lost or len(sessions) != 1:
            return False
        starts = [pb.SessionRequest.FromString(wire.base64.b64decode(data)).start
                  for side, data in sessions[0] if side == "client"]
        ids = [start.id for start in starts if list(start.request.input_ids.ids) == [5, 5, 5]]
        answers = [pb.SessionResponse.FromString(wire.base64.b64decode(data))
                   for side, data in sessions[0] if side == "server"]
        count = sum(len(elements.ids) for answer in answers for event in answer.events if event.id in ids
                    for elements in event.elements)
        count += sum(request in ids for answer in answers for request in answer.tokens.requests)
        if count >= LOST_AFTER:
            lost.append(True)
        return bool(lost)

    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, str(SERVER), f"unix:{folder}/s", "fp"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True,
                                   env={**os.environ, "PYTHONPATH": f"{tree}:{tree}/tests"})
        try:
            with wire.recording(f"unix:{folder}/p", process.stdout.readline().strip(), breaks) as record:
                with ClientEngine(f"unix:{folder}/p", reconnect_timeout=10) as engine:
                    results = script.run(engine)
        finally:
            process.kill()
            process.wait()
    Path(file).write_text(json.dumps({"protocol": convert.PROTOCOL, "results": results, **record}, indent=0) + "\n")


if __name__ == "__main__":
    main()
