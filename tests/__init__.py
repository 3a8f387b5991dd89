"""The tests. Their processes, and those that they start, wait a second at most for a name server.

(torch asks for the name of whoever connects to its store, and ``::ffff:127.0.0.1`` is in no file: where a question to
the name server is lost now and then, as on the machine of these tests, every tenth call would take five seconds more.)
"""

import os

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
