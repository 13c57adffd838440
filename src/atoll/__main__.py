"""`python -m atoll`, and `atoll`: the command line. Ctrl-C is also answered while it loads."""

import sys


def main() -> None:
    try:
        from .cli import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("atoll: Interrupted. Run the same command again.\n")
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
