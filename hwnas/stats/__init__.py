"""Statistics: intervals, rank correlation, Pareto fronts."""
