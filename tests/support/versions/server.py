"""A server of any version with the fake engine of that version's tests: server.py ADDRESS FINGERPRINT."""
import sys
import threading

from allspark_server.access import Access, ModelRoots

try:
    from allspark_server.rpc.service import Service
    from support.fake_engine import FakeEngine
except ModuleNotFoundError:             # protocol version 1
    from fake_engine import FakeEngine

    from allspark_server.service import Service

engine = FakeEngine(interval=0.01, fingerprint=sys.argv[2])
service = Service(engine, [sys.argv[1]], access=Access(insecure=True), roots=ModelRoots(["/"]))
print(service.start()[0], flush=True)
threading.Event().wait()
