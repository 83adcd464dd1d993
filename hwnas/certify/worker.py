"""One more process on the trainings of a certificate: python -m hwnas.certify.worker FOLDER (of hwnas.certify)"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    """Train what no other process is at; errors as one line."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from hwnas.certify.plan import read_plan
    from hwnas.certify.truth import work
    from hwnas.errors import HwnasError

    try:
        plan = read_plan(Path(sys.argv[1]))
        if plan is not None:
            work(plan, lambda: None, wait=False)
    except HwnasError as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
