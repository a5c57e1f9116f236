"""What functions capture and how it travels: which objects the ranks hold, and what has changed of each since.

Knows no runtime and sends nothing. ``facets`` compares one object, ``arrays`` the bytes of arrays, ``packing`` pickles,
``book`` remembers what the ranks of one runtime hold, ``modules`` finds the user's modules, ``capture`` tells before
each call whether a function captures anything that has changed.
"""
