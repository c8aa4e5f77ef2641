"""A server group with the fake engine in a process that tests may kill: fake_server.py ADDRESS [FINGERPRINT]."""

import sys
import threading

from allspark_server.access import Access
from allspark_server.rpc.service import Service
from support.fake_engine import FakeEngine

engine = FakeEngine(interval=0.02, fingerprint=sys.argv[2] if len(sys.argv) > 2 else "fp")
service = Service(engine, [sys.argv[1]], access=Access(insecure=True))
print(service.start()[0], flush=True)
threading.Event().wait()
