"""``python -m htp_export`` is ``htp-export``."""

import sys


def run() -> int:
    """Run the command line, and say so where it is interrupted before the commands are imported.

    Returns:
        The exit status.
    """
    try:
        from htp_export.cli.main import main
    except KeyboardInterrupt:
        print("htp-export: error: interrupted", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
