"""Checks and measurements on a GPU, in one command without network:

    make gpu                                      all parts, under nine minutes
    make gpu PARTS="raster loader"                some of them
    python -m benchmarks.gpu --device cpu --tiny  every part at tiny size on a CPU: shows that the code runs

Each part runs in a process of its own with a time limit (`driver.py`), so that a crash, a hang or a lack of
memory ends that part only. A part is a function that records checks and figures (`part.py`); `parts.py` lists
all of them. A table is printed, and benchmarks/results/<gpu>.json written after each part.

Exit code 0: all checks passed; 1: a check failed, or a part did not end well; 2: an argument is not valid;
130: interrupted.
"""
