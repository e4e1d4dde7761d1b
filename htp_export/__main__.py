"""``python -m htp_export`` is ``htp-export``."""

import sys

from htp_export.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
