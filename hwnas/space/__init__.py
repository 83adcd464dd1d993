"""Search spaces: the choices of a sampler, and the architectures that follow from them."""
