"""The command ``jacsparse``, and ``python -m jacsparse``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; an error of the user's, or of another process, is one line, and exit status 2."""
    from .cli import app

    try:
        app()
    except (ValueError, TypeError, OSError, ImportError, NotImplementedError, FloatingPointError) as error:
        print(f"jacsparse: {error}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        # The command line loads as little as it can.
        from .distributed import RankError

        if not isinstance(error, RankError):
            raise
        print(f"jacsparse: {error}", file=sys.stderr)
        sys.exit(2)
    except MemoryError as error:
        print(f"jacsparse: there is not enough memory ({error}); name smaller sizes with --input", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
