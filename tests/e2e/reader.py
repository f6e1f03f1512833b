"""A prefill process for the tests: attaches the handles it is given and holds their leases until it ends.

    python -m tests.e2e.reader ATTACH_SOCKET < HANDLES.json

Prints one line of JSON, the sha256 of each handle's mapped bytes, when all are attached; then reads standard
input to its end (the test closes it, or kills this process first).
"""

from __future__ import annotations

import hashlib
import json
import sys

import msgspec

from shm.client import connect
from shm.messages import Handle


def main() -> None:
    """See the module's text."""
    handles = msgspec.json.decode(sys.stdin.readline(), type=list[Handle])
    with connect(sys.argv[1]) as session:
        views = [session.attach(handle) for handle in handles]
        print(json.dumps([hashlib.sha256(view.numpy().tobytes()).hexdigest() for view in views]), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
