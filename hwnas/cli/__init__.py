"""The parts that the commands share: overrides in, progress and tables out, errors in one line."""
