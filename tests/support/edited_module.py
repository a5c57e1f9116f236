"""A module of the user's, as text: tests write it to a file, edit it and load it again."""

LIBRARY = """
import enum

class Colour(enum.Enum):
    RED = 1

registry = {}

def register(fn):
    registry[fn.__name__] = fn
    return fn

@register
def plus(x):
    return x + 1

class Model:
    def __init__(self):
        self.w = 2.0
    def step(self, x):
        return x * self.w

rate = 1.0
def inner(x):
    return x * rate
def helper(x):
    return inner(x)
"""
