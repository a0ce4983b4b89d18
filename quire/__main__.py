"""The `quire` command."""

import signal

# Ctrl-C ends the process without a word while modules are imported: some turn KeyboardInterrupt into other errors.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from quire.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
