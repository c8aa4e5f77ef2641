"""A server group with the fake engine, in a process that tests may kill: fake_server.py ADDRESS [FINGERPRINT]."""

import sys
import threading

from fake_core import FakeCore

from allspark_client import AsModelConfig
from allspark_server.access import Access
from allspark_server.service import Service

core = FakeCore(interval=0.02, fingerprint=sys.argv[2] if len(sys.argv) > 2 else "fp")
core.install_model(AsModelConfig("m", "/none"))
core.start_model("m")
service = Service(core, [sys.argv[1]], access=Access(insecure=True))
print(service.start()[0], flush=True)
threading.Event().wait()
