"""What the user holds of things on the workers or in shared memory: ``Data``, ``Shared``, ``Resident``."""
