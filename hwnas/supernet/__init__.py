"""One weight-sharing network for a whole search space: trained once, every architecture inherits its weights."""
