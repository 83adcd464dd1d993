"""The search job: `hwnas search target=xeon_int8`."""

from hwnas.face import call

call(__name__, "search")
