"""Where a run is told: a module for each destination, whose `send` writes a `Record` there."""
