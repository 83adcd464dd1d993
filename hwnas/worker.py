"""Joins a search as one more worker: python -m hwnas.worker run=DIR, by the name it had in earlier versions."""

from hwnas.search.worker import command

if __name__ == "__main__":
    raise SystemExit(command())
