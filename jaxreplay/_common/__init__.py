"""What all parts of the package use: checks, layouts of storage, random bits, and what XLA must be told."""
