"""``python -m synk``: prints what synk finds on this machine."""

import argparse

from synk import __version__, info

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m synk", description="Prints what synk sees on this machine.")
    parser.add_argument("--version", action="version", version=f"synk {__version__}")
    parser.parse_args()
    print(info())
