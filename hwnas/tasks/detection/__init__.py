"""Detection: the objects of each class in an image are found, as boxes."""
