"""`python -m sa1b <verb>` is `sa1b <verb>`."""

from sa1b.cli import main

if __name__ == "__main__":
    main()
