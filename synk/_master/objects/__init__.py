"""What the user holds of what lives on the workers or in shared memory: ``Data``, ``Shared``, ``Resident``."""
