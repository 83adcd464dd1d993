"""Search spaces: what a sampler may choose, and the architectures that come of it."""
