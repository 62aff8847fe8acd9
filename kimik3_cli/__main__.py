"""Entry point of the console script and of `python -m kimik3_cli`."""

import sys


def run() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        from kimik3_cli.cli.app import main

        return main()
    except KeyboardInterrupt:  # an interrupt while the program is still being imported
        return 130


if __name__ == "__main__":
    sys.exit(run())
