"""Request traces: reading, checking, making. Imports nothing of the other packages."""
