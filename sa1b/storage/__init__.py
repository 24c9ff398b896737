"""Storage: verified reads of ranges of files and objects, a cache per machine, atomic commits."""
