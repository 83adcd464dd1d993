"""Times one file: hwnas benchmark"""

from hwnas.face import call

call(__name__, "benchmark")
