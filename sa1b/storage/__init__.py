"""How bytes are read and published: checked ranges of files and objects, copies per machine, atomic files."""
