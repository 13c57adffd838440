"""`python -m atoll`, and `atoll`: the command line. It takes a moment to load, in which Ctrl-C is answered, too."""

import sys


def main() -> None:
    try:
        from .cli import main as command_line
    except KeyboardInterrupt:
        sys.stderr.write("atoll: stopped (Ctrl-C): nothing was begun\n")
        sys.exit(130)
    command_line()  # which answers for itself


if __name__ == "__main__":
    main()
