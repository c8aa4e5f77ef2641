"""A group with the fake engine in a process that tests may kill: fake_server.py ADDRESS [FINGERPRINT [OF_IMAGES]].

With OF_IMAGES, its model takes images.
"""

import sys
import threading

from allspark_server.access import Access
from allspark_server.rpc.service import Service
from support.fake_engine import FakeEngine

fingerprint, of_images = [*sys.argv[2:], *["fp", ""][len(sys.argv[2:]):]]
engine = FakeEngine(interval=0.02, fingerprint=fingerprint, image_fingerprint=of_images, sees_images=bool(of_images))
service = Service(engine, [sys.argv[1]], access=Access(insecure=True))
print(service.start()[0], flush=True)
threading.Event().wait()
