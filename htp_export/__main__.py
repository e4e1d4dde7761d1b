"""``python -m htp_export`` is ``htp-export``."""

import signal
import sys


def run() -> int:
    """Run the command line, and say so where it is interrupted outside of a command.

    Returns:
        The exit status.
    """
    try:
        from htp_export.command.main import main

        status = main()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # All is done and said. While Python shuts down, it would report an interrupt as an
            # ignored exception.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        print("htp-export: error: interrupted", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(run())
