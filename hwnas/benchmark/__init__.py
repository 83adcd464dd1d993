"""Times one file: python -m hwnas.benchmark"""
