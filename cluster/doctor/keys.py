"""Which applications have keys in Ray, and which run? For a process of its own: Ray may hang.

    python -m cluster.doctor.keys

Prints one JSON object, or says on stderr why no Ray cluster can be asked.
"""

from __future__ import annotations

import json
import sys

from cluster import local_ray
from cluster.errors import ClusterError


def main() -> int:
    local_ray.prefer()
    from cluster.application import Applications, connect
    from cluster.ray_services import all_keys

    try:
        running = Applications(connect()).details()["applications"]
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"keys": all_keys(), "applications": sorted(running)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
