"""`python -m atoll`, and `atoll`: the command line. It takes a moment to load, in which Ctrl-C is answered, too."""

import sys


def main() -> None:
    try:
        from .cli import main as command_line

        command_line()
    except KeyboardInterrupt:  # before any verb listens
        sys.stderr.write("atoll: stopped (Ctrl-C): nothing was begun\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
