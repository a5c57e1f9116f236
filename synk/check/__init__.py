"""``python -m synk.check``: what of synk works on this machine, in plain sentences, and a file for a bug report."""
