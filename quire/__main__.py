"""The `quire` command."""

import signal
import sys

# The processes that a server starts would import the script that started this one, and with it all commands, were it
# not known as a module called __main__.
sys.modules["__main__"].__spec__ = __spec__

# Ctrl-C ends the process without a word while modules are imported: some turn KeyboardInterrupt into other errors.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from quire.engine.garbage_collection import relax_gc  # noqa: E402

relax_gc()  # before most modules are imported, whose objects stay

from quire.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
