"""Detection: where objects of each class are in an image, as boxes."""
