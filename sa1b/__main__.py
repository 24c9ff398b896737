"""Entry point of `python -m sa1b <verb>`, the same as `sa1b <verb>`."""

from sa1b.cli import main

if __name__ == "__main__":
    main()
