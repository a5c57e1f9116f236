"""``python -m synk``: print what synk sees on this machine."""

from synk import info

if __name__ == "__main__":
    print(info())
