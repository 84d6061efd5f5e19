"""Code for all parts of the package: checks, storage layouts, ring arithmetic, random bits and hints for XLA."""
