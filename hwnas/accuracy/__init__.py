"""What a network can do: data sets, training recipes, accuracy estimators."""
