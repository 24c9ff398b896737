"""How bytes are read and published. Local files; object stores take their place behind the same names."""
